"""The price of a branch on a GPU: a scan whose steps choose one of several copies, beside one that always copies.

A fitted exchange chooses its length in each layer by a `jax.lax.switch`. On a GPU the host may have to read the choice
before it can launch the branch, while the GPU waits.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp

from experiments.gpu_day.operations import random_array
from experiments.gpu_day.timing import median_seconds
from experiments.ladder.facts import print_facts
from relibra_jax.routing.lane_lengths import UNFITTED, lane_lengths

WAYS: Final = len(lane_lengths(1024, UNFITTED))
"""The number of branches, as many as a fitted exchange has lengths."""
STEPS: Final = 48
"""The number of steps of the scan, as many as Qwen3-30B-A3B has layers."""


def measure_branches(*, rehearsal: bool = False) -> None:
    """Measure a scan with a product and a copy in each step, whose copy is chosen by a branch or always the same.

    Args:
        rehearsal: whether to measure once at small sizes.
    """
    rows, width = (64, 64) if rehearsal else (8192, 2048)
    x, weight = random_array(rows, width), random_array(width, width, seed=1)
    for products in (1, 8):
        runs = {
            name: functools.partial(_scan(each, products), x, weight, jnp.full(STEPS, WAYS - 1))
            for name, each in (("no copy", lambda _, x: x), ("copy", _always), ("branch", _branch))
        }
        readings = median_seconds(runs, 1 if rehearsal else 9, shortest=1e-4 if rehearsal else 0.02)
        step = {name: reading.median / STEPS * 1e6 for name, reading in readings.items()}
        print_facts(
            products=products,
            microseconds=step,
            spread=[(reading.high - reading.low) / STEPS * 1e6 for reading in readings.values()],
            branch_microseconds=step["branch"] - step["copy"],
        )


def _copy(part: int, x: jax.Array) -> jax.Array:
    """Return an array of x's shape, whose first ``part`` of `WAYS` - 1 parts of rows are those of x reversed."""
    rows = x.shape[0] * part // (WAYS - 1)
    return jnp.pad(jnp.flip(x[:rows], 0), [(0, x.shape[0] - rows), (0, 0)])


def _always(_: jax.Array, x: jax.Array) -> jax.Array:
    return _copy(WAYS - 1, x)


def _branch(way: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.switch(way, [functools.partial(_copy, part) for part in range(WAYS)], x)


def _scan(move, products: int):
    @jax.jit
    def run(x, weight, ways):
        def step(x, way):
            for _ in range(products):
                x = jax.lax.optimization_barrier(x @ weight)
            return jax.lax.optimization_barrier(move(way, x)), None

        return jax.lax.scan(step, x, ways)[0]

    return run
