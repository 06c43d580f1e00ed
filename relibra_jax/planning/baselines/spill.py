"""Spilling in one domain: load above a threshold moves, expert by expert, to the rank with the most room.

UltraEP and LLEP share this step. They differ in the threshold, in the order of the experts and in the fewest tokens
that they move.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY


class Spilled(NamedTuple):
    """The state of a domain of P ranks with H experts each during spilling."""

    excess: Int[jax.Array, " P"]
    """Tokens of each rank above the threshold."""
    spare: Int[jax.Array, " P"]
    """Tokens that each rank can take until it reaches the threshold."""
    at_home: Int[jax.Array, " E"]
    """Tokens that each expert's home computes; E = P * H."""
    replica: Int[jax.Array, "P R"]
    """The expert in each replica slot, as a home slot of the domain; EMPTY for none."""
    tokens: Int[jax.Array, "P R"]
    """Tokens that each replica computes."""

    def quota(self) -> Int[jax.Array, "P S"]:
        """Return the tokens of each home slot, then of each replica slot."""
        return jnp.concatenate([self.at_home.reshape(len(self.replica), -1), self.tokens], -1)


def initial_spill(load: Int[jax.Array, "P H"], threshold: Int[jax.Array, ""], replica_slots: int) -> Spilled:
    """Make the state of the domain before anything moves."""
    excess = load.sum(1, dtype=jnp.int32) - threshold
    replica = jnp.full((len(load), replica_slots), EMPTY, jnp.int32)
    return Spilled(
        jnp.maximum(excess, 0), jnp.maximum(-excess, 0), load.ravel(), replica, jnp.zeros_like(replica)
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
    """Reduce rank loads to a threshold, as far as slots allow.

    The experts give tokens one after the other. Each gives the excess of its rank, as far as it has tokens, to the rank
    with the most room, and the rest to the next one. A rank can take some if it has a free slot and no copy of the
    expert.

    Args:
        load: the number of token copies for each expert, by home slot; int32.
        threshold: the rank load to reach.
        order: the experts in the order in which they give.
        replica_slots: R, the number of replica slots of a rank, at least 1.
        kept: the number of tokens of every expert that stay at home.
        fewest: the function ``(need, movable, takers) -> tokens`` that gives the smallest replica worth making, from
            the rank's excess, the part of it that the expert can give, and the number of ranks that could take some.

    Returns:
        The state after spilling. If it reached the threshold, ``excess`` is 0 on all ranks.
    """
    ranks, homes = load.shape
    rank, slot = jnp.arange(ranks, dtype=jnp.int32), jnp.arange(replica_slots, dtype=jnp.int32)
    home_tokens = jnp.minimum(load.ravel(), kept)

    def give(carry):
        state, index = carry
        expert = order[index]
        need = state.excess[expert // homes]
        movable = jnp.minimum(need, state.at_home[expert] - home_tokens[expert])
        used_slots = (state.replica != EMPTY).sum(1, dtype=jnp.int32)
        may_take = (state.spare > 0) & (used_slots < replica_slots) & ~(state.replica == expert).any(1)
        spare = jnp.where(may_take, state.spare, 0)
        amount = jnp.minimum(movable, spare.max())
        least = jnp.maximum(fewest(need, movable, may_take.sum(dtype=jnp.int32)), 1)
        amount = jnp.where(amount >= least, amount, 0)
        taker = (rank == spare.argmax()) & (amount > 0)
        filled = taker[:, None] & (slot[None] == used_slots[:, None])
        new_state = Spilled(
            state.excess.at[expert // homes].add(-amount),
            state.spare - jnp.where(taker, amount, 0),
            state.at_home.at[expert].add(-amount),
            jnp.where(filled, expert, state.replica),
            jnp.where(filled, amount, state.tokens),
        )
        return new_state, index + (amount == 0)

    def unfinished(carry):
        state, index = carry
        return (index < order.size) & (state.excess.max() > 0)

    return jax.lax.while_loop(
        unfinished, give, (initial_spill(load, threshold, replica_slots), jnp.int32(0))
    )[0]
