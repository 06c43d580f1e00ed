"""Experts that travel in pieces, one for each rank: every rank sends as much as it receives, whatever the plan.

A rank that gives away its experts one by one is as slow as its hottest expert has copies, and an exchange of equal
lanes makes everybody as slow. Cut into as many pieces as there are ranks, an expert leaves its rank once: rank p
collects piece p of all exported experts, and sends it on to the ranks that hold copies, where pieces become experts.
Both exchanges have equal lanes by construction. The same idea moves homes (`relibra_jax.execution.migration`).

Everything here runs on one rank, inside shard_map. JAX transposes it: gradients are summed where pieces were copied.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Num


def scatter_pieces(
    experts: Num[jax.Array, "X *expert"], axes: tuple[str, ...], ranks: int
) -> Num[jax.Array, "PX piece"]:
    """This rank's piece of all experts that the P ranks give away, those of each rank together.

    Args:
        experts: the experts that this rank gives away.
        axes: the mesh axes of the ranks.
        ranks: P.
    """
    count, size = len(experts), math.prod(experts.shape[1:])
    flat = experts.reshape(count, size)
    if size % ranks:
        flat = jnp.pad(flat, ((0, 0), (0, -size % ranks)))
    pieces = jnp.swapaxes(flat.reshape(count, ranks, -1), 0, 1)
    # Split and joined along the same array axis: JAX 0.11 fails to transpose an all-to-all between two.
    return jax.lax.all_to_all(pieces, axes, 0, 0, tiled=True).reshape(ranks * count, -1)


def assemble(
    pieces: Num[jax.Array, "PR piece"], axes: tuple[str, ...], ranks: int, expert: tuple[int, ...]
) -> Num[jax.Array, "R *expert"]:
    """The experts that this rank takes, from the pieces that all ranks have of them.

    Args:
        pieces: this rank's pieces of the R experts that each rank takes, those for each rank together.
        axes: the mesh axes of the ranks.
        ranks: P.
        expert: the shape of an expert.
    """
    by_rank = pieces.reshape(ranks, -1, pieces.shape[1])
    whole = jnp.swapaxes(jax.lax.all_to_all(by_rank, axes, 0, 0, tiled=True), 0, 1)
    return whole.reshape(by_rank.shape[1], -1)[:, : math.prod(expert)].reshape(-1, *expert)
