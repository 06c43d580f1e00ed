"""Tuning of tile sizes, written to tables next to the record: clusters first, then all sizes.

The number of bytes that a multiprocessor loads per cycle decides what clusters of two blocks are worth, and has not
been measured. So `tune_clusters` compares only the most promising clusters with the best tiles without one.
"""

import os
from pathlib import Path
from typing import Final

from experiments.gpu_day.speed import REHEARSAL_SHAPE
from experiments.ladder.facts import print_facts
from pallas_kernels.hopper import autotune
from pallas_kernels.hopper.persistent_kernel import TileSizes
from pallas_kernels.hopper.tile_sizes import (
    MODELS,
    ModelShape,
    Problem,
    candidate_tile_sizes,
    choose_tile_sizes,
    estimate_cycles,
)
from pallas_kernels.hopper.tile_table import VARIABLE, empty_table, read_table, write_table

CLUSTERS: Final = 3
"""The number of tile sizes with clusters that are compared for each problem."""


def tune_clusters(model: str, rows: int, table: str, *, rehearsal: bool = False) -> None:
    """Compare the best tiles in clusters of two blocks with the best tiles without clusters, by counted cycles.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        rows: the expected number of rows of a group.
        table: the path of the table to write, with the fastest of them for each problem.
        rehearsal: whether to only list them, since kernels can be timed only on GPUs.
    """
    chosen = {}
    for problem in autotune.problems(_shape(model, rehearsal), rows):
        candidates = cluster_candidates(problem)
        times = dict.fromkeys(candidates, 0.0) if rehearsal else autotune.measure(problem, candidates)
        chosen[problem.key] = min(times, key=lambda tiles: times[tiles])
        print_facts(problem=problem.key, milliseconds=[[*tiles, time] for tiles, time in times.items()])
        write_table(Path(table), empty_table()._replace(tiles=chosen))


def cluster_candidates(problem: Problem) -> list[TileSizes]:
    """Return the tile sizes with the fewest counted cycles: one without clusters, and `CLUSTERS` with them."""
    by_cycles = sorted(candidate_tile_sizes(problem), key=lambda tiles: estimate_cycles(problem, tiles))
    alone, paired = ([tiles for tiles in by_cycles if tiles.cluster == count] for count in (1, 2))
    return [alone[0], *paired[:CLUSTERS]]


def tune_model(model: str, table: str, *, rehearsal: bool = False) -> None:
    """Tune the tile sizes of a model's kernels, as far as the step's time limit allows; a later run continues.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        table: the path of the table to write. To use the table, set RELIBRA_TILE_SIZES to it.
        rehearsal: whether to only list the candidates, since kernels can be timed only on GPUs.

    Raises:
        ValueError: if tile sizes cannot be measured on this machine.
    """
    shape, rows = _shape(model, rehearsal), (16,) if rehearsal else autotune.ROWS_PER_GROUP
    for problem in (problem for count in rows for problem in autotune.problems(shape, count)):
        candidates = list(candidate_tile_sizes(problem))
        print_facts(
            problem=problem.key, candidates=len(candidates), without_tuning=list(choose_tile_sizes(problem))
        )
    if rehearsal:
        return
    os.environ[VARIABLE] = table
    if autotune.main([model]):
        raise ValueError("autotune cannot measure here; it printed the reason to standard error")
    print_facts(table=table, tuned={key: list(tiles) for key, tiles in read_table(Path(table)).tiles.items()})


def _shape(model: str, rehearsal: bool) -> ModelShape:
    return REHEARSAL_SHAPE if rehearsal else MODELS[model]
