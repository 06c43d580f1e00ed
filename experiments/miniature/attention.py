"""Causal attention inside the samples of packed sequences, whose time grows with the squares of the samples' lengths.

Keys are read in blocks. A block of queries skips the blocks that hold no token of its samples, as fused attention with
segment ids does on GPUs.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK: Final = 128
"""The tokens of a block; samples of recorded length fill several."""


def attend(
    query: Float[Array, "t H d"],
    key: Float[Array, "t H d"],
    value: Float[Array, "t H d"],
    segments: Int[Array, " t"],
    first: Int[Array, " t"],
    *,
    longest: int,
) -> Float[jax.Array, "t H d"]:
    """Attend from each token to itself and to the earlier tokens of its sample.

    Args:
        query: the queries, of length 1, as are the keys: logits need no maximum to be subtracted.
        key: the keys.
        value: the values.
        segments: the sample of each token, a negative number on padding.
        first: the index of the first token of each token's sample.
        longest: the most tokens that a sample may have.

    Returns:
        The mean of the values, weighted by attention; 0 on padding.

    >>> unit = jnp.ones((3, 1, 1))
    >>> values = jnp.array([1.0, 3.0, 7.0]).reshape(3, 1, 1)
    >>> attend(unit, unit, values, jnp.array([5, 5, 6]), jnp.array([0, 0, 2]), longest=2).ravel().tolist()
    [1.0, 2.0, 7.0]
    """
    tokens = len(segments)
    room = -(-tokens // BLOCK) * BLOCK

    def blocks(leaf: jax.Array, fill: float) -> jax.Array:
        padding = [(0, room - tokens)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding, constant_values=fill).reshape(-1, BLOCK, *leaf.shape[1:])

    index = jnp.arange(tokens)
    keys = tuple(blocks(*pair) for pair in ((key, 0), (value, 0), (segments, -1), (index, 0)))
    back = jnp.arange(min(-(-(longest - 1) // BLOCK) + 1, room // BLOCK))

    def attend_block(_, block):
        query, segments, index, first, number = block
        begin = jnp.where(segments >= 0, first, room).min() // BLOCK
        read = functools.partial(_add_block, query=query, segments=segments, index=index)

        def add(total, back):
            at = number - back
            needed = (at >= 0) & (at >= begin)
            return jax.lax.cond(
                needed,
                lambda total: read(total, jax.tree.map(lambda leaf: leaf[at], keys)),
                lambda total: total,
                total,
            ), None

        zero = (jnp.zeros_like(query), jnp.zeros(query.shape[:2], query.dtype))
        (weighted, weights), _ = jax.lax.scan(add, zero, back)
        return None, weighted / jnp.where(weights > 0, weights, 1)[..., None]

    numbers = jnp.arange(room // BLOCK)
    queries = (blocks(query, 0), blocks(segments, -1), blocks(index, 0), blocks(first, 0), numbers)
    _, out = jax.lax.scan(attend_block, None, queries)
    return out.reshape(room, *query.shape[1:])[:tokens]


@jax.checkpoint
def _add_block(total, block, *, query, segments, index):
    """Add the values of one block of keys, and the weights, to those of a block of queries."""
    key, value, other_segments, other_index = block
    seen: Bool[Array, "q k"] = (segments[:, None] == other_segments) & (segments[:, None] >= 0)
    seen &= index[:, None] >= other_index
    weights = jnp.exp(jnp.einsum("qhd,khd->qkh", query, key)) * seen[..., None]
    weighted, summed = total
    return weighted + jnp.einsum("qkh,khd->qhd", weights, value), summed + weights.sum(1)
