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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

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


def swiglu(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Apply one MLP: ``x[..., r, D]`` and ``weights[..., 3, D, F]`` give ``[..., r, D]``."""
    gate, up, down = jnp.moveaxis(weights, -3, 0)
    return (jax.nn.silu(x @ gate) * (x @ up)) @ jnp.swapaxes(down, -1, -2)


def ragged_mlp(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Apply each group's MLP with three calls of `jax.lax.ragged_dot`."""
    gate, up, down = jnp.moveaxis(weights, 1, 0)
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    return jax.lax.ragged_dot(hidden, down.swapaxes(1, 2), sizes)


class Operation(NamedTuple):
    """One computation in the implementations that a table compares."""

    grouped: Callable[..., jax.Array]
    """The grouped kernel, a function of ``(rows, weight buffers, group_sizes)``."""
    dense: Callable[[jax.Array, jax.Array], jax.Array]
    """The dense function of ``(rows, weights)``; both may have groups as their first axis."""
    ragged: Callable[..., jax.Array]
    """The function of ``(rows, weights, group_sizes)`` that uses `jax.lax.ragged_dot`."""
    weight_shape: tuple[int, ...]
    """The shape of one group's weights."""


OPERATIONS = {
    "product": Operation(grouped_dot, jnp.matmul, jax.lax.ragged_dot, (D, F)),
    "MLP": Operation(grouped_mlp, swiglu, ragged_mlp, (3, D, F)),
}


def with_gradients(run: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function of ``(d_out, *arrays)`` that computes the output and all gradients of ``run``."""

    def both(d_out: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(run, *arrays)
        return out, *pull(d_out)

    return jax.jit(both)


def bench(name: str, dtype: str, *, repeats: int) -> None:
    """Time an operation forward, and forward with all gradients, and print the table.

    Args:
        name: the name of the operation in `OPERATIONS`.
        dtype: the dtype of rows and weights.
        repeats: the number of timed runs of each implementation, of which the median is shown.
    """
    operation = OPERATIONS[name]
    sizes = group_sizes(ROWS, HOMES + REPLICAS)
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (ROWS, D), dtype)
    weights = jax.random.normal(keys[2], (HOMES + REPLICAS, *operation.weight_shape), dtype) / 16
    d_out = jax.random.normal(keys[1], jax.eval_shape(operation.dense, rows, weights[0]).shape, dtype)

    group = np.repeat(np.arange(len(sizes)), sizes)
    offset = np.arange(ROWS) - (np.cumsum(sizes) - sizes)[group]
    capacity = int(sizes.max())
    source = np.zeros((len(sizes), capacity), np.int32)
    source[group, offset] = np.arange(ROWS)

    device_sizes = jnp.asarray(sizes)
    gather, back = jnp.asarray(source), jnp.asarray(group * capacity + offset)

    def grouped(rows: jax.Array, *buffers: jax.Array) -> jax.Array:
        return operation.grouped(rows, buffers, device_sizes, implementation="xla")

    def padded(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return operation.dense(rows[gather], weights).reshape(-1, d_out.shape[1])[back]

    calls: dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]] = {
        GROUPED: (grouped, (rows, weights[:HOMES], weights[HOMES:])),
        DENSE: (operation.dense, (rows, weights[0])),
        PADDED: (padded, (rows, weights)),
    }
    forward: dict[str, Any] = {}
    both: dict[str, Any] = {}
    for label, (call, arrays) in calls.items():
        forward[label] = functools.partial(jax.jit(call), *arrays)
        both[label] = functools.partial(with_gradients(call), d_out, *arrays)
    outputs = {label: np.asarray(run(), np.float32) for label, run in forward.items()}
    difference = np.abs(outputs[GROUPED] - outputs[PADDED]).max() / np.abs(outputs[PADDED]).max()

    # The padded baseline leaves caches and pages cold for whatever runs next, so it is timed alone.
    seconds = []
    for runs in (forward, both):
        alone = {PADDED: runs.pop(PADDED)}
        seconds.append(interleaved(runs, repeats=repeats) | interleaved(alone, repeats=repeats))
    masked = jax.jit(operation.ragged).lower(rows, weights, device_sizes).compile()
    start = time.perf_counter()
    jax.block_until_ready(masked(rows, weights, device_sizes))
    seconds[0][MASKED] = time.perf_counter() - start

    table = Table(
        title=f"{name}: {ROWS} rows {dtype}, D={D}, F={F}, {HOMES}+{REPLICAS} slots\n"
        f"of {sizes.min()} to {capacity} rows; medians of {repeats} runs",
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
    console.print(f"largest difference from the padded baseline: {difference:.1e} of the largest output")


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
    for operation_name in OPERATIONS:
        bench(operation_name, "float32", repeats=config.repeats)


if __name__ == "__main__":
    sys.exit(run_program(main, BenchKernels, description=__doc__))
