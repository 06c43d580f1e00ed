"""The grouped MLP with products of float8 operands, forward only.

Rows, hidden rows and weights are rounded to e4m3 in blocks along the contraction dimension: 128 numbers of a row, and
128 x 128 numbers of a matrix (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). `pallas_kernels.grouped_dot_float8`
multiplies them: on float8 tensor cores where it has a kernel for the GPU, and elsewhere as products of wider numbers
with the same values, up to the order of summation. Hopper's tensor cores sum the products of a block with fewer bits
than float32 (same section, "increasing accumulation precision"), which the emulation does not show.

Gate and up are one product, whose matrices lie side by side. Their columns are rounded to the dtype of the rows before
SwiGLU.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from experiments.float8.rounding import Rounded, round_to_float8
from pallas_kernels import grouped_dot_float8, grouped_mlp
from pallas_kernels.products import SCALE_BLOCK
from relibra_jax.contract.types import Array
from relibra_jax.execution.expert_mlp import DOWN


def grouped_mlp_float8(
    rows: Array,
    weights: Sequence[Array],
    group_sizes: Array,
    row_scale: Array | None = None,
    *,
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
        implementation: the name of the `pallas_kernels.grouped_dot_float8` implementation that multiplies the rounded
            numbers. None chooses one as there.

    Returns:
        The outputs, ``[r, D]``, in the dtype of the rows, with zeros in the padding.

    Raises:
        ValueError: if shapes or dtypes do not match as for `grouped_mlp`, if the rows are float16, whose exponent range
            is too small for the scales, or if the call is differentiated.

    >>> rows, weights = jnp.ones((3, 2)), jnp.ones((2, 3, 2, 8))
    >>> grouped_mlp_float8(rows, [weights], jnp.array([1, 1]))[:, 0].tolist()  # hidden 3.52 is rounded to 3.5
    [28.0, 28.0, 0.0]
    """
    rows, group_sizes = jnp.asarray(rows), jnp.asarray(group_sizes)
    exact = functools.partial(grouped_mlp, implementation="reference")
    jax.eval_shape(exact, rows, weights, group_sizes, row_scale)  # checks the operands, and computes nothing
    if rows.dtype == jnp.float16:
        raise ValueError(
            "rows: the exponent range of float16 is too small for float8 scales; use bfloat16 rows"
        )
    if row_scale is None:
        row_scale = jnp.ones(len(rows), jnp.promote_types(rows.dtype, jnp.float32))
    if not rows.size:
        return rows
    buffers = tuple(jnp.asarray(buffer) for buffer in weights if len(buffer))
    return _forward(implementation, rows, buffers, group_sizes, jnp.asarray(row_scale))


def _forward(
    implementation: str | None,
    rows: jax.Array,
    buffers: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    row_scale: jax.Array,
) -> jax.Array:
    dtype = jnp.promote_types(rows.dtype, jnp.float32)

    def product(x: Rounded, weights: Sequence[jax.Array]) -> jax.Array:
        """Return the rows times the transposed matrices ``[slots, J, n, k]``, side by side in whole blocks."""
        matrices = [round_to_float8(each, (SCALE_BLOCK, SCALE_BLOCK)) for each in weights]
        values, scales = (
            [each[part].reshape(len(each[part]), -1, each[part].shape[-1]) for each in matrices]
            for part in (0, 1)
        )
        return grouped_dot_float8(
            *x, values, scales, group_sizes, out_dtype=rows.dtype, implementation=implementation
        )

    width, hidden_width = buffers[0].shape[2:]
    x = round_to_float8(rows, (1, SCALE_BLOCK))
    both = product(x, [jnp.swapaxes(buffer[:, :DOWN], 2, 3) for buffer in buffers])
    gate, up = (half[:, :hidden_width].astype(dtype) for half in jnp.split(both, 2, axis=1))
    hidden = round_to_float8(jax.nn.silu(gate) * up, (1, SCALE_BLOCK))
    # A factor of a row is a factor of the scales of its blocks.
    hidden = hidden._replace(scales=hidden.scales * row_scale.astype(dtype)[:, None])
    return product(hidden, [buffer[:, DOWN:] for buffer in buffers])[:, :width]
