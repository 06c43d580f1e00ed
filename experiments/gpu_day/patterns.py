"""A check of all 2^8 patterns of empty groups: results and gradients of an implementation against blocked XLA."""

import functools
import itertools
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.correctness import interpreter
from experiments.gpu_day.operations import random_array
from experiments.ladder.facts import print_facts
from pallas_kernels import grouped_dot
from pallas_kernels.compare import Difference, check_close
from pallas_kernels.self_check import mlp_with_gradients

SLOTS: Final = (4, 2, 2)
"""The numbers of slots of the three weight buffers."""


def check_patterns(implementation: str, rows: int, width: int, *, rehearsal: bool = False) -> None:
    """Check the products and the MLP for every pattern of empty groups, with one compiled program each.

    Group sizes are not multiples of the tile height, and padding is NaN.

    Args:
        implementation: the implementation of `pallas_kernels` to check.
        rows: the number of rows of the row operand.
        width: the width of rows, of hidden rows and of results.
        rehearsal: whether to check only four patterns with few rows.

    Raises:
        ValueError: if a result or a gradient is wrong.
    """
    if rehearsal:
        rows, width = 40, 64
    draw = np.random.default_rng(0)
    arrays = [random_array(rows, width, seed=seed) for seed in range(2)]
    weights = [random_array(count, 3, width, width, seed=2 + seed) for seed, count in enumerate(SLOTS)]
    patterns = list(itertools.product((0, 1), repeat=sum(SLOTS)))[:: 85 if rehearsal else 1]
    for check in (_products, _mlp):
        run_kernels, run_xla = (jax.jit(functools.partial(check, name)) for name in (implementation, "xla"))
        largest = Difference(0.0, 0.0)
        for pattern in patterns:
            sizes = draw.multinomial(rows - 5, np.ones(sum(SLOTS)) / sum(SLOTS)) * np.array(pattern)
            padding = np.arange(rows)[:, None] >= sizes.sum()
            x, dy = (jnp.where(padding, jnp.nan, array) for array in arrays)
            operands = (x, dy, weights, jnp.asarray(sizes, jnp.int32))
            with interpreter(rehearsal and implementation == "mosaic"):
                result = run_kernels(*operands)
            error = check_close(f"groups {sizes.tolist()}", result, run_xla(*operands))
            largest = Difference(*map(max, largest, error))
        print_facts(
            what=check.__name__.strip("_"),
            rows=rows,
            width=width,
            patterns=len(patterns),
            **largest._asdict(),
        )


def _products(implementation, x, dy, weights, sizes):
    def dot(x, weights):
        return grouped_dot(x, weights, sizes, implementation=implementation)

    out, pull = jax.vjp(dot, x, [buffer[:, 0] for buffer in weights])
    return out, *pull(dy)


def _mlp(implementation, x, dy, weights, sizes):
    scale = jnp.linspace(0.5, 2, len(x), dtype=jnp.float32)
    return mlp_with_gradients(implementation, x, weights, sizes, scale, dy)
