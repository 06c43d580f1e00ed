"""Attention as loops over blocks that XLA compiles for any platform.

Both passes hold the scores of one block of queries and one block of keys. On GPUs, every step of the inner loop waits
for the host, because the number of steps is data.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_ranges import LOWEST, Ranges, block_ranges
from pallas_kernels.varying_axes import match_varying_axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash_attention_xla(
    query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, last: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """Compute `flash_attention` for any floating-point dtype, with the logarithms of the sums of weights."""
    return _forward(query, key, value, first, last, block)[0]


def _forward(query, key, value, first, last, block):
    queries, keys, values, ranges = _in_blocks(query, key, value, first, last, block)

    def of_block(inputs):
        query, ranges = inputs

        def step(number, carry):
            output, total, largest = carry
            scores, visible = _scores(query, _at(keys, number), number, ranges)
            new_largest = jnp.maximum(largest, scores.max(-1))
            weights = jnp.where(visible, jnp.exp(scores - new_largest[..., None]), 0)
            shrink = jnp.exp(largest - new_largest)
            product = _einsum("hgqk,hkd->hgqd", weights.astype(value.dtype), _at(values, number))
            return output * shrink[..., None] + product, total * shrink + weights.sum(-1), new_largest

        output, total = (jnp.zeros(shape, jnp.float32) for shape in (query.shape, query.shape[:-1]))
        start = match_varying_axes(query, output, total, jnp.full_like(total, LOWEST))[1:]
        output, total, largest = jax.lax.fori_loop(ranges.key_begin, ranges.key_end, step, tuple(start))
        total = jnp.where(total == 0, 1, total)
        return (output / total[..., None]).astype(query.dtype), largest + jnp.log(total)

    outputs, log_sums = jax.lax.map(of_block, (queries, ranges))
    output = _from_blocks(outputs, query.shape)
    log_sum = _from_blocks(log_sums[..., None], (*query.shape[:2], 1))[..., 0]
    return (output, log_sum), (query, key, value, first, last, output, log_sums)


def _backward(block, saved, gradients):
    gradient, of_log_sum = gradients
    query, key, value, first, last, output, log_sums = saved
    queries, keys, values, ranges = _in_blocks(query, key, value, first, last, block)
    means = (output.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1, keepdims=True)
    means -= of_log_sum[..., None]
    gradients, means = (_query_blocks(array, key.shape[1], block) for array in (gradient, means))

    def of_block(sums, inputs):
        query, ranges, log_sum, gradient, mean = inputs

        def step(number, carry):
            of_query, of_keys, of_values = carry
            scores, visible = _scores(query, _at(keys, number), number, ranges)
            weights = jnp.where(visible, jnp.exp(scores - log_sum[..., None]), 0)
            of_weights = _einsum("hgqd,hkd->hgqk", gradient, _at(values, number))
            of_scores = weights * (of_weights - mean) * query.shape[-1] ** -0.5
            weights, of_scores = weights.astype(gradient.dtype), of_scores.astype(query.dtype)
            of_query += _einsum("hgqk,hkd->hgqd", of_scores, _at(keys, number))
            of_keys = _add(of_keys, number, _einsum("hgqk,hgqd->hkd", of_scores, query))
            of_values = _add(of_values, number, _einsum("hgqk,hgqd->hkd", weights, gradient))
            return of_query, of_keys, of_values

        of_query = match_varying_axes(query, jnp.zeros(query.shape, jnp.float32))[1]
        start = (of_query, *sums)
        of_query, *sums = jax.lax.fori_loop(ranges.key_begin, ranges.key_end, step, start)
        return tuple(sums), of_query.astype(query.dtype)

    zeros = (jnp.zeros(array.shape, jnp.float32) for array in (keys, values))
    start = tuple(match_varying_axes(query, *zeros)[1:])
    blocks = (queries, ranges, log_sums, gradients, means)
    sums, of_queries = jax.lax.scan(of_block, start, blocks)
    of_key, of_value = (_from_blocks(array, key.shape).astype(key.dtype) for array in sums)
    return _from_blocks(of_queries, query.shape), of_key, of_value, None, None


flash_attention_xla.defvjp(_forward, _backward)


def _in_blocks(query, key, value, first, last, block):
    """Return queries ``[n, h, g, block, d]``, keys and values ``[m, h, block, d]``, and ranges for each n."""
    ranges = block_ranges(first, last, block, block)
    ranges = ranges._replace(first=ranges.first.reshape(-1, block), last=ranges.last.reshape(-1, block))
    keys, values = (_query_blocks(array, key.shape[1], block)[:, :, 0] for array in (key, value))
    return _query_blocks(query, key.shape[1], block), keys, values, ranges


def _query_blocks(x: jax.Array, key_heads: int, block: int) -> jax.Array:
    """Convert ``[T, heads, d]`` to ``[n, h, g, block, d]`` with n blocks, h key heads and g query heads for each."""
    x = jnp.pad(x, [(0, -len(x) % block), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(-1, block, key_heads, x.shape[1] // key_heads, x.shape[2]), 1, -2)


def _from_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Convert ``[n, ..., block, d]`` to ``[T, heads, d]``, the given shape."""
    return jnp.moveaxis(blocks, -2, 1).reshape(-1, *shape[1:])[: shape[0]]


def _scores(query: jax.Array, keys: jax.Array, number: jax.Array, ranges: Ranges) -> tuple[Any, Any]:
    """Return the scores of a block of queries and block ``number`` of keys, and which of them count."""
    at = number * keys.shape[1] + jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
    visible = ((ranges.first[:, None] <= at) & (at <= ranges.last[:, None]))[None, None]
    scores = _einsum("hgqd,hkd->hgqk", query, keys) * query.shape[-1] ** -0.5
    return jnp.where(visible, scores, LOWEST), visible


def _at(blocks, number):
    return jax.lax.dynamic_index_in_dim(blocks, number, keepdims=False)


def _add(blocks, number, block):
    return jax.lax.dynamic_update_index_in_dim(blocks, _at(blocks, number) + block, number, axis=0)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
