"""Measure the best sizes of tiles at the shapes of named models, and write the table of `tile_sizes`.

    python -m pallas_kernels.hopper.autotune [MODEL ...]

This needs a Hopper GPU. Shapes are those of one rank of eight with two replica slots. Groups are uneven, as those of
real batches are: even ones flatter large tiles. What counts is a kernel's own time, as CUPTI reports it; what is fused
into it is not timed. Entries that the table has are left as they are: empty it to begin anew.
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

from pallas_kernels.hopper.persistent_kernel import TileSizes
from pallas_kernels.hopper.row_product_kernel import Sweep, row_product_kernel
from pallas_kernels.hopper.tile_sizes import (
    MODELS,
    RANKS,
    REPLICAS,
    TABLE_PATH,
    ModelShape,
    Problem,
    candidate_tile_sizes,
)
from pallas_kernels.hopper.tile_walk import group_offsets
from pallas_kernels.hopper.weight_gradient_kernel import weight_gradient_kernel
from pallas_kernels.implementation import why_not_hopper

ROWS_PER_GROUP: Final = (32, 256, 1024, 2048)
"""The expected rows of a group for which sizes are measured."""
REPEATS: Final = 10
"""How many times each choice of sizes is timed; the median counts."""


def problems(shape: ModelShape, rows: int) -> Iterator[Problem]:
    """Yield the problems that `grouped_dot` and `grouped_mlp` choose tiles for.

    Args:
        shape: the sizes of a model's experts.
        rows: the expected rows of a group.
    """
    width, expert_width, slots = shape.width, shape.expert_width, shape.experts // RANKS + REPLICAS
    for k, n in {(width, expert_width), (expert_width, width)}:
        yield Problem(1, k, n, rows, slots)
        yield Problem(0, rows, n, k, slots)
    yield Problem(2, width, expert_width, rows, slots)
    yield Problem(1, 2 * expert_width, width, rows, slots)
    yield Problem(0, rows, expert_width, width, 3 * slots)


def tune(problem: Problem) -> TileSizes:
    """Return the fastest sizes of tiles, by the median time of repeated runs."""
    choices = list(candidate_tile_sizes(problem))
    operands = _operands(problem)

    def compile_one(tiles: TileSizes) -> Any:
        return jax.jit(functools.partial(_run, problem, tiles)).lower(*operands).compile()

    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(compile_one, choices))
    times = [_milliseconds(program, operands) for program in programs]
    return choices[times.index(min(times))]


def _operands(problem: Problem) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Return group offsets, row operands and weights, drawn at random."""
    num_groups, num_rows = problem.groups, problem.groups * problem.rows_per_group
    draw = np.random.default_rng(0)
    sizes = draw.multinomial(num_rows, draw.dirichlet(np.ones(num_groups) * 2)).astype(np.int32)
    keys = iter(jax.random.split(jax.random.key(0), 3))

    def array(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    if problem.matrices:
        widths = [problem.contraction]
        weights = array(num_groups, problem.matrices, problem.contraction, problem.output_width)
    else:
        widths, weights = [problem.output_height, problem.output_width], array(0)
    rows = [array(num_rows, width) for width in widths]
    return group_offsets(jnp.asarray(sizes), num_rows), rows, weights


def _run(
    problem: Problem, tiles: TileSizes, offsets: jax.Array, rows: list[jax.Array], weights: jax.Array
) -> Any:
    """Run the kernel, without what is fused into it."""
    if not problem.matrices:
        return weight_gradient_kernel([(rows[0], rows[1])], offsets, (problem.groups,), tiles=tiles)
    return row_product_kernel(
        rows,
        [weights],
        offsets,
        sums=[[Sweep(0, tuple(range(problem.matrices)))]],
        transposed=False,
        epilogue=lambda sums, _: (sums, None),
        outputs=problem.matrices,
        padding=True,
        tiles=tiles,
    )


def _milliseconds(program: Any, operands: tuple[Any, ...]) -> float:
    """Return the median time of a run; one at a time, as all results of a reading are kept until its end."""
    run = profiler.measure(program)
    times = [time for _, time in (run(*operands) for _ in range(REPEATS)) if time is not None]
    if len(times) < REPEATS:
        raise RuntimeError("CUPTI saw no kernel run")
    return statistics.median(times)


def main(names: Sequence[str]) -> int:
    """Write the table, model by model and problem by problem; return 1 if there is no Hopper GPU to measure on."""
    device = jax.devices()[0]
    if reason := why_not_hopper(device.device_kind):
        print(f"autotune measures kernels: {reason}. The table is left as it is.", file=sys.stderr)
        return 1
    table = json.loads(TABLE_PATH.read_text())["tiles"]
    for name in names or MODELS:
        for rows in ROWS_PER_GROUP:
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
