"""Tuning of tile sizes, written to a table next to the record."""

import os
from pathlib import Path

from experiments.gpu_day.speed import REHEARSAL_SHAPE
from experiments.ladder.facts import print_facts
from pallas_kernels.hopper import autotune
from pallas_kernels.hopper.tile_sizes import MODELS, candidate_tile_sizes, choose_tile_sizes
from pallas_kernels.hopper.tile_table import VARIABLE, read_table


def tune_model(model: str, folder: str, *, rehearsal: bool = False) -> None:
    """Tune the tile sizes of a model's kernels, as far as the step's time limit allows; a later run continues.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: the folder of the table, ``tile_sizes.json``. To use the table, set RELIBRA_TILE_SIZES to its path.
        rehearsal: whether to only list the candidates, since kernels can be timed only on GPUs.

    Raises:
        ValueError: if tile sizes cannot be measured on this machine.
    """
    shape, rows = (REHEARSAL_SHAPE, (16,)) if rehearsal else (MODELS[model], autotune.ROWS_PER_GROUP)
    for problem in (problem for count in rows for problem in autotune.problems(shape, count)):
        candidates = list(candidate_tile_sizes(problem))
        print_facts(
            problem=problem.key, candidates=len(candidates), without_tuning=list(choose_tile_sizes(problem))
        )
    if rehearsal:
        return
    path = Path(folder) / "tile_sizes.json"
    os.environ[VARIABLE] = str(path)
    if autotune.main([model]):
        raise ValueError("autotune cannot measure here; it printed the reason to standard error")
    print_facts(table=str(path), tuned={key: list(tiles) for key, tiles in read_table(path).tiles.items()})
