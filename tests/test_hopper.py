"""What the Hopper kernels are told: tiles of rows for any groups, and sizes of tiles for any shapes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import autotune
from pallas_kernels.hopper.launch import SHARED_MEMORY
from pallas_kernels.hopper.schedule import cut
from pallas_kernels.hopper.tiles import MODELS, TABLE, Problem, candidates, choose

PATTERNS = np.array(list(itertools.product((0, 1), repeat=8)))


def check_schedule(schedule, bounds, rows, tile):
    """Every row is owned once, by a tile of its group that a copy can start at."""
    real, everything = schedule.counts
    owner = np.searchsorted(bounds[1:], np.arange(rows), side="right")
    owned = []
    for index in range(everything):
        group, first, start, end = (column[index] for column in schedule[:4])
        assert first % 8 == 0
        assert first <= start < end <= first + tile
        assert (owner[start:end] == group).all()
        assert (index < real) == (group < len(bounds) - 1)
        owned += range(start, end)
    assert owned == list(range(rows))
    assert everything <= len(schedule.group)
    assert (np.diff(schedule.end) >= 0).all()


@pytest.mark.parametrize(("rows", "tile"), [(64, 64), (128, 64), (400, 128)])
def test_every_pattern_of_empty_groups_is_cut(rows, tile):
    sizes = np.random.default_rng(0).multinomial(rows - 7, np.ones(8) / 8, size=len(PATTERNS)) * PATTERNS
    bounds = np.pad(np.cumsum(sizes, 1), ((0, 0), (1, 0))).astype(np.int32)
    schedules = jax.tree.map(np.asarray, jax.vmap(lambda one: cut(one, rows, tile))(bounds))
    for number, own in enumerate(bounds):
        check_schedule(jax.tree.map(lambda column, number=number: column[number], schedules), own, rows, tile)


@pytest.mark.parametrize("rows", [0, 1, 65, 256])
def test_one_group_has_all_rows(rows):
    bounds = np.array([0, 0, rows, rows], np.int32)
    check_schedule(jax.tree.map(np.asarray, cut(jnp.asarray(bounds), 256, 64)), bounds, 256, 64)


def problems():
    for shape in MODELS.values():
        for rows in (16, 256, 1024):
            yield Problem(1, 2, 2, shape.width, shape.expert_width, rows)
            yield Problem(1, 1, 1, shape.expert_width, shape.width, rows)
            yield Problem(2, 3, 3, shape.width, shape.expert_width, rows)
            yield Problem(2, 2, 1, shape.expert_width, shape.width, rows)
            yield Problem(0, 1, 1, rows, shape.expert_width, shape.width)


def test_tiles_fit_the_shape_and_shared_memory():
    for problem in problems():
        for tiles in (choose(problem), *candidates(problem)):
            assert problem.columns % tiles.columns == 0
            operands = max(problem.operands, 1) * tiles.rows + problem.matrices * tiles.columns
            assert tiles.stages * operands * 128 + tiles.rows * 256 < SHARED_MEMORY
            assert tiles.stages >= 2
            assert problem.accumulators * tiles.columns <= 256


def test_a_measured_entry_is_preferred(monkeypatch):
    problem = Problem(1, 1, 1, 2048, 768, 1000)
    monkeypatch.setitem(TABLE, problem._replace(rows=1024).key, [64, 64, 3])
    assert choose(problem) == (64, 64, 3)
    assert choose(problem._replace(rows=1025)) != (64, 64, 3)


def test_autotune_refuses_without_a_hopper_gpu(capsys):
    assert autotune.main() == 1
    assert "cpu is no Hopper GPU" in capsys.readouterr().err
