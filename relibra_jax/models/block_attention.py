"""Causal attention in blocks, whose memory grows with the number of tokens and not with its square.

This is FlashAttention-2 (Dao, arXiv 2307.08691) as loops that XLA compiles for any device. Softmax runs over one block
of keys at a time. The backward pass computes the weights again, from the saved logarithms of their sums. Both passes
hold the scores of one block of queries and one block of keys. Pairs of blocks in which no token attends to another are
skipped: those above the diagonal, and those of different samples. Packed attention therefore takes time in proportion
to the sum of the squared lengths of the samples.

If sequences are split (`relibra_jax.routing.node_streams`), every rank has some blocks of the queries of its node's
stream, and gathers all keys and values of the node.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.execution.mesh import vary_over, varying_axes
from relibra_jax.execution.node_streams import gather_stream, own_chunks
from relibra_jax.routing.node_streams import chunk_length

BLOCK: Final = 512
"""The number of tokens of a block. On two CPU cores, blocks of 256 take a tenth to a half less time at 2,048 and 4,096
tokens (``python -m experiments.bench_attention``). On GPUs, every step of the loop over keys waits for the host, so
larger blocks should be faster there (not measured)."""


def block_attention(
    query: Float[Array, "B T heads width"],
    key: Float[Array, "B T kv_heads width"],
    value: Float[Array, "B T kv_heads width"],
    segments: Int[Array, "B T"] | None = None,
    *,
    block: int = BLOCK,
) -> Float[jax.Array, "B T heads width"]:
    """Apply causal attention: every token attends to itself and to the earlier tokens of its sample.

    It has gradients of the first order, in reverse mode alone.

    Args:
        query: the queries; query heads ``[i * heads / kv_heads, (i + 1) * heads / kv_heads)`` use key head i.
        key: the keys.
        value: the values.
        segments: the sample of each token, for sequences that hold several samples one after another; EMPTY on padding.
            None if every sequence holds one sample.
        block: the number of tokens of a block.

    Returns:
        The weighted means of the values, in the dtype of ``query``. Scores, weights and sums are float32.
    """
    samples, length, heads, width = query.shape
    tokens = samples * length
    blocks = -(-tokens // block)

    def split(x, padding=0):
        """Convert ``[B, T, ..., d]`` to blocks ``[n, ..., block, d]`` of one sequence after another."""
        x = x.reshape(tokens, *x.shape[2:])
        x = jnp.pad(x, [(0, blocks * block - tokens), *[(0, 0)] * (x.ndim - 1)], constant_values=padding)
        return jnp.moveaxis(x.reshape(blocks, block, *x.shape[1:]), 1, -2)

    first = jnp.zeros((samples, length), jnp.int32) if segments is None else first_keys(segments)
    first = first + length * jnp.arange(samples, dtype=jnp.int32)[:, None]
    # The tokens that fill the last block attend to each other alone.
    first = split(first[..., None], padding=tokens)[..., 0]
    grouped = query.reshape(samples, length, key.shape[2], -1, width)
    numbers = jnp.arange(blocks)
    output = jnp.moveaxis(_attend(split(grouped), split(key), split(value), first, numbers), -2, 1)
    return output.reshape(-1, heads, width)[:tokens].reshape(query.shape)


def split_attention(
    query: Float[jax.Array, "1 T heads width"],
    key: Float[jax.Array, "1 T kv_heads width"],
    value: Float[jax.Array, "1 T kv_heads width"],
    segments: Int[jax.Array, "1 T"],
) -> Float[jax.Array, "1 T heads width"]:
    """Apply causal attention to the stream of a node, of which this rank has some chunks, inside `jax.shard_map`.

    Keys and values of the node's ranks are gathered in their own dtype, and the gradients of a rank's keys and values
    are summed over the ranks in it. A rank holds those of the whole stream while it computes.

    Args:
        query: the queries of the rank's tokens, as in `block_attention`.
        key: the keys.
        value: the values.
        segments: the sample of each token; EMPTY on padding.

    Returns:
        The weighted means of the values for the rank's tokens, as in `block_attention`.
    """
    length = query.shape[1]
    block = chunk_length(length)

    def split(x):
        """Convert ``[tokens, ..., d]`` to blocks ``[n, ..., block, d]``."""
        return jnp.moveaxis(x.reshape(-1, block, *x.shape[1:]), 1, -2)

    numbers = own_chunks(length)
    first = first_keys(gather_stream(segments[0])[None]).reshape(-1, block)[numbers]
    grouped = query.reshape(length, key.shape[2], -1, query.shape[-1])
    keys, values = (split(gather_stream(array[0])) for array in (key, value))
    output = _attend(split(grouped), keys, values, first, numbers)
    return jnp.moveaxis(output, -2, 1).reshape(query.shape)


def first_keys(segments: Int[Array, "B T"]) -> Int[jax.Array, "B T"]:
    """Return the first position to which each token attends: the start of its sample, or its own for padding.

    Args:
        segments: the sample of each token, EMPTY on padding. The tokens of a sample follow one another.

    >>> first_keys(jnp.array([[7, 7, 7, 3, 3, EMPTY, EMPTY]])).tolist()
    [[0, 0, 0, 3, 3, 5, 6]]
    """
    segments = jnp.asarray(segments)
    own = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], segments.shape)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    first = jax.lax.cummax(jnp.where(starts, own, 0), axis=1)
    return jnp.where(segments == EMPTY, own, first)


@jax.custom_vjp
def _attend(query, key, value, first, numbers):
    """Attend in blocks: ``query[n, h, g, block, d]``, ``first[n, block]``, ``key[m, h, block, d]``.

    The n blocks of queries are those with these ``numbers[n]`` among the m blocks of tokens.
    """
    return _forward(query, key, value, first, numbers)[0]


def _forward(query, key, value, first, numbers):
    axes = varying_axes(query)

    def of_block(inputs):
        number, query, first = inputs

        def step(distance, carry):
            output, total, largest = carry
            keys, values = (_at(array, number - distance) for array in (key, value))
            scores = _scores(query, keys, number, distance, first)
            # The first step is on the diagonal, where every token has itself. So the maximum is finite.
            new_largest = jnp.maximum(largest, scores.max(-1))
            weights = jnp.exp(scores - new_largest[..., None])
            shrink = jnp.exp(largest - new_largest)
            product = _einsum("hgqk,hkd->hgqd", weights.astype(values.dtype), values)
            output = output * shrink[..., None] + product
            return output, total * shrink + weights.sum(-1), new_largest

        def filled(shape, value):
            return vary_over(jnp.full(shape, value, jnp.float32), axes)

        rows = query.shape[:-1]
        start = (filled(query.shape, 0), filled(rows, 0), filled(rows, -jnp.inf))
        output, total, largest = jax.lax.fori_loop(0, _steps(number, first), step, start)
        return (output / total[..., None]).astype(query.dtype), largest + jnp.log(total)

    output, log_sum = jax.lax.map(of_block, (numbers, query, first))
    return output, (query, key, value, first, numbers, output, log_sum)


def _backward(saved, gradient):
    query, key, value, first, numbers, output, log_sum = saved
    axes = varying_axes(query)

    def of_block(sums, inputs):
        number, query, first, output, log_sum, gradient = inputs
        mean = (output.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)

        def step(distance, carry):
            of_query, of_key, of_value = carry
            keys, values = (_at(array, number - distance) for array in (key, value))
            weights = jnp.exp(_scores(query, keys, number, distance, first) - log_sum[..., None])
            of_weights = _einsum("hgqd,hkd->hgqk", gradient, values)
            of_scores = weights * (of_weights - mean[..., None]) * query.shape[-1] ** -0.5
            weights, of_scores = weights.astype(gradient.dtype), of_scores.astype(query.dtype)
            of_query += _einsum("hgqk,hkd->hgqd", of_scores, keys)
            of_key = _add(of_key, number - distance, _einsum("hgqk,hgqd->hkd", of_scores, query))
            of_value = _add(of_value, number - distance, _einsum("hgqk,hgqd->hkd", weights, gradient))
            return of_query, of_key, of_value

        of_query = vary_over(jnp.zeros(query.shape, jnp.float32), axes)
        of_query, *sums = jax.lax.fori_loop(0, _steps(number, first), step, (of_query, *sums))
        return tuple(sums), of_query.astype(query.dtype)

    sums = tuple(vary_over(jnp.zeros(array.shape, jnp.float32), axes) for array in (key, value))
    blocks = (numbers, query, first, output, log_sum, gradient)
    (of_key, of_value), of_query = jax.lax.scan(of_block, sums, blocks)
    return of_query, of_key.astype(key.dtype), of_value.astype(value.dtype), None, None


_attend.defvjp(_forward, _backward)


def _steps(number, first):
    """Count the blocks of keys to which block ``number`` of queries attends, which end with its own."""
    return number - first.min() // len(first) + 1


def _scores(query, keys, number, distance, first):
    """Return the scores of a block of queries and the block of keys that is ``distance`` blocks before it."""
    own = jnp.arange(len(first), dtype=first.dtype)
    queries, keys_at = number * len(first) + own[:, None], (number - distance) * len(first) + own[None]
    visible = (first[:, None] <= keys_at) & (keys_at <= queries)
    scores = _einsum("hgqd,hkd->hgqk", query, keys) * query.shape[-1] ** -0.5
    return jnp.where(visible[None, None], scores, -jnp.inf)


def _at(blocks, number):
    return jax.lax.dynamic_index_in_dim(blocks, number, keepdims=False)


def _add(blocks, number, block):
    return jax.lax.dynamic_update_index_in_dim(blocks, _at(blocks, number) + block, number, axis=0)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
