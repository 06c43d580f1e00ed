"""Spilling in one domain: what ranks have above a threshold goes to the rank with most room, expert by expert.

The step that UltraEP and LLEP share. They differ in the threshold, in the order of the experts and in the fewest
tokens that they move.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.types import EMPTY


class Spilled(NamedTuple):
    """What a domain of P ranks with H experts each looks like while it spills."""

    excess: Int[jax.Array, " P"]
    """Tokens that each rank still has above the threshold."""
    room: Int[jax.Array, " P"]
    """Tokens that each rank still lacks to the threshold."""
    at_home: Int[jax.Array, " E"]
    """Tokens that each expert's home computes; E = P * H."""
    replica: Int[jax.Array, "P R"]
    """The expert in each replica slot, as a home slot of the domain; EMPTY for none."""
    tokens: Int[jax.Array, "P R"]
    """Tokens that each replica computes."""

    def quota(self) -> Int[jax.Array, "P S"]:
        """Tokens of each home slot, then of each replica slot."""
        return jnp.concatenate([self.at_home.reshape(len(self.replica), -1), self.tokens], -1)


def unspilled(load: Int[jax.Array, "P H"], threshold: Int[jax.Array, ""], replica_slots: int) -> Spilled:
    """The domain before anything moves."""
    above = load.sum(1, dtype=jnp.int32) - threshold
    replica = jnp.full((len(load), replica_slots), EMPTY, jnp.int32)
    return Spilled(
        jnp.maximum(above, 0), jnp.maximum(-above, 0), load.ravel(), replica, jnp.zeros_like(replica)
    )


def spill(
    load: Int[jax.Array, "P H"],
    threshold: Int[jax.Array, ""],
    order: Int[jax.Array, " E"],
    *,
    replica_slots: int,
    kept: int,
    fewest: Callable[[jax.Array, jax.Array, jax.Array], jax.Array | int],
) -> Spilled:
    """Bring ranks down to a threshold, as far as slots allow.

    Each expert in turn gives what its rank has too much, or as much of it as the expert has, to the rank with most
    room that has a free slot and no copy of it; then the rest to the next such rank.

    Args:
        load: token copies of each expert, by home slot; int32.
        threshold: the rank load to come down to.
        order: the experts, in the order of their turns.
        replica_slots: R, 1 or more.
        kept: tokens that stay at home of every expert that has any.
        fewest: ``(need, movable, takers) -> tokens`` says when a replica is too small to be worth it: the rank's
            excess, what of it the expert can give, and the number of ranks that could take some.

    Returns:
        Spilled; ``excess`` is 0 on all ranks where the threshold was reached.
    """
    ranks, homes = load.shape
    rank, slot = jnp.arange(ranks, dtype=jnp.int32), jnp.arange(replica_slots, dtype=jnp.int32)
    keeps = jnp.minimum(load.ravel(), kept)

    def give(carry):
        now, turn = carry
        expert = order[turn]
        need = now.excess[expert // homes]
        movable = jnp.minimum(need, now.at_home[expert] - keeps[expert])
        used = (now.replica != EMPTY).sum(1, dtype=jnp.int32)
        may_take = (now.room > 0) & (used < replica_slots) & ~(now.replica == expert).any(1)
        room = jnp.where(may_take, now.room, 0)
        moved = jnp.minimum(movable, room.max())
        least = jnp.maximum(fewest(need, movable, may_take.sum(dtype=jnp.int32)), 1)
        moved = jnp.where(moved >= least, moved, 0)
        taker = (rank == room.argmax()) & (moved > 0)
        filled = taker[:, None] & (slot[None] == used[:, None])
        after = Spilled(
            now.excess.at[expert // homes].add(-moved),
            now.room - jnp.where(taker, moved, 0),
            now.at_home.at[expert].add(-moved),
            jnp.where(filled, expert, now.replica),
            jnp.where(filled, moved, now.tokens),
        )
        return after, turn + (moved == 0)

    def unfinished(carry):
        now, turn = carry
        return (turn < order.size) & (now.excess.max() > 0)

    return jax.lax.while_loop(unfinished, give, (unspilled(load, threshold, replica_slots), jnp.int32(0)))[0]
