"""Moves of whole experts from the fullest rank to the emptiest one, the step that FEPLB and ForeMoE share.

A move is a replica that computes all tokens that its expert had at home. The master copy and its optimizer state stay
at home, with a quota of 0. Everything is integer arithmetic, exact as long as a domain's tokens stay below 2**31.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.contract.types import EMPTY
from relibra_jax.support.limits import INT32_MAX


class Spread(NamedTuple):
    """The token copies that each slot computes, in one domain of P ranks with H homes and R replica slots each."""

    at_home: Int[jax.Array, "P H"]
    """Token copies of each home slot."""
    replica: Int[jax.Array, "P R"]
    """The domain's home slot of the expert in each replica slot; EMPTY for none."""
    tokens: Int[jax.Array, "P R"]
    """Token copies of each replica slot."""

    def rank_load(self) -> Int[jax.Array, " P"]:
        """Return the token copies of each rank."""
        return self.at_home.sum(1, dtype=jnp.int32) + self.tokens.sum(1, dtype=jnp.int32)


def all_at_home(load: Int[jax.Array, "P H"], replica_slots: int) -> Spread:
    """Make the state in which every expert is computed at home and all replica slots are empty."""
    empty = jnp.full((load.shape[0], replica_slots), EMPTY, jnp.int32)
    return Spread(load, empty, jnp.zeros_like(empty))


def move_whole(spread: Spread, movable: Bool[jax.Array, "P H"], *, overshoot: float | None = None) -> Spread:
    """Move whole experts from the fullest rank to the emptiest rank with a free slot, as long as that helps.

    A move helps if the emptiest rank then has less load than the fullest rank had. The largest expert whose move helps
    is moved. If there is none, no move could lower the largest rank load, and the moves end.

    Args:
        spread: the token copies of each slot before the moves.
        movable: the home slots whose experts may move.
        overshoot: the largest load of an expert that may move, as a multiple of the fullest rank's excess over the
            mean. None allows any size.

    Returns:
        The token copies of each slot after all moves, at most one for each replica slot.
    """
    ranks, homes = spread.at_home.shape
    replica_slots = spread.replica.shape[1]
    if not replica_slots:
        return spread
    rank, expert = jnp.arange(ranks, dtype=jnp.int32), jnp.arange(ranks * homes, dtype=jnp.int32)

    def step(carry: tuple[Spread, jax.Array]) -> tuple[Spread, jax.Array]:
        current, _ = carry
        load = current.rank_load()
        used_slots = (current.replica != EMPTY).sum(1, dtype=jnp.int32)
        free = jnp.where(used_slots < replica_slots, load, INT32_MAX)
        fullest, emptiest = jnp.argmax(load).astype(jnp.int32), jnp.argmin(free).astype(jnp.int32)
        size = jnp.where((rank == fullest)[:, None] & movable, current.at_home, 0).ravel()
        has_copy = (current.replica[emptiest][None, :] == expert[:, None]).any(1)
        helps = ~has_copy & (size < load[fullest] - free[emptiest])
        if overshoot is not None:
            excess = load[fullest] - load.sum(dtype=jnp.int32) // ranks
            allowance = (overshoot - 1) * excess.astype(jnp.float32)
            helps &= (size - excess).astype(jnp.float32) <= allowance
        size = jnp.where(helps, size, 0)
        candidate = jnp.argmax(size).astype(jnp.int32)
        amount = size[candidate]
        at_home = jnp.where((expert == candidate) & (amount > 0), 0, current.at_home.ravel())
        slot = (
            (rank == emptiest)[:, None]
            & (jnp.arange(replica_slots)[None] == used_slots[:, None])
            & (amount > 0)
        )
        return (
            Spread(
                at_home.reshape(ranks, homes),
                jnp.where(slot, candidate, current.replica),
                jnp.where(slot, amount, current.tokens),
            ),
            amount > 0,
        )

    return jax.lax.while_loop(lambda carry: carry[1], step, (spread, jnp.bool_(True)))[0]
