"""Time every choice of tiles at the shapes of named models and write the table that `tiles.choose` reads.

    python -m pallas_kernels.hopper.autotune [MODEL ...]

Needs a Hopper GPU. Shapes are those of one rank of eight with two replica slots. Groups are uneven, as those of real
plans are: even ones flatter large tiles. What counts is a kernel's own time, as CUPTI reports it; what is fused into it
is not timed. What the table has is left as it is: empty it to begin anew.
"""

import argparse
import datetime
import functools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.arrays import why_no_hopper
from pallas_kernels.hopper.launch import Tiles
from pallas_kernels.hopper.rows import Sweep, rows_kernel
from pallas_kernels.hopper.schedule import walls
from pallas_kernels.hopper.tiles import MODELS, RANKS, REPLICAS, TABLE_PATH, Problem, Shape, candidates
from pallas_kernels.hopper.weights import weights_kernel

ROWS_A_GROUP: Final = (32, 256, 1024, 2048)
REPEATS: Final = 10


def problems(shape: Shape, rows: int) -> Iterator[Problem]:
    """What `grouped_dot` and `grouped_mlp` ask tiles for, at one shape and expected rows a group."""
    width, expert_width, slots = shape.width, shape.expert_width, shape.experts // RANKS + REPLICAS
    for contraction, columns in {(width, expert_width), (expert_width, width)}:
        yield Problem(1, contraction, columns, rows, slots)
        yield Problem(0, rows, columns, contraction, slots)
    yield Problem(2, width, expert_width, rows, slots)
    yield Problem(1, 2 * expert_width, width, rows, slots)
    yield Problem(0, rows, expert_width, width, 3 * slots)


def tune(problem: Problem) -> Tiles:
    """The fastest tiles, by the median over repeats."""
    choices = list(candidates(problem))
    operands = _operands(problem)

    def compile_one(tiles: Tiles) -> Any:
        return jax.jit(functools.partial(_run, problem, tiles)).lower(*operands).compile()

    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(compile_one, choices))
    times = [_milliseconds(program, operands) for program in programs]
    return choices[times.index(min(times))]


def _operands(problem: Problem) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Walls of groups, row operands and weights."""
    groups, num_rows = problem.groups, problem.groups * problem.expected
    draw = np.random.default_rng(0)
    sizes = draw.multinomial(num_rows, draw.dirichlet(np.ones(groups) * 2)).astype(np.int32)
    keys = iter(jax.random.split(jax.random.key(0), 3))

    def array(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    if problem.matrices:
        widths = [problem.contraction]
        weights = array(groups, problem.matrices, problem.contraction, problem.columns)
    else:
        widths, weights = [problem.rows, problem.columns], array(0)
    rows = [array(num_rows, width) for width in widths]
    return walls(jnp.asarray(sizes), num_rows), rows, weights


def _run(problem: Problem, tiles: Tiles, groups: jax.Array, rows: list[jax.Array], weights: jax.Array) -> Any:
    """The kernel, without what is fused into it."""
    if not problem.matrices:
        return weights_kernel([(rows[0], rows[1])], groups, (problem.groups, 0), tiles=tiles)
    return rows_kernel(
        rows,
        weights,
        weights[:0],
        groups,
        sums=[[Sweep(0, tuple(range(problem.matrices)))]],
        transposed=False,
        epilogue=lambda sums, _: (sums, None),
        outputs=problem.matrices,
        padding=True,
        tiles=tiles,
    )


def _milliseconds(program: Any, operands: tuple[Any, ...]) -> float:
    """The median; one run at a time, as all results of a reading are kept until its end."""
    run = profiler.measure(program)
    times = [time for _, time in (run(*operands) for _ in range(REPEATS)) if time is not None]
    if len(times) < REPEATS:
        raise RuntimeError("CUPTI saw no kernel run")
    return statistics.median(times)


def main(names: Sequence[str]) -> int:
    """Write the table, model by model and problem by problem; 1 where there is no Hopper GPU to measure on."""
    device = jax.devices()[0]
    if reason := why_no_hopper(device.device_kind):
        print(f"autotune measures kernels: {reason}. The table is left as it is.", file=sys.stderr)
        return 1
    table = json.loads(TABLE_PATH.read_text())["tiles"]
    for name in names or MODELS:
        for rows in ROWS_A_GROUP:
            for problem in problems(MODELS[name], rows):
                if problem.key not in table:
                    table[problem.key] = list(tune(problem))
                    print(name, problem, table[problem.key], flush=True)
                    _write(table, device.device_kind)
    return 0


def _write(table: dict[str, list[int]], device: str) -> None:
    written = {
        "device": device,
        "versions": {"jax": jax.__version__},
        "date": datetime.date.today().isoformat(),
        "tiles": table,
    }
    # All of it or nothing, whatever happens on the way.
    part = TABLE_PATH.with_suffix(".part")
    part.write_text(json.dumps(written, indent=1) + "\n")
    part.replace(TABLE_PATH)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=f"Write {TABLE_PATH}, on a Hopper GPU.")
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is named"
    )
    chosen = parser.parse_args().models
    if unknown := set(chosen) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))} not among {', '.join(MODELS)}")
    sys.exit(main(chosen))
