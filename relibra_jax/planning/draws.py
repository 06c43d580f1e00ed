"""The random numbers of a search, drawn in one call of the generator.

XLA compiles every call of a `jax.random` function separately, and threefry is large. With one call for each kind of
random number, they were most of the compiled code of a plan. So a search draws bits once and converts them.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray, UInt32


def draw_bits(key: PRNGKeyArray, *shapes: tuple[int, ...]) -> list[UInt32[jax.Array, "..."]]:
    """Draw random bits in arrays of the given shapes.

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
    # The bits are drawn flat, because LLVM would unroll the short inner loops of other shapes, with 20 threefry rounds
    # in each iteration.
    flat = jax.random.bits(key, (ends[-1],), jnp.uint32)
    return [flat[a:b].reshape(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]


def integers(bits: UInt32[jax.Array, "*shape"], bound: int) -> Int[jax.Array, "*shape"]:
    """Convert random bits to integers below a bound.

    Args:
        bits: independent random bits.
        bound: the number of different integers.

    Returns:
        Integers from 0 to ``bound - 1``, int32. Lower integers are more probable by at most ``bound`` in 2**32.
    """
    return (bits % jnp.uint32(bound)).astype(jnp.int32)


def gumbel(bits: UInt32[jax.Array, "*shape"]) -> Float[jax.Array, "*shape"]:
    """Convert random bits to standard Gumbel noise, float32.

    With it, ``argmax(x + gumbel)`` samples from ``softmax(x)``.
    """
    # 23 bits plus one half are strictly between 0 and 1 after scaling, and exact in float32.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))
