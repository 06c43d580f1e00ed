"""The call for grouped MLPs: it checks shapes, chooses an implementation, and leaves the rest to it.

To add an implementation, write a function ``(rows, weights, group_sizes, row_scale, out_dtype)`` that JAX can
differentiate and add it to `IMPLEMENTATIONS`: the tests run every entry. It is called with shapes and dtypes that have
been checked, with at least one row, and with no weight buffer that has no slots.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax

from pallas_kernels.grouped_mlp.mosaic import grouped_mlp_mosaic
from pallas_kernels.grouped_mlp.operands import Array, check_operands
from pallas_kernels.grouped_mlp.reference import grouped_mlp_reference
from pallas_kernels.grouped_mlp.triton import grouped_mlp_triton
from pallas_kernels.grouped_mlp.xla import grouped_mlp_xla
from pallas_kernels.implementation import choose_implementation, resolve_out_dtype
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
    """Apply to each group of rows the SwiGLU MLP of its own slot: ``(silu(x W0) * (x W1)) W2^T * scale``.

    Group sizes are data: one compilation serves every split of the rows. Products are summed in float32 (float64 for
    float64 rows). Weights may lie in any number of buffers, which are read where they are. Nothing of the size of
    ``[r, F]`` is stored for the backward pass, which computes gate and up again, and hidden rows are rounded to the
    dtype of rows before the down product; the reference implementation does neither. The call works under `jax.jit`,
    `jax.grad` (once, in reverse), `jax.vmap` and `jax.shard_map`.

    Args:
        rows: ``[r, D]`` floating, the row operand, sorted by group: first the rows of each slot of the first weight
            buffer, then those of the next buffer. Rows beyond the last group are padding and may hold anything.
        weights: the weight buffers, ``[slots, 3, D, F]`` each (gate, up, and down transposed), in the dtype of rows.
            Any of them may have no slots; together they have at least one.
        group_sizes: ``[all slots]`` integer, the number of rows of each slot, buffer after buffer; together at most r.
            Sizes below 0 count as 0, and rows beyond r are left out.
        row_scale: ``[r]`` floating, the factor of each row of the output; None stands for 1.
        out_dtype: the dtype of the result, floating; None stands for that of rows. The gradient of the result is
            rounded to the dtype of rows.
        implementation: the name in `IMPLEMENTATIONS` of the implementation to run. None stands for "mosaic" where
            that can run, which is on Hopper GPUs, in bfloat16, with D and F multiples of 64; it copies rows whose
            number is no multiple of 8. Else it stands for "triton" on NVIDIA GPUs from compute capability 8.0 on, in
            bfloat16, float16 and float32. Elsewhere None stands for "xla", which runs on every platform of JAX and is
            fast on CPUs.

    Returns:
        ``[r, D]``, zero in padding. Gradients of padding and of the weights of empty groups are zero; those of the
        weights come as a sequence of buffers like ``weights``.

    Raises:
        ValueError: if shapes or dtypes do not fit together, if no implementation has the name, or if the named
            implementation cannot run here.

    >>> import jax.numpy as jnp
    >>> rows, homes, replicas = jnp.ones((4, 2)), jnp.ones((2, 3, 2, 8)), jnp.ones((1, 3, 2, 8))
    >>> grouped_mlp(rows, (homes, replicas), jnp.array([2, 0, 1]))[:, 0].round().tolist()
    [28.0, 28.0, 28.0, 0.0]
    """
    rows, buffers, group_sizes, row_scale = check_operands(rows, weights, group_sizes, row_scale)
    dtype = resolve_out_dtype(out_dtype, rows)
    name = choose_implementation(
        implementation, IMPLEMENTATIONS, rows, dtype, D=rows.shape[1], F=buffers[0].shape[3]
    )
    if rows.size == 0:
        return rows.astype(dtype)
    rows, group_sizes, row_scale, *varying = match_varying_axes(rows, group_sizes, row_scale, *buffers)
    return IMPLEMENTATIONS[name](rows, tuple(varying), group_sizes, row_scale, dtype)
