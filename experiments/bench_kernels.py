"""``python -m experiments.bench_kernels``: measure the grouped product and MLP on this machine against baselines.

There are 32,768 rows in 64 uneven groups, for 48 home and 16 replica slots. The dense baseline multiplies all rows by
one weight matrix and alternates with the grouped kernel. The padded baseline pads every group to the size of the
largest. `jax.lax.ragged_dot` multiplies all rows by all weights under a mask; it runs only once, and only forward.
"""

import dataclasses
import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.gpu_day.baselines import dense_mlp, ragged_mlp
from experiments.gpu_day.operations import Operands, Version, split_operands
from experiments.interleaving import interleaved
from experiments.program import run_program
from pallas_kernels import grouped_dot, grouped_mlp

console = Console()
ROWS, HOMES, REPLICAS, D, F = 32_768, 48, 16, 256, 512
GROUPED, DENSE, PADDED, MASKED = "grouped", "dense", "padded, batched", "jax.lax.ragged_dot"


def group_sizes(rows: int, groups: int) -> np.ndarray:
    """Draw Zipf-like group sizes in random order; with 64 groups the largest is about four times the mean."""
    rng = np.random.default_rng(0)
    share = rng.permutation(1 / np.arange(1, groups + 1) ** 0.5)
    return rng.multinomial(rows, share / share.sum()).astype(np.int32)


def make_operands(matrix: tuple[int, ...], columns: int) -> Operands:
    """Draw float32 operands for all rows.

    Args:
        matrix: the shape of one group's weights.
        columns: the number of columns of the result.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (ROWS, D))
    weights = jax.random.normal(keys[2], (HOMES + REPLICAS, *matrix)) / 16
    return split_operands(rows, jax.random.normal(keys[1], (ROWS, columns)), weights, HOMES)


def padding(sizes: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return where padded groups ``[groups, largest size]`` read their rows, and where the rows are in them."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    offset = np.arange(ROWS) - (np.cumsum(sizes) - sizes)[group]
    source = np.zeros((len(sizes), sizes.max()), np.int32)
    source[group, offset] = np.arange(ROWS)
    return jnp.asarray(source), jnp.asarray(group * sizes.max() + offset)


def versions(
    kernel: Callable[..., jax.Array], dense: Callable[..., jax.Array], sizes: np.ndarray
) -> dict[str, Version]:
    """Return the kernel and the baselines that are also timed with gradients.

    Args:
        kernel: the grouped kernel, a function of ``(rows, weight buffers, group sizes)``.
        dense: the dense function of rows and matrices, both of which may have groups as their first axis.
        sizes: the group sizes, to whose largest the padded baseline pads.
    """
    gather, back = padding(sizes)

    def one_group(rows: jax.Array, matrices: list[jax.Array], _: jax.Array) -> jax.Array:
        return dense(rows, *matrices)

    def padded(rows: jax.Array, weights: jax.Array, _: jax.Array) -> jax.Array:
        out = dense(rows[gather], *(jnp.moveaxis(weights, 1, 0) if weights.ndim == 4 else [weights]))
        return out.reshape(-1, out.shape[-1])[back]

    return {
        GROUPED: Version(
            functools.partial(kernel, implementation="xla"), lambda given: (given.x, given.weights)
        ),
        DENSE: Version(one_group, lambda given: (given.x, given.dense)),
        PADDED: Version(padded, lambda given: (given.x, given.joint)),
    }


def time_versions(
    by_name: Mapping[str, Version], ragged: Version, operands: Operands, sizes: np.ndarray, *, repeats: int
) -> tuple[list[dict[str, float]], float]:
    """Time the versions forward, and forward with all gradients.

    Args:
        by_name: the result of `versions`.
        ragged: the version that uses `jax.lax.ragged_dot`; it runs once, and only forward.
        operands: the operands of all versions.
        sizes: the group sizes.
        repeats: the number of timed runs of each version.

    Returns:
        The median seconds by name, forward and with gradients, and the largest difference between the kernel and the
        padded baseline as a share of the largest output.
    """
    given = operands, jnp.asarray(sizes)
    forward = {name: functools.partial(jax.jit(each.forward), *given) for name, each in by_name.items()}
    both = {name: functools.partial(jax.jit(each.with_gradients), *given) for name, each in by_name.items()}
    kernel, padded = (np.asarray(forward[name](), np.float32) for name in (GROUPED, PADDED))
    # The padded baseline leaves caches and pages cold for whatever runs next, so it is timed alone.
    seconds = []
    for runs in (forward, both):
        alone = {PADDED: runs.pop(PADDED)}
        seconds.append(interleaved(runs, repeats=repeats) | interleaved(alone, repeats=repeats))
    masked = jax.jit(ragged.forward).lower(*given).compile()
    start = time.perf_counter()
    jax.block_until_ready(masked(*given))
    seconds[0][MASKED] = time.perf_counter() - start
    return seconds, float(np.abs(kernel - padded).max() / np.abs(padded).max())


def print_table(name: str, sizes: np.ndarray, seconds: list[dict[str, float]], *, repeats: int) -> None:
    """Print the times of an operation.

    Args:
        name: the name of the operation.
        sizes: the group sizes.
        seconds: the median seconds by version, forward and with gradients.
        repeats: the number of timed runs.
    """
    table = Table(
        title=f"{name}: {ROWS} rows float32, D={D}, F={F}, {HOMES}+{REPLICAS} slots\n"
        f"of {sizes.min()} to {sizes.max()} rows; medians of {repeats} runs",
        title_justify="left",
    )
    columns = ("implementation", "forward ms", "/ dense", "with gradients ms", "/ dense")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for label in seconds[0]:
        cells = []
        for times in seconds:
            if label in times:
                cells += [f"{times[label] * 1e3:.0f}", f"{times[label] / times[DENSE]:.2f}"]
        table.add_row(label, *cells)
    console.print(table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchKernels:
    """Time grouped products and MLPs against baselines."""

    repeats: int = 7
    """The number of timed runs of each implementation, of which the median is shown."""


def main(config: BenchKernels) -> None:
    """Time both operations and print their tables.

    Args:
        config: the settings.
    """
    console.print(
        f"jax {jax.__version__} on {jax.devices()[0].platform}, {os.cpu_count()} cores, {platform.machine()}"
    )
    sizes = group_sizes(ROWS, HOMES + REPLICAS)
    for name, kernel, dense, ragged, matrix, columns in (
        ("product", grouped_dot, jnp.matmul, jax.lax.ragged_dot, (D, F), F),
        ("MLP", grouped_mlp, dense_mlp, ragged_mlp, (3, D, F), D),
    ):
        seconds, difference = time_versions(
            versions(kernel, dense, sizes),
            Version(ragged, lambda given: (given.x, given.joint)),
            make_operands(matrix, columns),
            sizes,
            repeats=config.repeats,
        )
        print_table(name, sizes, seconds, repeats=config.repeats)
        console.print(f"largest difference from the padded baseline: {difference:.1e} of the largest output")


if __name__ == "__main__":
    sys.exit(run_program(main, BenchKernels, description=__doc__))
