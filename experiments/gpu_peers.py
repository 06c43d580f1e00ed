"""Other kernels for the three grouped products, where they are installed and take the shape."""

import functools
import importlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

type Product = Literal["forward", "input gradient", "weight gradient"]
type Call = Callable[..., jax.Array]
"""``(x, d_out, weights, group_sizes)``: ``[r, k]``, ``[r, n]``, ``[groups, k, n]`` in one buffer, ``[groups]``."""

CHECK: Final = "jax.lax.ragged_dot"
"""The peer that results are compared with."""
_WEIGHT_GRADIENT: Final = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
_TILES: Final[dict[str, Any]] = {
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "max_concurrent_steps": 4,
    "grid_block_n": 4,
}


def calls(product: Product) -> dict[str, Call]:
    """Who can do a product, by name."""
    return {CHECK: _ragged_dot(product), "JAX's example": _example(product)} | _tokamax(product)


def _ragged_dot(product: Product) -> Call:
    return {
        "forward": lambda x, dy, w, sizes: jax.lax.ragged_dot(x, w, sizes),
        "input gradient": lambda x, dy, w, sizes: jax.lax.ragged_dot(dy, jnp.swapaxes(w, 1, 2), sizes),
        "weight gradient": lambda x, dy, w, sizes: jax.lax.ragged_dot_general(x, dy, sizes, _WEIGHT_GRADIENT),
    }[product]


def _example(product: Product) -> Call:
    dot: Call = functools.partial(ragged_dot_mgpu.ragged_dot, **_TILES)
    outer: Call = functools.partial(transposed_ragged_dot_mgpu.transposed_ragged_dot, **_TILES)
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

        # Its own gradients; the product forward is not computed for them.
        out, pull = jax.vjp(dot, x, w)
        return {"forward": lambda: out, "input gradient": lambda: pull(dy)[0]}.get(
            product, lambda: pull(dy)[1]
        )()

    return {
        f"tokamax, {implementation or 'default'}": functools.partial(call, implementation=implementation)
        for implementation in ("mosaic", None)
    }


def torch_seconds(
    product: str, shape: tuple[int, int], sizes: np.ndarray, *, sets: int, repeats: int
) -> Mapping[str, float]:
    """Median seconds of PyTorch's grouped matmul over ``sets`` sets of operands; empty where it is not installed.

    Args:
        product: another operation than the three products has no number.
        shape: k and n.
        sizes: ``[groups]``.
        sets: operands that take turns, so that no call finds its own in a cache.
        repeats: readings.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    ends = torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    rows = int(sizes.sum())
    operands = [
        (randn(rows, shape[0]), randn(rows, shape[1]), randn(sizes.size, *shape)) for _ in range(sets)
    ]
    call = {
        "forward": lambda x, dy, w: multiply(x, w, offs=ends),
        "input gradient": lambda x, dy, w: multiply(dy, w.transpose(1, 2), offs=ends),
        "weight gradient": lambda x, dy, w: multiply(x.t(), dy, offs=ends),
    }.get(product)
    if call is None:
        return {}
    milliseconds = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for one in operands:
            call(*one)
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end) / sets)
    return {"torch grouped_mm": statistics.median(milliseconds[3:]) / 1e3}
