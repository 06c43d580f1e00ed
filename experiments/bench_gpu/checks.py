"""The checks before anything is timed: results and gradients of the kernels against those of the XLA implementation."""

import functools
import itertools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench_gpu.operations import random_array
from pallas_kernels import grouped_dot, grouped_mlp

PATTERNS: Final = ((640, 256), (8192, 1024))
"""Rows and width at which all patterns of empty groups are checked: for small tiles, and for large ones."""
TOLERANCE: Final = 0.02
"""The largest difference, as a part of the largest entry: what bfloat16 explains where hidden rows are rounded."""


def assert_close(name: str, ours: Any, theirs: Any) -> None:
    """Compare every array of two results, on the scale of its largest entry.

    Args:
        name: what is compared, for the error message.
        ours: the result that is checked, a tree of arrays.
        theirs: the result to compare with.

    Raises:
        AssertionError: if a result is off by more than bfloat16 explains, or is not a number.
    """
    for found, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        off, largest = (float(one) for one in _distance(found, wanted))
        assert off <= TOLERANCE * largest, f"{name}: off by {off:.3g}, the largest entry is {largest:.3g}"


@jax.jit
def _distance(found: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    difference = found.astype(jnp.float32) - wanted.astype(jnp.float32)
    return jnp.max(jnp.abs(difference), initial=0), jnp.max(jnp.abs(wanted), initial=0)


def check_patterns(rows: int, width: int, implementation: str) -> int:
    """Compare results and gradients for all 2^8 patterns of empty groups, with one program for all of them.

    Weights lie in three buffers, group sizes are no multiples of a tile, and padding is not a number.

    Args:
        rows: the number of rows of the row operand.
        width: the width of rows, of hidden rows and of results.
        implementation: the implementation of `pallas_kernels` that is checked.

    Returns:
        How many results were compared with those of the XLA implementation.

    Raises:
        AssertionError: if a result is off.
    """
    slots = 4, 2, 2
    draw = np.random.default_rng(0)

    def products(implementation, x, dy, weights, sizes):
        def dot(x, weights):
            return grouped_dot(x, weights, sizes, implementation=implementation)

        out, pull = jax.vjp(dot, x, [buffer[:, 0] for buffer in weights])
        return out, *pull(dy)

    def mlp(implementation, x, dy, weights, sizes):
        def call(x, weights, scale):
            return grouped_mlp(x, weights, sizes, scale, implementation=implementation)

        scale = jnp.linspace(0.5, 2, rows, dtype=jnp.float32)
        out, pull = jax.vjp(call, x, weights, scale)
        return out, *pull(dy)

    arrays = [random_array(rows, width, seed=seed) for seed in range(2)]
    weights = [random_array(count, 3, width, width, seed=2 + seed) for seed, count in enumerate(slots)]
    compared = 0
    for check in (products, mlp):
        ours, theirs = (jax.jit(functools.partial(check, name)) for name in (implementation, "xla"))
        for pattern in itertools.product((0, 1), repeat=sum(slots)):
            sizes = draw.multinomial(rows - 5, np.ones(sum(slots)) / sum(slots)).astype(np.int32) * np.array(
                pattern, np.int32
            )
            beyond = np.arange(rows)[:, None] >= sizes.sum()
            x, dy = (jnp.where(beyond, jnp.nan, one) for one in arrays)
            operands = (x, dy, weights, jnp.asarray(sizes))
            assert_close(f"{check.__name__} of groups {sizes.tolist()}", ours(*operands), theirs(*operands))
            compared += 1
    return compared
