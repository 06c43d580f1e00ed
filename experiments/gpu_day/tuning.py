"""Sizes of tiles, tuned into a table beside the record."""

import os
from pathlib import Path

from experiments.gpu_day.facts import say
from experiments.gpu_day.speed import REHEARSED
from pallas_kernels.hopper import autotune
from pallas_kernels.hopper.tile_sizes import MODELS, candidate_tile_sizes, choose_tile_sizes
from pallas_kernels.hopper.tile_table import VARIABLE, read_table


def tune_model(model: str, folder: str, *, rehearsal: bool) -> None:
    """Tune the tiles of a model's kernels, as many as the time of the step allows; a later run goes on from there.

    Args:
        model: a name of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: the folder of the table, ``tile_sizes.json``, which RELIBRA_TILE_SIZES is to name afterwards.
        rehearsal: whether naming the candidates is enough: kernels are timed on GPUs alone.

    Raises:
        ValueError: if nothing can be measured here.
    """
    shape, rows = (REHEARSED, (16,)) if rehearsal else (MODELS[model], autotune.ROWS_PER_GROUP)
    for problem in (problem for count in rows for problem in autotune.problems(shape, count)):
        candidates = list(candidate_tile_sizes(problem))
        say(problem=problem.key, candidates=len(candidates), without_tuning=list(choose_tile_sizes(problem)))
    if rehearsal:
        return
    path = Path(folder) / "tile_sizes.json"
    os.environ[VARIABLE] = str(path)
    if autotune.main([model]):
        raise ValueError("autotune refused; what it said stands above")
    say(table=str(path), tuned={key: list(tiles) for key, tiles in read_table(path).tiles.items()})
