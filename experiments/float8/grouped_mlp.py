"""The grouped MLP with float8 rounding, forward only; it reproduces the numerical error of float8, not its speed.

Rows, hidden rows and weights are rounded to e4m3 in blocks along the contraction dimension: 128 numbers of a row, and
128 x 128 numbers of a matrix (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Products of e4m3 numbers and of their
scales are exact in float32, in which they are summed. The results therefore equal those of float8 products, up to the
order of summation. The products themselves run in the dtype of the rows with `pallas_kernels.grouped_dot`, on all
platforms, because no XLA backend has a grouped float8 product with block scales. Hopper tensor cores sum float8
products with fewer bits than float32 (same section, "increasing accumulation precision"), which adds another error.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from experiments.float8.rounding import round_to_float8
from pallas_kernels import grouped_dot, grouped_mlp
from relibra_jax.contract.types import Array

BLOCK: Final = 128
"""The block size: 128 numbers of a row along the contraction share a scale, and 128 x 128 numbers of a matrix."""


def grouped_mlp_float8(
    rows: Array,
    weights: Sequence[Array],
    group_sizes: Array,
    row_scale: Array | None = None,
    *,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Apply to each group of rows the SwiGLU MLP of its weight slot, as `grouped_mlp` does, with float8 rounding.

    The weights are rounded in every call, which needs memory for a second copy of them. A NaN or infinity in a row
    makes that row NaN; in a slot's weights it makes the rows of the group NaN. The function has no gradient: it is for
    rollout and recompute passes, which are not differentiated.

    Args:
        rows: the row operand, ``[r, D]``, bfloat16, float32 or float64, sorted by group as for `grouped_mlp`.
        weights: the weight buffers, each ``[slots, 3, D, F]``, in the dtype of the rows.
        group_sizes: the number of rows of each slot, in the order of the buffers, integer ``[all slots]``.
        row_scale: the factor of each row of the output, floating-point ``[r]``. It is not rounded to float8. None
            stands for 1.
        out_dtype: the floating-point dtype of the result. None stands for the dtype of the rows.
        implementation: the name of the `grouped_dot` implementation that multiplies the rounded numbers. None chooses
            one as in `grouped_dot`.

    Returns:
        The outputs, ``[r, D]``, with zeros in the padding.

    Raises:
        ValueError: if shapes or dtypes do not match as for `grouped_mlp`, if the rows are float16, whose exponent range
            is too small for the scales, or if the call is differentiated.

    >>> rows, weights = jnp.ones((3, 2)), jnp.ones((2, 3, 2, 8))
    >>> grouped_mlp_float8(rows, [weights], jnp.array([1, 1]))[:, 0].tolist()  # hidden 3.52 is rounded to 3.5
    [28.0, 28.0, 0.0]
    """
    rows, group_sizes = jnp.asarray(rows), jnp.asarray(group_sizes)
    exact = functools.partial(grouped_mlp, out_dtype=out_dtype, implementation="reference")
    result = jax.eval_shape(
        exact, rows, weights, group_sizes, row_scale
    )  # checks the operands, and computes nothing
    if rows.dtype == jnp.float16:
        raise ValueError(
            "rows: the exponent range of float16 is too small for float8 scales; use bfloat16 rows"
        )
    if row_scale is None:
        row_scale = jnp.ones(len(rows), jnp.promote_types(rows.dtype, jnp.float32))
    if not rows.size:
        return jnp.zeros(result.shape, result.dtype)
    buffers = tuple(jnp.asarray(buffer) for buffer in weights if len(buffer))
    return _forward(result.dtype, implementation, rows, buffers, group_sizes, jnp.asarray(row_scale))


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
    # The row scale of padding may have any value, NaN included.
    real = jnp.arange(len(rows), dtype=jnp.int32) < jnp.maximum(group_sizes, 0).sum()
    return jnp.where(real[:, None], out, 0).astype(out_dtype)


@_forward.defjvp
def _reject_gradient(*_: Any) -> Any:
    raise ValueError(
        "grouped_mlp_float8 has no gradient: float8 is for rollout and recompute, not for updates"
    )
