"""The all-to-all with which the ranks of a node deal their tokens to each other, and its inverse.

`relibra_jax.routing.striping` says why, and which rank dispatches which token. Everything here runs on one rank, inside
shard_map.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Shaped

from relibra_jax.execution.mesh import LOCAL


def stripe(tokens: Shaped[jax.Array, "b T d"], local: int) -> Shaped[jax.Array, "dealt d"]:
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


def unstripe(
    values: Shaped[jax.Array, "dealt d"], local: int, sequences: int, positions: int
) -> Shaped[jax.Array, "t d"]:
    """Bring values of dispatched tokens back to the ranks that hold them: the inverse of `stripe`.

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
