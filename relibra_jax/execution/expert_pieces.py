"""Transfer of experts in pieces, one for each rank, so that every rank sends as much as it receives under any plan.

If a rank sent whole experts, it would send its hottest expert once for every copy, and an exchange with equal lanes
would make all ranks equally slow. Instead each expert is cut into one piece per rank, and leaves its rank once: rank p
collects piece p of all exported experts, and sends it on to the ranks with copies, which assemble the pieces. Both
exchanges have equal lanes by construction. Migration of homes uses the same idea (`relibra_jax.execution.migration`).

Everything here runs on one rank, inside shard_map. JAX can transpose it, which sums gradients where pieces were copied.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Num


def scatter_pieces(
    experts: Num[jax.Array, "X *expert"], axes: tuple[str, ...], ranks: int
) -> Num[jax.Array, "PX piece"]:
    """Send pieces of this rank's exported experts to all ranks, and receive this rank's piece of all exported experts.

    Args:
        experts: the X experts that this rank exports.
        axes: the mesh axes of the ranks.
        ranks: P, the number of ranks.

    Returns:
        This rank's piece of the exports of all ranks, grouped by rank.
    """
    count, size = len(experts), math.prod(experts.shape[1:])
    flat = experts.reshape(count, size)
    if size % ranks:
        flat = jnp.pad(flat, ((0, 0), (0, -size % ranks)))
    pieces = jnp.swapaxes(flat.reshape(count, ranks, -1), 0, 1)
    # The all-to-all splits and joins along the same array axis, because JAX 0.11 cannot transpose it between two axes.
    return jax.lax.all_to_all(pieces, axes, 0, 0, tiled=True).reshape(ranks * count, -1)


def assemble(
    pieces: Num[jax.Array, "PR piece"], axes: tuple[str, ...], ranks: int, expert: tuple[int, ...]
) -> Num[jax.Array, "R *expert"]:
    """Send pieces to the ranks that need them, and assemble the experts that this rank needs.

    Args:
        pieces: this rank's pieces of the R experts that each rank needs, grouped by rank.
        axes: the mesh axes of the ranks.
        ranks: P, the number of ranks.
        expert: the shape of an expert.

    Returns:
        The R experts that this rank needs.
    """
    pieces_by_rank = pieces.reshape(ranks, -1, pieces.shape[1])
    experts = jnp.swapaxes(jax.lax.all_to_all(pieces_by_rank, axes, 0, 0, tiled=True), 0, 1)
    return experts.reshape(pieces_by_rank.shape[1], -1)[:, : math.prod(expert)].reshape(-1, *expert)
