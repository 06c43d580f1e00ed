"""The random numbers of a search, all from one call of the generator.

Every call of a `jax.random` function is compiled by itself, and threefry is large: with a call for each kind of draw,
random numbers were most of what XLA compiled for a plan. So a search draws bits once and turns them into what it needs.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray, UInt32


def draw_bits(key: PRNGKeyArray, *shapes: tuple[int, ...]) -> list[UInt32[jax.Array, "..."]]:
    """Random bits in arrays of the given shapes.

    Args:
        key: random key, consumed.
        *shapes: the shape of each array.

    Returns:
        One array of independent uint32 for each shape.

    >>> [bits.shape for bits in draw_bits(jax.random.key(0), (2, 3), (4,))]
    [(2, 3), (4,)]
    """
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + math.prod(shape))
    # Drawn flat: LLVM would unroll the short inner loops of other shapes, twenty rounds of threefry in each turn.
    flat = jax.random.bits(key, (ends[-1],), jnp.uint32)
    return [flat[a:b].reshape(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]


def integers(bits: UInt32[jax.Array, "*shape"], bound: int) -> Int[jax.Array, "*shape"]:
    """Integers from 0 to ``bound - 1``, int32; the lower ones more often by at most ``bound`` in 2**32."""
    return (bits % jnp.uint32(bound)).astype(jnp.int32)


def gumbel(bits: UInt32[jax.Array, "*shape"]) -> Float[jax.Array, "*shape"]:
    """Draws from the standard Gumbel distribution, float32: ``argmax(x + gumbel)`` samples from ``softmax(x)``."""
    # 23 bits and a half: strictly between 0 and 1, exact in float32.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))
