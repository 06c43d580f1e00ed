"""Measure the best sizes of tiles at the shapes of named models, and write them into the table of `tile_table`.

    python -m pallas_kernels.hopper.autotune [MODEL ...]

This needs a Hopper GPU. Shapes are those of one rank of eight with two replica slots. Groups are uneven, as those of
real batches are: even ones flatter large tiles. What counts is a kernel's own time, as CUPTI reports it; what is fused
into it is not timed. Entries that the table has are left as they are: remove the file to begin anew.
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
from pallas_kernels.sweep import Sweep

ROWS_PER_GROUP: Final = (1024, 256, 2048, 32)
"""The expected rows of a group for which sizes are measured, the most wanted first."""
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
    """Return the fastest sizes of tiles, by the median time of repeated runs.

    Sizes whose results are not those of the first, which is no cluster, are said and left out.
    """
    choices = list(candidate_tile_sizes(problem))
    operands = _operands(problem)

    def compile_one(tiles: TileSizes) -> Any:
        return jax.jit(functools.partial(_run, problem, tiles)).lower(*operands).compile()

    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(compile_one, choices))
    times, wanted = {}, programs[0](*operands)
    for tiles, program in zip(choices, programs, strict=True):
        try:
            check_close(f"{problem}, {tiles}", program(*operands), wanted)
        except ValueError as error:
            print(f"left out, wrong: {error}", file=sys.stderr, flush=True)
        else:
            times[tiles] = _milliseconds(program, operands)
    return min(times, key=lambda tiles: times[tiles])


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
    """Write the table, model by model and problem by problem.

    Returns:
        0, or 1 if there is no Hopper GPU to measure on, no file to write to, or one that was measured elsewhere.
    """
    path, table = table_path(), empty_table()
    if path is not None and path.exists():
        table = read_table(path)
    reason = _why_not(path, table)
    if reason or path is None:
        print(f"autotune measures kernels: {reason}. The table is left as it is.", file=sys.stderr)
        return 1
    tiles = dict(table.tiles)
    for name in names or MODELS:
        for rows in ROWS_PER_GROUP:
            for problem in problems(MODELS[name], rows):
                if problem.key not in tiles:
                    tiles[problem.key] = tune(problem)
                    print(name, problem, tiles[problem.key], flush=True)
                    # After each: what was measured is kept, whatever happens on the way.
                    write_table(path, table._replace(tiles=tiles))
    return 0


def _why_not(path: Path | None, table: TileTable) -> str | None:
    """Return the reason why nothing can be measured here and added to a table, or None."""
    here = empty_table()
    if reason := why_not_hopper(here.device):
        return reason
    if path is None:
        return f"{VARIABLE} is empty and names no file"
    if table.origin != here.origin:
        return f"{path} is of {table.origin}, this is {here.origin}. Name another file in {VARIABLE}"
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=f"Write {table_path()}, on a Hopper GPU.")
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is named"
    )
    chosen = parser.parse_args().models
    if unknown := set(chosen) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))} not among {', '.join(MODELS)}")
    sys.exit(main(chosen))
