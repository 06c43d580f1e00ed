"""Causal attention inside samples, for sequences that hold several samples one after another.

`pallas_kernels.flash_attention` computes it in memory that grows with the number of tokens and not with its square. If
sequences are split (`relibra_jax.routing.node_streams`), every rank has some chunks of the queries of its node's
stream, and gathers all keys and values of the node.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention.api import BLOCK
from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.execution.node_streams import gather_stream, own_chunks
from relibra_jax.routing.node_streams import chunk_length


def packed_attention(
    query: Float[Array, "B T heads width"],
    key: Float[Array, "B T kv_heads width"],
    value: Float[Array, "B T kv_heads width"],
    segments: Int[Array, "B T"] | None = None,
    sinks: Float[Array, " heads"] | None = None,
    window: Int[Array, ""] | None = None,
    *,
    block: int = BLOCK,
    implementation: str | None = None,
) -> Float[jax.Array, "B T heads width"]:
    """Apply causal attention: every token attends to itself and to the earlier tokens of its sample.

    Args:
        query: the queries; query heads ``[i * heads / kv_heads, (i + 1) * heads / kv_heads)`` use key head i.
        key: the keys.
        value: the values.
        segments: the sample of each token, for sequences that hold several samples one after another; EMPTY on padding,
            which attends to itself alone. None if every sequence holds one sample.
        sinks: the score of each head's attention sink. None for none.
        window: the number of tokens, with itself, to which a token attends at most. None for all.
        block: the number of tokens of a block of the XLA implementation.
        implementation: the implementation of `pallas_kernels.flash_attention`. None chooses by the device.

    Returns:
        The weighted means of the values, in the dtype of ``query``.
    """
    samples, length = query.shape[:2]
    last = jnp.arange(samples * length, dtype=jnp.int32)
    first = jnp.zeros((samples, length), jnp.int32) if segments is None else first_keys(segments)
    first = (first + length * jnp.arange(samples, dtype=jnp.int32)[:, None]).reshape(-1)
    query_rows, keys, values = (jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in (query, key, value))
    first = _inside_window(first, last, window)
    output = flash_attention(
        *(query_rows, keys, values, first, last), sinks=sinks, block=block, implementation=implementation
    )
    return output.reshape(query.shape)


def split_attention(
    query: Float[jax.Array, "1 T heads width"],
    key: Float[jax.Array, "1 T kv_heads width"],
    value: Float[jax.Array, "1 T kv_heads width"],
    segments: Int[jax.Array, "1 T"],
    sinks: Float[Array, " heads"] | None = None,
    window: Int[Array, ""] | None = None,
    *,
    implementation: str | None = None,
) -> Float[jax.Array, "1 T heads width"]:
    """Apply causal attention to the stream of a node, of which this rank has some chunks, inside `jax.shard_map`.

    Keys and values of the node's ranks are gathered in their own dtype, and the gradients of a rank's keys and values
    are summed over the ranks in it. A rank holds those of the whole stream while it computes.

    Args:
        query: the queries of the rank's tokens, as in `packed_attention`.
        key: the keys.
        value: the values.
        segments: the sample of each token; EMPTY on padding.
        sinks: the score of each head's attention sink. None for none.
        window: the number of tokens, with itself, to which a token attends at most. None for all.
        implementation: the implementation of `pallas_kernels.flash_attention`. None chooses by the device.

    Returns:
        The weighted means of the values for the rank's tokens, as in `packed_attention`.
    """
    length = query.shape[1]
    chunk = chunk_length(length)
    last = (own_chunks(length)[:, None] * chunk + jnp.arange(chunk)[None]).reshape(-1)
    first = first_keys(gather_stream(segments[0])[None])[0, last]
    keys, values = (gather_stream(array[0]) for array in (key, value))
    first = _inside_window(first, last, window)
    output = flash_attention(
        *(query[0], keys, values, first, last), sinks=sinks, block=chunk, implementation=implementation
    )
    return output[None]


def _inside_window(first: jax.Array, last: jax.Array, window: Array | None) -> jax.Array:
    return first if window is None else jnp.maximum(first, last - window + 1)


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
