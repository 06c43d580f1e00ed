"""Other kernels for the three grouped products, where they are installed and take the shape."""

import functools
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

from pallas_kernels.hopper.tiles import Shape

CHECK: Final = "jax.lax.ragged_dot"
"""The peer that results are compared with."""
_WEIGHT_GRADIENT: Final = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def products(
    operation: str, x: jax.Array, d_out: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> dict[str, Callable[[], Any]]:
    """The peers that do an operation of `experiments.bench_gpu`, compiled; those that refuse are left out.

    Args:
        operation: "forward", "input gradient" or "weight gradient".
        x: ``[r, k]``.
        d_out: ``[r, n]``.
        weights: ``[groups, k, n]``; all in one buffer, as peers want it.
        group_sizes: ``[groups]``.
    """
    runs: dict[str, Callable[[], Any]] = {}
    for name, call in _calls(operation, x.shape[1], weights.shape[2]).items():
        run = functools.partial(jax.jit(call), x, d_out, weights, group_sizes)
        try:
            jax.block_until_ready(run())
        # Peers refuse shapes each in their own way.
        except Exception as error:
            print(f"{name}, {operation}: {str(error).splitlines()[0][:100]}")
        else:
            runs[name] = run
    return runs


def _calls(operation: str, k: int, n: int) -> dict[str, Callable[..., Any]]:
    tiles: dict[str, Any] = {
        "block_m": 128,
        "block_n": 128,
        "block_k": 64,
        "max_concurrent_steps": 4,
        "grid_block_n": 4,
    }
    example: Callable[..., Any] = functools.partial(ragged_dot_mgpu.ragged_dot, **tiles)
    if operation == "weight gradient":
        outer: Callable[..., Any] = functools.partial(
            transposed_ragged_dot_mgpu.transposed_ragged_dot, **tiles
        )
        return {
            CHECK: lambda x, dy, w, sizes: jax.lax.ragged_dot_general(x, dy, sizes, _WEIGHT_GRADIENT),
            "JAX's example": lambda x, dy, w, sizes: outer(x, dy, group_sizes=sizes),
        }
    forward = operation == "forward"

    def left(x: jax.Array, dy: jax.Array) -> jax.Array:
        return x if forward else dy

    def right(w: jax.Array) -> jax.Array:
        return w if forward else jnp.swapaxes(w, 1, 2)

    calls: dict[str, Callable[..., Any]] = {
        CHECK: lambda x, dy, w, sizes: jax.lax.ragged_dot(left(x, dy), right(w), sizes),
        "JAX's example": lambda x, dy, w, sizes: example(
            left(x, dy), w, group_sizes=sizes, transpose_rhs=not forward
        ),
    }
    try:
        tokamax: Any = importlib.import_module("tokamax")
    except ImportError:
        return calls
    for implementation in ("mosaic", None):
        dot = functools.partial(tokamax.ragged_dot, implementation=implementation)
        name = f"tokamax, {implementation or 'default'}"
        calls[name] = lambda x, dy, w, sizes, dot=dot: dot(left(x, dy), right(w), group_sizes=sizes)
    return calls


def torch_seconds(operation: str, shape: Shape, sizes: np.ndarray, repeats: int) -> dict[str, float]:
    """PyTorch's grouped matmul, forward and input gradient; empty where it is not installed or not this operation."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return {}
    if operation not in ("forward", "input gradient") or not hasattr(torch, "_grouped_mm"):
        return {}
    k, n = (shape.width, shape.expert_width)[:: 1 if operation == "forward" else -1]
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    rows, weights = torch.randn(int(sizes.sum()), k, **options), torch.randn(sizes.size, k, n, **options)
    ends = torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch._grouped_mm(rows, weights, offs=ends)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"torch._grouped_mm": statistics.median(times[3:])}
