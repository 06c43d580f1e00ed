"""Tests of the Hopper kernels' tile walk, tile sizes, tuning and launches, without a GPU."""

import functools
import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_dot, grouped_mlp, leave_multiprocessors
from pallas_kernels.hopper import autotune, persistent_kernel, row_product_kernel, weight_gradient_kernel
from pallas_kernels.hopper.multiprocessors import multiprocessors
from pallas_kernels.hopper.persistent_kernel import SHARED_MEMORY_BYTES, TileSizes
from pallas_kernels.hopper.tile_sizes import (
    MODELS,
    ModelShape,
    Problem,
    candidate_tile_sizes,
    choose_tile_sizes,
    estimate_cycles,
)
from pallas_kernels.hopper.tile_table import VARIABLE, empty_table, write_table
from pallas_kernels.hopper.tile_walk import group_offsets, walk_tiles

PATTERNS = np.array(list(itertools.product((0, 1), repeat=8)))


@functools.partial(jax.jit, static_argnames=("rows", "tile", "padding", "distance", "column_tiles"))
def visited(sizes, *, rows, tile, padding=True, first=0, distance=1, column_tiles=1):
    """Return the visits of a walk, ``[visits, 6]``: number, group, first row, start, end and column of the tile."""
    table = jax.new_ref(jnp.full((80, 6), -1))

    def of_tile(place, column, step):
        table[step] = jnp.stack([*place, column])
        return step + 1

    visits = (first, distance, column_tiles)
    walk_tiles(group_offsets(sizes, rows), len(sizes) + padding, tile, visits, of_tile)
    return table[...]


def check_tiles(sizes, rows, tile):
    """Check that exactly one tile of its group owns every row, and that all tiles start at a multiple of 8."""
    result = np.asarray(visited(jnp.asarray(sizes, jnp.int32), rows=rows, tile=tile))
    owner = np.searchsorted(np.cumsum(sizes), np.arange(rows), side="right")
    owned = []
    for index, (number, group, first, start, end, _) in enumerate(result[result[:, 0] >= 0]):
        assert number == index
        assert first % 8 == 0
        assert first <= start < end <= first + tile
        assert (owner[start:end] == group).all()
        owned += range(start, end)
    assert owned == list(range(rows))


@pytest.mark.parametrize(("rows", "tile"), [(64, 64), (128, 64), (400, 128)])
def test_walk_tiles_cuts_every_pattern_of_empty_groups(rows, tile):
    sizes = np.random.default_rng(0).multinomial(rows - 7, np.ones(8) / 8, size=len(PATTERNS)) * PATTERNS
    for own in sizes:
        check_tiles(own, rows, tile)


@pytest.mark.parametrize("rows", [0, 1, 65, 256])
def test_walk_tiles_cuts_all_rows_of_one_group(rows):
    check_tiles([0, rows, 0], 256, 64)


def test_walk_tiles_shares_tiles_of_rows_and_columns_among_blocks():
    sizes, shape = jnp.array([3, 0, 130, 64, 1], jnp.int32), {"rows": 208, "tile": 64, "column_tiles": 3}
    alone = np.asarray(visited(sizes, **shape))
    alone = alone[alone[:, 0] >= 0]
    # Groups of 3, 130, 64 and 1 rows and 10 rows of padding have 1, 3, 2, 1 and 1 tiles.
    np.testing.assert_array_equal(alone[:, 5], np.tile(np.arange(3), 8))
    for padding in (True, False):
        whole = alone[alone[:, 1] < 5 + padding]
        for first in range(5):
            own = np.asarray(visited(sizes, padding=padding, first=first, distance=5, **shape))
            np.testing.assert_array_equal(own[own[:, 0] >= 0], whole[first::5])


def problems():
    return [
        problem
        for shape in MODELS.values()
        for rows in (16, 256, 1024)
        for problem in autotune.problems(shape, rows)
    ]


def test_choose_tile_sizes_fits_the_shape_and_shared_memory():
    for problem in problems():
        for tiles in (choose_tile_sizes(problem), *candidate_tile_sizes(problem)):
            assert tiles.width <= problem.output_width
            operands = tiles.height + max(problem.matrices, 1) * tiles.width
            assert tiles.stages * operands * 128 + tiles.height * 256 < SHARED_MEMORY_BYTES
            assert tiles.stages >= 2
            assert problem.matrices * tiles.width <= 256


def test_choose_tile_sizes_needs_no_width_that_divides_the_output():
    """Tiles of 64 columns, the only width that divides GPT-OSS's 2,880, would load the rows 45 times."""
    for width in (2880, 1408):
        for matrices, widest in ((1, 256), (2, 128), (0, 256)):
            problem = Problem(matrices, 2880, width, 1024, 18)
            assert next(candidate_tile_sizes(problem)).width == widest
            assert choose_tile_sizes(problem).width > 64


def test_choose_tile_sizes_is_never_slower_than_the_widest_tiles():
    chosen = [
        (
            estimate_cycles(problem, choose_tile_sizes(problem)),
            estimate_cycles(problem, next(candidate_tile_sizes(problem))),
        )
        for problem in problems()
    ]
    assert all(cycles <= widest for cycles, widest in chosen)
    assert any(cycles < 0.8 * widest for cycles, widest in chosen)


