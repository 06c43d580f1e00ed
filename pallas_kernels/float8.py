"""Rounding to float8 (e4m3) by blocks, each with a scale of its own.

An e4m3 number has four exponent bits and three of mantissa: a value is off by at most 1/16 of itself, and one below
``2**-6`` by at most ``2**-10``. The largest is 448, so a block is divided by a scale that brings its largest magnitude
to 448 or below: the smallest power of two that does. Powers of two are the scales of the microscaling formats, too (OCP
MX specification 1.0): dividing and multiplying by them is exact, so what a block stands for is exact in bfloat16. The
blocks of `pallas_kernels.grouped_mlp_float8` are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2).
"""

from typing import Final

import jax
import jax.numpy as jnp

FLOAT8: Final = jnp.float8_e4m3fn
SMALLEST_SCALE: Final = -117
"""The least exponent of a scale: multiplied by it, the smallest e4m3 number, ``2**-9``, is still a normal float32."""


def round_to_float8(array: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Round every block of matrices to float8 with a scale of its own, and multiply by the scale again.

    Args:
        array: ``[..., m, n]`` bfloat16 or wider, the matrices.
        block: the rows and the columns of a block; those at the end of a matrix are as large as what is left.

    Returns:
        What the float8 numbers and their scales stand for, exact in the dtype of ``array``. A block that holds an
        infinity or NaN is NaN throughout; float8 has no infinity. What is rounded up to ``2**128`` is infinite.

    >>> round_to_float8(jnp.array([[1.0, 1.05, 1.07, 448.0], [1.0, 0.3, 0.0, 1000.0]]), (1, 3)).tolist()
    [[1.0, 1.0, 1.125, 448.0], [1.0, 0.3125, 0.0, 1024.0]]
    """
    dtype = jnp.promote_types(array.dtype, jnp.float32)
    *stack, m, n = array.shape
    blocks = _split(array.astype(dtype), block)
    scale = block_scale(jnp.abs(blocks).max((-3, -1), keepdims=True))
    rounded = (blocks / scale).astype(FLOAT8).astype(dtype) * scale
    rows, columns = (count * size for count, size in zip(blocks.shape[-4::2], block, strict=True))
    return rounded.reshape(*stack, rows, columns)[..., :m, :n].astype(array.dtype)


def block_scale(largest: jax.Array) -> jax.Array:
    """The scale of a block: the smallest power of two that leaves at most 448 of its largest magnitude.

    Args:
        largest: the largest magnitude of each block, float32 or wider.

    Returns:
        The scales, at least ``2**-117``; NaN where ``largest`` is not finite, any where it is 0.

    >>> jnp.log2(block_scale(jnp.array([448.0, 449.0, 1.75, 1e-37]))).tolist()
    [0.0, 1.0, -8.0, -117.0]
    """
    mantissa, exponent = jnp.frexp(largest)
    # 448 is 0.875 * 2**9, and a mantissa is at least 0.5 and below 1.
    exponent = exponent - jnp.where(mantissa > 0.875, 8, 9)
    scale = jnp.ldexp(jnp.ones_like(largest), jnp.maximum(exponent, SMALLEST_SCALE))
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _split(array: jax.Array, block: tuple[int, int]) -> jax.Array:
    """``[..., m, n]`` as ``[..., blocks, rows, blocks, columns]``, filled up with zeros."""
    *stack, m, n = array.shape
    rows, columns = block
    filled = jnp.pad(array, [(0, 0)] * len(stack) + [(0, -m % rows), (0, -n % columns)])
    return filled.reshape(*stack, -(-m // rows), rows, -(-n // columns), columns)
