"""The stream of a node's tokens on its local ranks, if sequences are split (`relibra_jax.routing.node_streams`)."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int, Shaped

from relibra_jax.contract.types import Array
from relibra_jax.execution.mesh import LOCAL
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.routing.node_streams import chunk_length


def gather_stream(own: Shaped[jax.Array, "T *rest"]) -> Shaped[jax.Array, "stream *rest"]:
    """Gather the stream of a node on every local rank, inside `jax.shard_map`.

    Args:
        own: an entry for each position of a rank.

    Returns:
        The entries of all ranks of the node in the order of its stream. Gradients are summed over the ranks, each of
        which gets those of its positions.
    """
    chunks = own.reshape(-1, chunk_length(len(own)), *own.shape[1:])
    return jax.lax.all_gather(chunks, LOCAL, axis=1).reshape(-1, *own.shape[1:])


def own_chunks(length: int) -> Int[jax.Array, " chunks"]:
    """Return the numbers in the stream of a rank's chunks, inside `jax.shard_map`.

    Args:
        length: T, the number of positions of a rank.
    """
    return jnp.arange(length // chunk_length(length)) * jax.lax.axis_size(LOCAL) + jax.lax.axis_index(LOCAL)


def shift_tokens(
    entries: Shaped[Array, "B T"], by: int, *, parallel: ExpertParallel
) -> Shaped[jax.Array, "B T"]:
    """Move the entry of every token to the next token of its sequence, or to the token before.

    In packed sequences, the next token may be of another sample. In split sequences it may be on another rank.

    Args:
        entries: an entry for each token.
        by: 1 to move entries to the next token, -1 to move them to the token before.
        parallel: the mesh, and whether sequences are split.

    Returns:
        The entries. It is 0 (False) for the token at the start or the end that gets none.
    """
    ends = [(0, 0), (max(by, 0), max(-by, 0))]

    def shift(entries):
        shifted = jnp.pad(entries, ends)
        return shifted[:, :-1] if by > 0 else shifted[:, 1:]

    if not parallel.split_sequences:
        return shift(jnp.asarray(entries))

    @functools.partial(
        jax.shard_map, mesh=parallel.mesh, in_specs=parallel.token_spec, out_specs=parallel.token_spec
    )
    def on_rank(own):
        chunk = chunk_length(own.shape[1])
        stream = shift(gather_stream(own[0])[None]).reshape(-1, chunk)
        return stream[own_chunks(own.shape[1])].reshape(own.shape)

    return on_rank(entries)
