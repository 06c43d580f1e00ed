"""The order in which a rank dispatches tokens: dealt to the ranks of its node, and split into pieces.

`relibra_jax.routing.pieces` says which token is in which piece; `relibra_jax.routing.striping` says why tokens are
dealt, and which rank dispatches which. Everything here runs on one rank, inside shard_map.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Shaped

from relibra_jax.execution.mesh import LOCAL
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.routing.striping import pad_positions


def split_tokens(
    tokens: Shaped[jax.Array, "b T d"], parallel: ExpertParallel, *, padding: int = 0
) -> tuple[Shaped[jax.Array, "t d"], ...]:
    """Return the values of the tokens that this rank dispatches, piece by piece.

    Args:
        tokens: the values of the tokens of this rank's sequences.
        parallel: the number of pieces, and whether the ranks of a node deal tokens to each other.
        padding: the value that fills sequences up to a multiple of `ExpertParallel.aligned_positions`.
    """
    tokens = pad_positions(tokens, parallel.aligned_positions, axis=1, padding=padding)
    width = tokens.shape[-1]
    if parallel.is_striped:
        tokens = _stripe(tokens, parallel.topology.ranks_per_node)
    by_piece = tokens.reshape(-1, parallel.pieces, width)
    return tuple(by_piece[:, piece] for piece in range(parallel.pieces))


def join_tokens(
    values: Sequence[Shaped[jax.Array, "t d"]], parallel: ExpertParallel, sequences: int, positions: int
) -> Shaped[jax.Array, "own d"]:
    """Return values of this rank's own tokens, ``[b * T, d]``: the inverse of `split_tokens`.

    Args:
        values: the values of the tokens that this rank dispatches, piece by piece.
        parallel: as for `split_tokens`.
        sequences: b, the number of sequences of this rank.
        positions: T, the number of positions of a sequence.
    """
    width = values[0].shape[-1]
    joined = jnp.stack(values, 1).reshape(-1, width) if len(values) > 1 else values[0]
    if parallel.is_striped:
        aligned = -(-positions // parallel.aligned_positions) * parallel.aligned_positions
        joined = _unstripe(joined, parallel.topology.ranks_per_node, sequences, aligned)
    return joined.reshape(sequences, -1, width)[:, :positions].reshape(-1, width)


def _stripe(tokens: Shaped[jax.Array, "b T d"], local: int) -> Shaped[jax.Array, "dealt d"]:
    """Deal the tokens of this rank's sequences to the ranks of its node.

    Args:
        tokens: the values of the tokens. The length of a sequence is a multiple of G.
        local: G, the number of ranks of a node.

    Returns:
        The values of the tokens that this rank dispatches, as many as it holds.
    """
    sequences, positions, width = tokens.shape
    parts = jnp.moveaxis(tokens.reshape(sequences, -1, local, width), 2, 0)
    return jax.lax.all_to_all(parts, LOCAL, 0, 0, tiled=True).reshape(sequences * positions, width)


def _unstripe(
    values: Shaped[jax.Array, "dealt d"], local: int, sequences: int, positions: int
) -> Shaped[jax.Array, "t d"]:
    """Bring values of dispatched tokens back to the ranks that hold them: the inverse of `_stripe`.

    Args:
        values: a value for each token that this rank dispatches.
        local: G, the number of ranks of a node.
        sequences: b, the number of sequences of this rank.
        positions: T, the number of positions of a sequence, a multiple of G.

    Returns:
        The values of this rank's own tokens, ``[b * T, d]``.
    """
    width = values.shape[-1]
    parts = values.reshape(local, sequences, -1, width)
    own = jnp.moveaxis(jax.lax.all_to_all(parts, LOCAL, 0, 0, tiled=True), 0, 2)
    return own.reshape(sequences * positions, width)
