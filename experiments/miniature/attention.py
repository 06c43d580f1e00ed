"""Causal attention inside the samples of packed sequences, whose time grows with the squares of the samples' lengths.

Keys are read in blocks. A block of queries skips the blocks that hold no token of its samples, as fused attention with
segment ids does on GPUs. Queries and keys have length 1, so that logits need no maximum to be subtracted.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK: Final = 128
"""The tokens of a block; samples of recorded length fill several."""


class _Blocks(NamedTuple):
    """The samples of all blocks of tokens."""

    segments: Int[Array, "n q"]
    begin: Int[Array, " n"]
    """The first block that holds a token of the block's samples."""

    def seen(self, queries: Any, keys: Any) -> jax.Array:
        """Return which keys of a block each query of a block sees."""
        row, column = jnp.ogrid[:BLOCK, :BLOCK]
        own = self.segments[queries][:, None]
        same = own == self.segments[keys][None]
        return same & (own >= 0) & (queries * BLOCK + row >= keys * BLOCK + column)


def attend(
    query: Float[Array, "t H d"],
    key: Float[Array, "t H d"],
    value: Float[Array, "t H d"],
    segments: Int[Array, " t"],
    first: Int[Array, " t"],
) -> Float[jax.Array, "t H d"]:
    """Attend from each token to itself and to the earlier tokens of its sample.

    Args:
        query: the queries, of length 1.
        key: the keys, of length 1.
        value: the values.
        segments: the sample of each token, a negative number on padding.
        first: the index of the first token of each token's sample.

    Returns:
        The mean of the values, weighted by attention; 0 on padding.

    >>> unit = jnp.ones((3, 1, 1))
    >>> values = jnp.array([1.0, 3.0, 7.0]).reshape(3, 1, 1)
    >>> out = attend(unit, unit, values, jnp.array([5, 5, 6]), jnp.array([0, 0, 2]))
    >>> [f"{each:.1f}" for each in out.ravel()]
    ['1.0', '2.0', '7.0']
    """
    tokens = len(segments)
    room = -(-tokens // BLOCK) * BLOCK

    def cut(leaf: jax.Array) -> jax.Array:
        padded = jnp.pad(leaf, [(0, room - tokens), (0, 0), (0, 0)])
        return jnp.moveaxis(padded.reshape(-1, BLOCK, *leaf.shape[1:]), 1, 2)

    of_sample = jnp.pad(segments, (0, room - tokens), constant_values=-1).reshape(-1, BLOCK)
    begin = jnp.pad(first, (0, room - tokens)).reshape(-1, BLOCK) // BLOCK
    blocks = _Blocks(of_sample, jnp.where(of_sample >= 0, begin, room).min(1))
    out = _attend(cut(query), cut(key), cut(value), blocks)
    return jnp.moveaxis(out, 1, 2).reshape(room, *query.shape[1:])[:tokens]


@jax.custom_vjp
def _attend(query, key, value, blocks: _Blocks):
    """Attend with blocks ``[n, H, q, d]``."""
    return _forward(query, key, value, blocks)[0]


def _weights(query, key, blocks: _Blocks, queries, keys):
    """Return the weights ``[H, q, k]`` of a block of keys for a block of queries, not yet normalised."""
    return jnp.exp(query[queries] @ jnp.matrix_transpose(key[keys])) * blocks.seen(queries, keys)[None]


def _forward(query, key, value, blocks: _Blocks):
    def of_block(queries):
        def add(keys, total):
            weights = _weights(query, key, blocks, queries, keys)
            return total[0] + weights @ value[keys], total[1] + weights.sum(-1, keepdims=True)

        zero = jnp.zeros_like(query[0]), jnp.zeros_like(query[0, ..., :1])
        weighted, weight = jax.lax.fori_loop(blocks.begin[queries], queries + 1, add, zero)
        weight = jnp.where(weight > 0, weight, 1)
        return weighted / weight, weight

    out, weight = jax.lax.map(of_block, jnp.arange(len(query)))
    return out, (query, key, value, blocks, out, weight)


def _backward(saved, gradient):
    query, key, value, blocks, out, weight = saved
    spread = (gradient * out).sum(-1, keepdims=True)

    def of_block(totals, queries):
        def add(keys, carry):
            of_query, of_key, of_value = carry
            weights = _weights(query, key, blocks, queries, keys) / weight[queries]
            toward = gradient[queries] @ jnp.matrix_transpose(value[keys])
            logits = weights * (toward - spread[queries])
            return (
                of_query + logits @ key[keys],
                of_key.at[keys].add(jnp.matrix_transpose(logits) @ query[queries]),
                of_value.at[keys].add(jnp.matrix_transpose(weights) @ gradient[queries]),
            )

        start = jnp.zeros_like(query[0]), *totals
        of_query, *totals = jax.lax.fori_loop(blocks.begin[queries], queries + 1, add, start)
        return tuple(totals), of_query

    zero = jnp.zeros_like(key), jnp.zeros_like(value)
    (of_key, of_value), of_query = jax.lax.scan(of_block, zero, jnp.arange(len(query)))
    return of_query, of_key, of_value, None


_attend.defvjp(_forward, _backward)
