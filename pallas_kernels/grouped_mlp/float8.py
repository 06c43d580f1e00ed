"""The grouped MLP in float8, forward only: what ranks run that are to be faster than exact.

Rows, hidden rows and weights are rounded to e4m3 by blocks along the dimension that a product sums over: 128 numbers of
a row, and 128 x 128 of a matrix (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Products of e4m3 numbers, and their
scales, are exact in float32, where they are summed. So the values are those of float8 products, up to the order of a
sum, while the products themselves run in the dtype of rows by `pallas_kernels.grouped_dot`, on every platform alike: no
backend of XLA has a grouped float8 product with a scale for each block. This therefore shows the error of float8, and
not its speed. Tensor cores of Hopper sum float8 products in fewer bits than float32 (the same section, "increasing
accumulation precision"), which adds to the error.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.float8 import round_to_float8
from pallas_kernels.group_loops import group_bounds
from pallas_kernels.grouped_dot.api import grouped_dot
from pallas_kernels.grouped_mlp.operands import Array, check_operands
from pallas_kernels.implementation import resolve_out_dtype

BLOCK: Final = 128
"""Numbers along the dimension that a product sums over which share a scale, and the other side of a weights' block."""


def grouped_mlp_float8(
    rows: Array,
    weights: Sequence[Array],
    group_sizes: Array,
    row_scale: Array | None = None,
    *,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Apply to each group of rows the SwiGLU MLP of its own slot, as `grouped_mlp` does, in float8.

    Weights are rounded at every call, which takes another copy of them in memory. NaN and infinity in a row make that
    row NaN, in weights the rows of their group. There is no gradient: float8 is for passes that nothing is learnt from.

    Args:
        rows: ``[r, D]`` bfloat16, float32 or float64, the row operand, sorted by group as for `grouped_mlp`.
        weights: the weight buffers, ``[slots, 3, D, F]`` each, in the dtype of rows.
        group_sizes: ``[all slots]`` integer, the number of rows of each slot, buffer after buffer.
        row_scale: ``[r]`` floating, the factor of each row of the output, which is not rounded; None stands for 1.
        out_dtype: the dtype of the result, floating; None stands for that of rows.
        implementation: the implementation of `grouped_dot` that multiplies the rounded numbers; None as there.

    Returns:
        ``[r, D]``, zero in padding.

    Raises:
        ValueError: if shapes or dtypes do not fit together, as for `grouped_mlp`; rows are float16, whose exponents are
            too few for the scales; or the call is differentiated.

    >>> rows, weights = jnp.ones((3, 2)), jnp.ones((2, 3, 2, 8))
    >>> grouped_mlp_float8(rows, [weights], jnp.array([1, 1]))[:, 0].tolist()  # hidden 3.52 is rounded to 3.5
    [28.0, 28.0, 0.0]
    """
    operands = check_operands(rows, weights, group_sizes, row_scale)
    if operands.rows.dtype == jnp.float16:
        raise ValueError("rows: float16 has too few exponents for the scales of float8 blocks; give bfloat16")
    dtype = resolve_out_dtype(out_dtype, operands.rows)
    if operands.rows.size == 0:
        return operands.rows.astype(dtype)
    return _forward(dtype, implementation, *operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward(
    out_dtype: Any,
    implementation: str | None,
    rows: jax.Array,
    buffers: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    row_scale: jax.Array,
) -> jax.Array:
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    rounded = [round_to_float8(buffer, (BLOCK, BLOCK)) for buffer in buffers]
    product = functools.partial(
        grouped_dot, group_sizes=group_sizes, out_dtype=dtype, implementation=implementation
    )

    def matrices(index: int) -> list[jax.Array]:
        return [buffer[:, index] for buffer in rounded]

    x = round_to_float8(rows, (1, BLOCK))
    hidden = jax.nn.silu(product(x, matrices(0))) * product(x, matrices(1))
    hidden = round_to_float8(hidden, (1, BLOCK)).astype(rows.dtype)
    out = product(hidden, matrices(2), transposed=True) * row_scale.astype(dtype)[:, None]
    # Padding has whatever scale it was given.
    real = jnp.arange(rows.shape[0], dtype=jnp.int32) < group_bounds(group_sizes, rows.shape[0])[-1]
    return jnp.where(real[:, None], out, 0).astype(out_dtype)


@_forward.defjvp
def _refuse(*_: Any) -> Any:
    raise ValueError(
        "grouped_mlp_float8 has no gradient: float8 is for rollout and recompute, not for updates"
    )