def test_choose_tile_sizes_leaves_clusters_that_load_less_to_measurements():
    problem = Problem(1, 4096, 1536, 2048, 18)
    by_cluster = {tiles.cluster: tiles for tiles in candidate_tile_sizes(problem) if tiles[:2] == (128, 256)}
    # The products of a step take 1,024 cycles. In that time a block loads 48 KiB alone, and 32 KiB in a cluster.
    assert estimate_cycles(problem, by_cluster[2]) < 0.85 * estimate_cycles(problem, by_cluster[1])
    assert choose_tile_sizes(problem) == by_cluster[1]


@pytest.mark.parametrize("problem", [Problem(1, 2048, 768, 1000, 6), Problem(0, 1000, 768, 2048, 6)])
def test_choose_tile_sizes_prefers_a_measured_entry(monkeypatch, tmp_path, problem):
    """A table entry applies to expected rows per group up to the next power of two."""
    expected = "output_height" if problem.matrices else "contraction"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "table.json"))
    best = TileSizes(64, 64, 3, cluster=2)
    key = problem._replace(**{expected: 1024}).key
    write_table(tmp_path / "table.json", empty_table()._replace(tiles={key: best}))
    assert choose_tile_sizes(problem) == best
    assert choose_tile_sizes(problem._replace(**{expected: 1025})).cluster == 1
    assert choose_tile_sizes(problem._replace(groups=7)).cluster == 1


def test_autotune_needs_a_hopper_gpu(capsys):
    assert autotune.main([]) == 1
    assert "cpu is not a Hopper GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_autotune_runs_the_problems_that_it_tunes():
    """This test checks only shapes, since autotune's kernels need a GPU."""
    for problem in autotune.problems(ModelShape(64, 128, 32, 2), 300):
        operands = autotune._operands(problem)
        for tiles in list(candidate_tile_sizes(problem))[::3]:
            outs = jax.eval_shape(functools.partial(autotune._run, problem, tiles), *operands)
            shape = (problem.rows_per_group * problem.groups, problem.output_width)
            if not problem.matrices:
                shape = (problem.groups, 1, problem.output_height, problem.output_width)
            assert outs[0].shape == shape


@pytest.mark.parametrize(
    ("call", "matrix", "kernels"), [(grouped_dot, (64, 128), 3), (grouped_mlp, (3, 64, 128), 5)]
)
def test_grouped_dot_and_mlp_neither_concatenate_buffers_nor_launch_more(monkeypatch, call, matrix, kernels):
    launches = [mock.Mock(wraps=module.launch) for module in (row_product_kernel, weight_gradient_kernel)]
    monkeypatch.setattr(row_product_kernel, "launch", launches[0])
    monkeypatch.setattr(weight_gradient_kernel, "launch", launches[1])

    def holds_all_weights(implementation, slots):
        def run(rows, weights):
            sizes = jnp.array([0, 9, 20, 1, 7])
            function = functools.partial(call, group_sizes=sizes, implementation=implementation)
            out, pull = jax.vjp(function, rows, weights)
            return out, *pull(out)

        weights = [jax.ShapeDtypeStruct((count, *matrix), jnp.bfloat16) for count in slots]
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            program = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((40, 64), jnp.bfloat16), weights)
        return re.search(r"\[5,(\d,)?64,128\]", str(program)) is not None

    for implementation in ("xla", "mosaic"):
        assert holds_all_weights(implementation, (5,))
        assert not holds_all_weights(implementation, (0, 1, 2, 0, 2))
    assert sum(launch.call_count for launch in launches) == 2 * kernels


def test_leave_multiprocessors_compiles_once_for_each_number():
    result = []

    @jax.jit
    def step(x):
        result.append(multiprocessors())
        return x

    for count in (0, 16, 0, 131, 16):
        with leave_multiprocessors(count):
            step(1.0)
    step(1.0)
    assert result == [132, 116, 1]


def test_leave_multiprocessors_holds_forward_and_backward(monkeypatch):
    grids = []
    kernel = plgpu.kernel
    monkeypatch.setattr(
        plgpu, "kernel", lambda *a, grid, **k: grids.append(grid) or kernel(*a, grid=grid, **k)
    )
    monkeypatch.setattr(persistent_kernel, "interpreted", lambda: False)
    rows, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (1, 64, 64)))

    def loss(rows, weights):
        return jnp.sum(grouped_dot(rows, [weights], jnp.array([8]), implementation="mosaic"))

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()), leave_multiprocessors(32):
        jax.make_jaxpr(jax.grad(loss, (0, 1)))(rows, weights)
    assert grids == [(100,)] * 3


@pytest.mark.parametrize("count", [-1, 132, True])
def test_leave_multiprocessors_rejects_invalid_numbers(count):
    with pytest.raises(
        ValueError, match=rf"count={count} must be an integer from 0 to 131: the kernels need"
    ):
        leave_multiprocessors(count)
