"""Moves of whole experts from the fullest rank to the emptiest, which FEPLB and ForeMoE have in common.

A move is a replica that computes all tokens that its expert had at home, where the quota is then 0: the master copy and
its optimizer state stay. Everything is integer arithmetic, exact as long as a domain's tokens stay below 2**31.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.types import EMPTY

_MAX = np.int32(np.iinfo(np.int32).max)


class Spread(NamedTuple):
    """Which copies compute what in one domain of P ranks with H homes and R replica slots each."""

    at_home: Int[jax.Array, "P H"]
    """Token copies of each home slot."""
    replica: Int[jax.Array, "P R"]
    """The home slot, counted over the domain, whose expert each replica slot holds; EMPTY for none."""
    tokens: Int[jax.Array, "P R"]
    """Token copies of each replica slot."""

    def rank_load(self) -> Int[jax.Array, " P"]:
        """Token copies of each rank."""
        return self.at_home.sum(1, dtype=jnp.int32) + self.tokens.sum(1, dtype=jnp.int32)


def at_home_only(load: Int[jax.Array, "P H"], replica_slots: int) -> Spread:
    """Every expert computed at home, all replica slots empty."""
    empty = jnp.full((load.shape[0], replica_slots), EMPTY, jnp.int32)
    return Spread(load, empty, jnp.zeros_like(empty))


def move_whole(spread: Spread, movable: Bool[jax.Array, "P H"], *, overshoot: float | None = None) -> Spread:
    """Move experts whole from the fullest rank to the emptiest that has a free slot, as long as that helps.

    A move helps if the emptiest rank ends below where the fullest was. Of the experts whose move helps, the largest is
    moved; where there is none, no move could lower the largest rank load, and the moves end.

    Args:
        spread: what the copies compute before.
        movable: the home slots whose experts may be moved.
        overshoot: how many times the fullest rank's excess over the mean an expert may be; None for any size.

    Returns:
        The spread after all moves, at most one for each replica slot.
    """
    ranks, homes = spread.at_home.shape
    room = spread.replica.shape[1]
    if not room:
        return spread
    rank, expert = jnp.arange(ranks, dtype=jnp.int32), jnp.arange(ranks * homes, dtype=jnp.int32)

    def step(carry: tuple[Spread, jax.Array]) -> tuple[Spread, jax.Array]:
        now, _ = carry
        load = now.rank_load()
        used = (now.replica != EMPTY).sum(1, dtype=jnp.int32)
        free = jnp.where(used < room, load, _MAX)
        fullest, emptiest = jnp.argmax(load).astype(jnp.int32), jnp.argmin(free).astype(jnp.int32)
        size = jnp.where((rank == fullest)[:, None] & movable, now.at_home, 0).ravel()
        held = (now.replica[emptiest][None, :] == expert[:, None]).any(1)
        helps = ~held & (size < load[fullest] - free[emptiest])
        if overshoot is not None:
            excess = load[fullest] - load.sum(dtype=jnp.int32) // ranks
            beyond = (overshoot - 1) * excess.astype(jnp.float32)
            helps &= (size - excess).astype(jnp.float32) <= beyond
        size = jnp.where(helps, size, 0)
        chosen = jnp.argmax(size).astype(jnp.int32)
        moved = size[chosen]
        leaves = jnp.where((expert == chosen) & (moved > 0), 0, now.at_home.ravel())
        slot = (rank == emptiest)[:, None] & (jnp.arange(room)[None] == used[:, None]) & (moved > 0)
        return (
            Spread(
                leaves.reshape(ranks, homes),
                jnp.where(slot, chosen, now.replica),
                jnp.where(slot, moved, now.tokens),
            ),
            moved > 0,
        )

    return jax.lax.while_loop(lambda carry: carry[1], step, (spread, jnp.bool_(True)))[0]
