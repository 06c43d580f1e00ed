"""Rounding to float8 (e4m3) in blocks that share a scale.

An e4m3 number has a sign, 4 bits of exponent and 3 of mantissa. Rounding changes a value by at most 1/16 of it, or a
value below ``2**-6`` by at most ``2**-10``. The largest e4m3 number is 448. Before rounding, a block is divided by its
scale: the smallest power of two that makes its largest number fit. Dividing and multiplying by it is exact. The blocks
of `experiments.float8.grouped_mlp` are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2).
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

FLOAT8: Final = jnp.float8_e4m3fn
SMALLEST_SCALE: Final = -117
"""The smallest exponent of a scale: ``2**-117`` times the smallest e4m3 number, ``2**-9``, is still a normal
float32."""


class Rounded(NamedTuple):
    """Matrices in float8, cut into blocks that share a scale."""

    values: jax.Array
    """The rounded numbers over their scales, float8 ``[..., m, n]``, padded with zeros to whole blocks."""
    scales: jax.Array
    """The scales, ``[..., m / rows of a block, n / columns of a block]``, float32 or wider."""


def round_to_float8(array: jax.Array, block: tuple[int, int]) -> Rounded:
    """Round every block of each matrix to float8.

    Args:
        array: the matrices, ``[..., m, n]``, bfloat16 or wider.
        block: the numbers of rows and columns of a block.

    Returns:
        The rounded matrices. A block that contains an infinity or a NaN becomes NaN in every entry, since float8 has no
        infinity.

    >>> rounded = round_to_float8(jnp.array([[1.0, 1.05, 1.07, 448.0], [1.0, 0.3, 0.0, 1000.0]]), (1, 2))
    >>> rounded.values[1].tolist(), rounded.scales[1].tolist()
    ([256.0, 80.0, 0.0, 256.0], [0.00390625, 4.0])
    """
    dtype = jnp.promote_types(array.dtype, jnp.float32)
    *stack, m, n = array.shape
    blocks = _split(array.astype(dtype), block)
    scales = block_scale(jnp.abs(blocks).max((-3, -1)))
    values = (blocks / scales[..., :, None, :, None]).astype(FLOAT8)
    return Rounded(values.reshape(*stack, m + -m % block[0], n + -n % block[1]), scales)


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
