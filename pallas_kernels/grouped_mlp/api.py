"""The public function for grouped MLPs: it checks shapes, chooses an implementation, and calls it.

To add an implementation, write a function ``(rows, weights, group_sizes, row_scale, out_dtype)`` that JAX can
differentiate and add it to `IMPLEMENTATIONS`; the tests run every entry. An implementation can rely on checked shapes
and dtypes, on at least one row, and on weight buffers that all have slots.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_mlp.mosaic import grouped_mlp_mosaic
from pallas_kernels.grouped_mlp.reference import grouped_mlp_reference
from pallas_kernels.grouped_mlp.triton import grouped_mlp_triton
from pallas_kernels.grouped_mlp.xla import grouped_mlp_xla
from pallas_kernels.implementation import choose_implementation
from pallas_kernels.operands import (
    Array,
    as_arrays,
    check_group_sizes,
    check_weights,
    describe,
    resolve_out_dtype,
)
from pallas_kernels.varying_axes import match_varying_axes

IMPLEMENTATIONS: Final[Mapping[str, Callable[..., jax.Array]]] = {
    "reference": grouped_mlp_reference,
    "xla": grouped_mlp_xla,
    "mosaic": grouped_mlp_mosaic,
    "triton": grouped_mlp_triton,
}
"""All implementations of the grouped MLP, by name."""


def grouped_mlp(
    rows: Array,
    weights: Sequence[Array],
    group_sizes: Array,
    row_scale: Array | None = None,
    *,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Apply to each group of rows the SwiGLU MLP of its weight slot: ``(silu(x W0) * (x W1)) W2^T * scale``.

    Group sizes are data, so one compilation serves every split of the rows. Products are summed in float32 (float64 for
    float64 rows). The weights may be in any number of buffers, which are read in place, without a copy. No activation
    of size ``[r, F]`` is stored for the backward pass, which recomputes gate and up. The hidden rows are rounded to the
    dtype of the rows before the down product. (The reference implementation does neither.) The function works under
    `jax.jit`, `jax.grad` (first order, reverse mode), `jax.vmap` and `jax.shard_map`.

    Args:
        rows: the row operand, floating-point ``[r, D]``, sorted by group: first the rows of each slot of the first
            weight buffer, then those of the next buffer. Rows after the last group are padding and may have any value.
        weights: the weight buffers, each ``[slots, 3, D, F]`` (gate, up, and down transposed), in the dtype of the
            rows. A buffer may have no slots, but there must be at least one slot in total.
        group_sizes: the number of rows of each slot, in the order of the buffers, integer ``[all slots]``. The sum
            should be at most r. Sizes below 0 count as 0, and rows beyond r are ignored.
        row_scale: the factor of each row of the output, floating-point ``[r]``. None stands for 1.
        out_dtype: the floating-point dtype of the result. None stands for the dtype of the rows. In the backward pass,
            the gradient of the result is rounded to the dtype of the rows.
        implementation: the name of the implementation to run, a key of `IMPLEMENTATIONS`. None chooses "mosaic" on
            Hopper GPUs for bfloat16 rows if D and F are multiples of 64; it copies the rows if their number is not a
            multiple of 8. Else None chooses "triton" on NVIDIA GPUs of compute capability 8.0 or higher for bfloat16,
            float16 and float32 rows. Else None chooses "xla", which runs on every platform of JAX and is fast on CPUs.
            None skips a kernel that has not passed `pallas_kernels.self_check` on this machine.

    Returns:
        The outputs, ``[r, D]``, with zeros in the padding. The gradients of padding and of the weights of empty groups
        are zero. The gradient of the weights is a sequence of buffers with the shapes of ``weights``.

    Raises:
        ValueError: if shapes or dtypes do not match, if no implementation has the given name, or if the named
            implementation cannot run on this device with these operands.

    >>> rows, homes, replicas = jnp.ones((4, 2)), jnp.ones((2, 3, 2, 8)), jnp.ones((1, 3, 2, 8))
    >>> grouped_mlp(rows, (homes, replicas), jnp.array([2, 0, 1]))[:, 0].round().tolist()
    [28.0, 28.0, 28.0, 0.0]
    """
    rows, buffers, group_sizes, row_scale = _check_operands(rows, weights, group_sizes, row_scale)
    dtype = resolve_out_dtype(out_dtype, rows)
    name = choose_implementation(
        implementation, IMPLEMENTATIONS, rows, dtype, D=rows.shape[1], F=buffers[0].shape[3]
    )
    if rows.size == 0:
        return rows.astype(dtype)
    rows, group_sizes, row_scale, *varying = match_varying_axes(rows, group_sizes, row_scale, *buffers)
    return IMPLEMENTATIONS[name](rows, tuple(varying), group_sizes, row_scale, dtype)


def _check_operands(
    rows: Array, weights: Sequence[Array], group_sizes: Array, row_scale: Array | None
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Check the operands, and return them as JAX arrays, without the weight buffers that have no slots."""
    rows, group_sizes = as_arrays(rows=rows, group_sizes=group_sizes)
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"rows: expected floating [r, D], found {describe(rows)}")
    buffers = check_weights(weights, rows, 3, rows.shape[1], "F")
    check_group_sizes(group_sizes, [buffer.shape[0] for buffer in buffers])
    if row_scale is None:
        row_scale = jnp.ones(rows.shape[0], jnp.promote_types(rows.dtype, jnp.float32))
    (row_scale,) = as_arrays(row_scale=row_scale)
    if row_scale.shape != rows.shape[:1] or not jnp.issubdtype(row_scale.dtype, jnp.floating):
        raise ValueError(
            f"row_scale: expected floating [{rows.shape[0]}] for rows {describe(rows)}, found {describe(row_scale)}"
        )
    return rows, buffers, group_sizes, row_scale
