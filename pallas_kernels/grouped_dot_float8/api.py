"""The public function for grouped products of float8 operands: it checks them and chooses an implementation.

To add an implementation, write a function ``(rows, row scales, weights, weight scales, group_sizes, out_dtype)`` and
add it to `IMPLEMENTATIONS`; the tests run every entry.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_dot_float8.mosaic import grouped_dot_float8_mosaic
from pallas_kernels.grouped_dot_float8.triton import grouped_dot_float8_triton
from pallas_kernels.grouped_dot_float8.xla import grouped_dot_float8_xla
from pallas_kernels.implementation import choose_implementation
from pallas_kernels.operands import (
    Array,
    as_arrays,
    check_group_sizes,
    check_weights,
    describe,
    resolve_out_dtype,
)
from pallas_kernels.products import SCALE_BLOCK
from pallas_kernels.varying_axes import match_varying_axes

FLOAT8: Final = jnp.dtype("float8_e4m3fn")
"""The dtype of the operands."""
ROW_DTYPES: Final = dict.fromkeys(("mosaic", "triton"), (FLOAT8.name,))
"""The row dtypes of the kernels."""
CHECK: Final = "float8"
"""The name of the check of the kernels (`pallas_kernels.self_check`)."""
IMPLEMENTATIONS: Final[Mapping[str, Callable[..., jax.Array]]] = {
    "xla": grouped_dot_float8_xla,
    "mosaic": grouped_dot_float8_mosaic,
    "triton": grouped_dot_float8_triton,
}
"""All implementations of the grouped product of float8 operands, by name."""


def grouped_dot_float8(
    rows: Array,
    row_scales: Array,
    weights: Sequence[Array],
    weight_scales: Sequence[Array],
    group_sizes: Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    implementation: str | None = None,
) -> jax.Array:
    """Multiply each group of float8 rows by the transposed float8 matrix of its weight slot, with scales of blocks.

    These are the products of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2): 128 numbers of a row along the contraction
    share a scale, and so do 128 x 128 numbers of a matrix. The product of a block is multiplied by both scales and
    added in float32. Checkpoints of DeepSeek-V3 (its README_WEIGHTS.md) and of Qwen's FP8 models have such weights:
    ``[n, k]`` in e4m3 with ``weight_block_size`` [128, 128], whose ``weight_scale_inv`` are these scales. A scale of a
    whole row is the same scale for each of its blocks. There is no gradient.

    Args:
        rows: the row operand, float8_e4m3fn ``[r, k]``, sorted by group as for `pallas_kernels.grouped_dot`. k is a
            multiple of 128. Rows after the last group are padding and may have any value.
        row_scales: the factors of the blocks of each row, float32 ``[r, k / 128]``.
        weights: the weight buffers, each float8_e4m3fn ``[slots, n, k]``. n is a multiple of 128.
        weight_scales: the factors of the blocks of each matrix, for each buffer float32 ``[slots, n / 128, k / 128]``.
        group_sizes: the number of rows of each slot, as for `pallas_kernels.grouped_dot`, integer ``[all slots]``.
        out_dtype: the floating-point dtype of the result.
        implementation: the name of the implementation to run, a key of `IMPLEMENTATIONS`. "mosaic" multiplies on
            Hopper's float8 tensor cores, and "triton" on those of NVIDIA GPUs of compute capability 8.9 or higher.
            "xla" runs on every platform: it multiplies the operands by their scales and computes in the dtype of the
            scales, which may be float64. None chooses the first that can run, and skips kernels that have not passed
            `pallas_kernels.self_check` on this machine.

    Returns:
        The products, ``[r, n]``, with zeros in the padding.

    Raises:
        ValueError: if shapes or dtypes do not match, if no implementation has the given name, or if the named
            implementation cannot run on this device with these operands.

    >>> rows, weights = jnp.ones((3, 128), "float8_e4m3fn"), jnp.ones((2, 128, 128), "float8_e4m3fn")
    >>> scales = jnp.array([[1.0], [0.5], [1.0]]), jnp.array([2.0, 3.0]).reshape(2, 1, 1)
    >>> grouped_dot_float8(rows, scales[0], [weights], [scales[1]], jnp.array([1, 1]))[:, 0].tolist()
    [256.0, 192.0, 0.0]
    """
    rows, row_scales, group_sizes = as_arrays(rows=rows, row_scales=row_scales, group_sizes=group_sizes)
    if rows.ndim != 2 or rows.dtype != FLOAT8 or rows.shape[1] % SCALE_BLOCK or not rows.shape[1]:
        raise ValueError(
            f"rows: expected {FLOAT8}[r, k] with k a positive multiple of {SCALE_BLOCK}, found {describe(rows)}"
        )
    buffers = check_weights(weights, rows, "n", rows.shape[1])
    columns, blocks = buffers[0].shape[1], rows.shape[1] // SCALE_BLOCK
    if columns % SCALE_BLOCK or not columns:
        raise ValueError(f"weights: n={columns} is not a positive multiple of {SCALE_BLOCK}")
    _check_scales("row_scales", row_scales, (len(rows), blocks), row_scales.dtype)
    scales = as_arrays(**{f"weight_scales[{number}]": scale for number, scale in enumerate(weight_scales)})
    if len(scales) != len(weights):
        raise ValueError(
            f"weight_scales: expected {len(weights)} arrays like the weights, found {len(scales)}"
        )
    for number, (scale, buffer) in enumerate(zip(scales, weights, strict=True)):
        shape = (len(buffer), columns // SCALE_BLOCK, blocks)
        _check_scales(f"weight_scales[{number}]", scale, shape, row_scales.dtype)
    check_group_sizes(group_sizes, [len(buffer) for buffer in buffers])
    dtype = resolve_out_dtype(out_dtype, rows)
    if implementation is None and row_scales.dtype != jnp.float32:
        implementation = "xla"
    name = choose_implementation(
        implementation,
        IMPLEMENTATIONS,
        rows,
        dtype,
        check=CHECK,
        row_dtypes=ROW_DTYPES,
        k=rows.shape[1],
        n=columns,
    )
    if name != "xla" and row_scales.dtype != jnp.float32:
        raise ValueError(
            f"implementation={name!r} cannot run: row_scales are {row_scales.dtype}, not float32"
        )
    if not len(rows):
        return jnp.zeros((0, columns), dtype)
    of_buffers = [scale for scale in scales if len(scale)]
    rows, row_scales, group_sizes, *varying = match_varying_axes(
        rows, row_scales, group_sizes, *buffers, *of_buffers
    )
    count = len(buffers)
    return _dot(name, dtype, rows, row_scales, tuple(varying[:count]), tuple(varying[count:]), group_sizes)


def _check_scales(name: str, scales: jax.Array, shape: tuple[int, ...], dtype: Any) -> None:
    is_wide = dtype in (jnp.float32, jnp.float64)
    if scales.shape != shape or scales.dtype != dtype or not is_wide:
        expected = dtype if is_wide else "float32"
        raise ValueError(f"{name}: expected {expected}{list(shape)}, found {describe(scales)}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _dot(name: str, dtype: Any, *operands: Any) -> jax.Array:
    rows, row_scales, weights, weight_scales, group_sizes = operands
    return IMPLEMENTATIONS[name](rows, row_scales, weights, weight_scales, group_sizes, dtype)


@_dot.defjvp
def _reject_gradient(*_: Any) -> Any:
    raise ValueError(
        "grouped_dot_float8 has no gradient: float8 is for rollout and recompute, not for updates"
    )
