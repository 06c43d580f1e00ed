"""Time every choice of tiles at the shapes of named models and write the table that `tiles.choose` reads.

    python -m pallas_kernels.hopper.autotune

Needs a Hopper GPU. Groups are uneven, as those of real plans are: even ones flatter large tiles.
"""

import datetime
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import why_no_hopper
from pallas_kernels.hopper.launch import Tiles
from pallas_kernels.hopper.rows import Term, rows_kernel
from pallas_kernels.hopper.schedule import walls
from pallas_kernels.hopper.tiles import MODELS, TABLE_PATH, Problem, Shape, candidates
from pallas_kernels.hopper.weights import weights_kernel

SLOTS: Final = 16
ROWS_A_GROUP: Final = (32, 256, 1024, 2048)
REPEATS: Final = 20


def problems(shape: Shape, rows: int) -> Iterator[Problem]:
    """What `grouped_dot` and `grouped_mlp` ask tiles for, at one shape and expected rows a group."""
    width, expert_width = shape.width, shape.expert_width
    for contraction, columns in {(width, expert_width), (expert_width, width)}:
        yield Problem(1, 1, 1, contraction, columns, rows)
        yield Problem(0, 1, 1, rows, columns, contraction)
    yield Problem(1, 2, 2, width, expert_width, rows)
    yield Problem(2, 3, 3, width, expert_width, rows)
    yield Problem(2, 2, 1, expert_width, width, rows)


def tune(problem: Problem, rows: int) -> list[int]:
    """The fastest tiles, by the median over repeats."""
    best = min(candidates(problem), key=lambda tiles: _seconds(_runner(problem, rows, tiles)))
    return list(best)


def _runner(problem: Problem, rows: int, tiles: Tiles) -> Callable[[], Any]:
    draw = np.random.default_rng(0)
    sizes = draw.multinomial(rows * SLOTS, draw.dirichlet(np.ones(SLOTS) * 2)).astype(np.int32)
    groups = walls(jnp.asarray(sizes), rows * SLOTS)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape), jnp.bfloat16)

    if not problem.operands:
        pair = (array(rows * SLOTS, problem.rows), array(rows * SLOTS, problem.columns))
        run = functools.partial(weights_kernel, slots=(SLOTS, 0), tiles=tiles)
        return functools.partial(jax.jit(run), [pair], groups)
    transposed = problem.accumulators < problem.operands
    matrix = (problem.contraction, problem.columns)[:: -1 if transposed else 1]
    weights = array(SLOTS, problem.matrices, *matrix)
    terms = [
        Term(min(number, problem.operands - 1), number, min(number, problem.accumulators - 1))
        for number in range(problem.matrices)
    ]

    def run_rows(operands: list[jax.Array], weights: jax.Array, groups: jax.Array) -> Any:
        return rows_kernel(
            operands,
            weights,
            weights[:0],
            groups,
            terms=terms,
            transposed=transposed,
            epilogue=lambda accumulators, _: (accumulators, None),
            outputs=problem.accumulators,
            padding=True,
            tiles=tiles,
        )

    operands = [array(rows * SLOTS, problem.contraction) for _ in range(problem.operands)]
    return functools.partial(jax.jit(run_rows), operands, weights, groups)


def _seconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        jax.block_until_ready(run())
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> int:
    """Write the table; 1 where there is no Hopper GPU to measure on."""
    device = jax.devices()[0]
    if reason := why_no_hopper(device.device_kind):
        print(f"autotune measures kernels: {reason}", file=sys.stderr)
        return 1
    table = {}
    for name, shape in MODELS.items():
        for rows in ROWS_A_GROUP:
            for problem in problems(shape, rows):
                table[problem.key] = tune(problem, rows)
                print(name, problem, table[problem.key], flush=True)
    written = {
        "device": device.device_kind,
        "versions": {"jax": jax.__version__},
        "date": datetime.date.today().isoformat(),
        "tiles": table,
    }
    TABLE_PATH.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
