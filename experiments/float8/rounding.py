"""Rounding to float8 (e4m3) in blocks, with one scale for each block.

An e4m3 number has four exponent bits and three mantissa bits. Rounding changes a value by at most 1/16 of itself, and a
value below ``2**-6`` by at most ``2**-10``. The largest e4m3 number is 448. Before rounding, a block is divided by its
scale, which is the smallest power of two that brings the block's largest magnitude to 448 or below. The microscaling
formats (OCP MX specification 1.0) also use powers of two. Dividing and multiplying by them is exact, so the rounded
values times the scale are exact in bfloat16. The blocks of `experiments.float8.grouped_mlp` are those of DeepSeek-V3
(arXiv:2412.19437, section 3.3.2).
"""

from typing import Final

import jax
import jax.numpy as jnp

FLOAT8: Final = jnp.float8_e4m3fn
SMALLEST_SCALE: Final = -117
"""The smallest exponent of a scale: ``2**-117`` times the smallest e4m3 number, ``2**-9``, is still a normal
float32."""


def round_to_float8(array: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Round every block of each matrix to float8 and return the rounded values, with the scale multiplied back in.

    Args:
        array: the matrices, ``[..., m, n]``, bfloat16 or wider.
        block: the numbers of rows and columns of a block. The last blocks of a matrix may be smaller.

    Returns:
        The rounded values, in the dtype of ``array``, which represents them exactly. A block that contains an infinity
        or a NaN becomes NaN in every entry, since float8 has no infinity. A value that rounds up to ``2**128`` becomes
        infinite.

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
    """Return the scale of each block: the smallest power of two that divides the largest magnitude to 448 or below.

    Args:
        largest: the largest magnitude of each block, float32 or wider.

    Returns:
        The scales, at least ``2**-117``. A scale is NaN where ``largest`` is not finite, and arbitrary where it is 0.

    >>> jnp.log2(block_scale(jnp.array([448.0, 449.0, 1.75, 1e-37]))).tolist()
    [0.0, 1.0, -8.0, -117.0]
    """
    mantissa, exponent = jnp.frexp(largest)
    # 448 is 0.875 * 2**9, and frexp returns mantissas in [0.5, 1).
    exponent = exponent - jnp.where(mantissa > 0.875, 8, 9)
    scale = jnp.ldexp(jnp.ones_like(largest), jnp.maximum(exponent, SMALLEST_SCALE))
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _split(array: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Reshape ``[..., m, n]`` to ``[..., blocks, rows, blocks, columns]``, padded with zeros to whole blocks."""
    *stack, m, n = array.shape
    rows, columns = block
    padded = jnp.pad(array, [(0, 0)] * len(stack) + [(0, -m % rows), (0, -n % columns)])
    return padded.reshape(*stack, -(-m // rows), rows, -(-n // columns), columns)
