"""Measure the best tile sizes for the shapes of known models, and write them to the table of `tile_table`.

    python -m pallas_kernels.hopper.autotune [MODEL ...]

This needs a Hopper GPU. The shapes are those of one of eight ranks, with two replica slots. The groups are uneven like
those of real batches, because even groups would make large tiles look better than they are. The measured time is that
of the kernel alone, as CUPTI reports it, without a fused epilogue. Existing entries of the table are kept; to measure
everything again, delete the file.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.compare import check_close
from pallas_kernels.hopper.persistent_kernel import TileSizes
from pallas_kernels.hopper.row_product_kernel import row_product_kernel
from pallas_kernels.hopper.tile_sizes import (
    MODELS,
    RANKS,
    REPLICAS,
    ModelShape,
    Problem,
    candidate_tile_sizes,
)
from pallas_kernels.hopper.tile_table import (
    VARIABLE,
    TileTable,
    empty_table,
    read_table,
    table_path,
    write_table,
)
from pallas_kernels.hopper.tile_walk import group_offsets
from pallas_kernels.hopper.weight_gradient_kernel import weight_gradient_kernel
from pallas_kernels.implementation import why_not_hopper
from pallas_kernels.products import Sweep

ROWS_PER_GROUP: Final = (1024, 256, 2048, 32)
"""The expected numbers of rows of a group for which tile sizes are measured, the most important first."""
REPEATS: Final = 10
"""The number of timed runs for each candidate; candidates are compared by their median."""


def problems(shape: ModelShape, rows: int) -> Iterator[Problem]:
    """Yield the kernel problems of `grouped_dot` and `grouped_mlp` for one model.

    Args:
        shape: the sizes of the model's experts.
        rows: the expected number of rows of a group.
    """
    width, expert_width, slots = shape.width, shape.expert_width, shape.experts // RANKS + REPLICAS
    for k, n in {(width, expert_width), (expert_width, width)}:
        yield Problem(1, k, n, rows, slots)
        yield Problem(0, rows, n, k, slots)
    yield Problem(2, width, expert_width, rows, slots)
    yield Problem(1, 2 * expert_width, width, rows, slots)
    yield Problem(0, rows, expert_width, width, 3 * slots)


def tune(problem: Problem) -> TileSizes:
    """Return the fastest tile sizes for a problem."""
    times = measure(problem, list(candidate_tile_sizes(problem)))
    return min(times, key=lambda tiles: times[tiles])


def measure(problem: Problem, choices: Sequence[TileSizes]) -> dict[TileSizes, float]:
    """Return the median time of repeated runs in milliseconds, for each of several tile sizes.

    The results are compared with those of the first tile sizes, which should use no cluster. Tile sizes with different
    results are reported to standard error and excluded.
    """
    operands = _operands(problem)

    def compile_one(tiles: TileSizes) -> Any:
        return jax.jit(functools.partial(_run, problem, tiles)).lower(*operands).compile()

    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(compile_one, choices))
    times, expected = {}, programs[0](*operands)
    for tiles, program in zip(choices, programs, strict=True):
        try:
            check_close(f"{problem}, {tiles}", program(*operands), expected)
        except ValueError as error:
            print(f"excluded because of wrong results: {error}", file=sys.stderr, flush=True)
        else:
            times[tiles] = _milliseconds(program, operands)
    return times


def _operands(problem: Problem) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Return the group offsets, row operands and weights of a problem, drawn at random."""
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
    """Run the kernel of a problem, without a fused epilogue."""
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
    """Return the median time of a run in milliseconds.

    The profiler measures one run at a time, because it keeps all results of a measurement in memory until its end.
    """
    run = profiler.measure(program)
    times = [time for _, time in (run(*operands) for _ in range(REPEATS)) if time is not None]
    if len(times) < REPEATS:
        raise RuntimeError("CUPTI recorded no kernel in one of the runs")
    return statistics.median(times)


def main(names: Sequence[str]) -> int:
    """Measure the named models, or all models if the list is empty, and write each result to the table.

    Returns:
        The exit status: 0, or 1 if the device is not a Hopper GPU, if the environment disables the table, or if the
        existing table was measured on another device or with another version of JAX.
    """
    path, table = table_path(), empty_table()
    if path is not None and path.exists():
        table = read_table(path)
    reason = _why_not(path, table)
    if reason or path is None:
        print(f"autotune cannot measure here: {reason}. The table is unchanged.", file=sys.stderr)
        return 1
    tiles = dict(table.tiles)
    for name in names or MODELS:
        for rows in ROWS_PER_GROUP:
            for problem in problems(MODELS[name], rows):
                if problem.key not in tiles:
                    tiles[problem.key] = tune(problem)
                    print(name, problem, tiles[problem.key], flush=True)
                    # The table is written after each problem, so that an interruption loses no measurements.
                    write_table(path, table._replace(tiles=tiles))
    return 0


def _why_not(path: Path | None, table: TileTable) -> str | None:
    """Return the reason why measurements here cannot be added to the table, or None if they can."""
    current = empty_table()
    if reason := why_not_hopper(current.device):
        return reason
    if path is None:
        return f"{VARIABLE} is set but empty, so there is no file to write"
    if table.origin != current.origin:
        return (
            f"{path} was measured on {table.origin}, but this is {current.origin};"
            f" set {VARIABLE} to the path of another file"
        )
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=f"Measure the best tile sizes on a Hopper GPU, and write {table_path()}."
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"models to measure, from {', '.join(MODELS)} (default: all)",
    )
    chosen = parser.parse_args().models
    if unknown := set(chosen) - set(MODELS):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    sys.exit(main(chosen))
