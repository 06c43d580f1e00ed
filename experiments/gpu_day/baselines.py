"""The baselines: MLPs of dense and ragged matmuls, and for the products jax.lax, JAX's kernels, tokamax and PyTorch.

A baseline for the products is measured if it is installed and supports the shape.
"""

import functools
import importlib
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

from experiments.ladder.facts import print_facts

type Product = Literal["forward", "input gradient", "weight gradient"]
"""A grouped product, by name."""
type Call = Callable[..., jax.Array]
"""A function ``(x, d_out, weights, group_sizes)`` of ``[r, k]``, ``[r, n]``, ``[groups, k, n]`` and ``[groups]``."""

PRODUCTS: Final = get_args(Product.__value__)
"""The names of all grouped products."""
_WEIGHT_GRADIENT: Final = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
_EXAMPLE_TILES: Final = ((128, 128), (64, 128), (64, 64))
"""The tile heights and widths for JAX's example, which does not support shapes that they do not divide."""


def dense_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Apply one MLP to rows ``x[..., r, D]``, with three matrices ``[..., D, F]`` whose first axes are those of x."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ jnp.swapaxes(down, -1, -2)


def ragged_mlp(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Apply each group's MLP ``[3, D, F]`` to its rows with three calls of `jax.lax.ragged_dot`."""
    gate, up, down = (weights[:, part] for part in range(3))
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    return jax.lax.ragged_dot(hidden, down.swapaxes(1, 2), sizes)


def calls(product: Product) -> dict[str, Call]:
    """Return the functions that compute a product on JAX arrays, by the name of the baseline."""
    examples = {f"JAX's example, {m}x{n}": _example(product, m, n) for m, n in _EXAMPLE_TILES}
    return {"jax.lax.ragged_dot": _ragged_dot(product)} | examples | _tokamax(product)


def _ragged_dot(product: Product) -> Call:
    return {
        "forward": lambda x, dy, w, sizes: jax.lax.ragged_dot(x, w, sizes),
        "input gradient": lambda x, dy, w, sizes: jax.lax.ragged_dot(dy, jnp.swapaxes(w, 1, 2), sizes),
        "weight gradient": lambda x, dy, w, sizes: jax.lax.ragged_dot_general(x, dy, sizes, _WEIGHT_GRADIENT),
    }[product]


def _example(product: Product, rows: int, columns: int) -> Call:
    tiles: dict[str, Any] = {"block_m": rows, "block_n": columns, "block_k": 64}
    tiles |= {"max_concurrent_steps": 4, "grid_block_n": 4}
    dot: Call = functools.partial(ragged_dot_mgpu.ragged_dot, **tiles)
    outer: Call = functools.partial(transposed_ragged_dot_mgpu.transposed_ragged_dot, **tiles)
    return {
        "forward": lambda x, dy, w, sizes: dot(x, w, group_sizes=sizes),
        "input gradient": lambda x, dy, w, sizes: dot(dy, w, group_sizes=sizes, transpose_rhs=True),
        "weight gradient": lambda x, dy, w, sizes: outer(x, dy, group_sizes=sizes),
    }[product]


def _tokamax(product: Product) -> dict[str, Call]:
    try:
        tokamax: Any = importlib.import_module("tokamax")
    except ImportError:
        return {}

    def call(x, dy, w, sizes, implementation):
        def dot(x, w):
            return tokamax.ragged_dot(x, w, group_sizes=sizes, implementation=implementation)

        # The gradients are tokamax's own. A program for gradients does not compute the forward product.
        out, pull = jax.vjp(dot, x, w)
        return {"forward": lambda: out, "input gradient": lambda: pull(dy)[0]}.get(
            product, lambda: pull(dy)[1]
        )()

    return {
        f"tokamax, {implementation or 'default'}": functools.partial(call, implementation=implementation)
        for implementation in ("mosaic", None)
    }


def torch_seconds(
    product: Product, shape: tuple[int, int], sizes: np.ndarray, *, sets: int, repeats: int
) -> Mapping[str, float]:
    """Return the median time of PyTorch's grouped matmul in seconds, by name; empty if PyTorch cannot run it.

    Args:
        product: the product to compute.
        shape: k and n.
        sizes: the group sizes, ``[groups]``.
        sets: the number of operand sets, which alternate so that no operands are still in a cache.
        repeats: the number of readings.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    try:
        return {"torch grouped_mm": _torch_seconds(torch, product, shape, sizes, sets, repeats)}
    except RuntimeError as error:
        print_facts(operation=product, by="torch grouped_mm", refused=str(error).splitlines()[0][:100])
        return {}


def _torch_seconds(torch, product: Product, shape, sizes: np.ndarray, sets: int, repeats: int) -> float:
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    ends = torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    call: Callable[..., Any] = {
        "forward": lambda x, dy, w: multiply(x, w, offs=ends),
        "input gradient": lambda x, dy, w: multiply(dy, w.transpose(1, 2), offs=ends),
        "weight gradient": lambda x, dy, w: multiply(x.t(), dy, offs=ends),
    }[product]
    rows = int(sizes.sum())
    operands = [
        (randn(rows, shape[0]), randn(rows, shape[1]), randn(sizes.size, *shape)) for _ in range(sets)
    ]

    def milliseconds(rounds: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            for operand_set in operands:
                call(*operand_set)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / (rounds * sets)

    milliseconds(3)
    # Readings are as long as those of the other versions, so that kernels hide the launches of the next ones.
    rounds = math.ceil(20 / (milliseconds(1) * sets))
    return statistics.median(milliseconds(rounds) for _ in range(repeats)) / 1e3
