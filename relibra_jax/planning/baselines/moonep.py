"""MoonEP's planning (github.com/MoonshotAI/MoonEP), as a planner: every rank computes equally many token copies.

Every rank is to compute its *share*, equal to within one token copy, and shares sum to the load. As long as a rank is
above its share, the one that lacks most is filled up to its share by the one that has most too much: the *donor* gives
all that the receiver lacks, even if it falls below its own share, and its largest experts first.

E/P slots a rank suffice. A donor has at least one copy more than its share, and a receiver lacks at most its own
share, which is at most one larger: so what the donor has left of its own load is never less than what it gives. A
filled rank is at its share and is neither donor nor receiver again, so all are filled after P - 1 steps, and
each received from one donor at most. A donor has E/P experts, so no rank received more than E/P of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.planning.baselines.fixed_homes import replicate_from_fixed_homes
from relibra_jax.types import EMPTY, Planner


def moonep(*, packed: bool = False, across_nodes: bool = False) -> Planner:
    """MoonEP as a planner: homes that stay, and ranks of a domain brought to equal loads.

    Source: the planning kernel and its reference in tests of github.com/MoonshotAI/MoonEP, read in forks of it. All
    ranks of a domain come to within one token copy of each other wherever ``R >= E/P``. What differs:

    - Fewer slots than E/P, which MoonEP always has: then the smallest load is searched, by halving an interval, to
      which all ranks can be brought down if a receiver takes no more than the R largest experts of its donor.
    - Shares that are one larger, where the load does not divide by P, go to the fullest ranks instead of the first,
      which takes fewer replicas.
    - A donor's experts are chosen receiver by receiver, in the order in which they are filled, not by the receiver
      that lacks most. Both give the largest expert first.

    Args:
        packed: whether homes are packed once, from the first batch's loads, as a checkpoint could be laid out;
            otherwise they are contiguous, as in the source.
        across_nodes: whether all ranks are one domain; otherwise every node is one. MoonEP itself needs all its ranks
            in one domain of fast interconnect.

    Returns:
        A Planner whose state is a KeptHomes.

    >>> from relibra_jax.types import Topology
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> planner = moonep()
    >>> plan, _ = planner.update(load, planner.init(topology, 1), topology)
    >>> plan.quota.tolist()
    [[[[[40, 10, 0], [6, 4, 40]]]]]
    """
    return replicate_from_fixed_homes(_replicate, packed=packed, across_nodes=across_nodes)


class _Shared(NamedTuple):
    balance: Int[jax.Array, " P"]
    """Tokens that each rank has above its share."""
    at_home: Int[jax.Array, "P H"]
    replica: Int[jax.Array, "P R"]
    tokens: Int[jax.Array, "P R"]


def _replicate(
    load: Int[jax.Array, "P H"], replica_slots: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Exact shares if they can be reached, else the smallest largest load that is found."""
    start = load.sum(1, dtype=jnp.int32)
    total, ranks = start.sum(dtype=jnp.int32), start.size
    fullest_first = jnp.argsort(-start, stable=True)
    shares = jnp.zeros_like(start).at[fullest_first].set(total // ranks + (jnp.arange(ranks) < total % ranks))
    share = functools.partial(_share, load, replica_slots)
    exact = share(shares)

    def halve(carry):
        best, low, high = carry
        middle = low + (high - low) // 2
        shared = share(jnp.full_like(start, middle))
        reached = shared.balance.max() <= 0
        best = jax.tree.map(functools.partial(jnp.where, reached), shared, best)
        return best, jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    alone = _unshared(load, jnp.full_like(start, start.max()), replica_slots)
    solved = exact.balance.max() <= 0
    first = jax.tree.map(functools.partial(jnp.where, solved), exact, alone)
    low = shares.max()
    best, *_ = jax.lax.while_loop(
        lambda carry: carry[1] < carry[2], halve, (first, low, jnp.where(solved, low, start.max()))
    )
    return best.replica, jnp.concatenate([best.at_home, best.tokens], 1)


def _unshared(load: Int[jax.Array, "P H"], shares: Int[jax.Array, " P"], slots: int) -> _Shared:
    replica = jnp.full((len(load), slots), EMPTY, jnp.int32)
    return _Shared(load.sum(1, dtype=jnp.int32) - shares, load, replica, jnp.zeros_like(replica))


def _share(load: Int[jax.Array, "P H"], slots: int, shares: Int[jax.Array, " P"]) -> _Shared:
    """Fill ranks up to their shares, each from one donor, until no rank is above its own or all were filled."""
    ranks, homes = load.shape
    width = min(slots, homes)
    rank = jnp.arange(ranks, dtype=jnp.int32)

    def lacking(now: _Shared) -> Int[jax.Array, " P"]:
        """What ranks lack that have not received yet."""
        return jnp.where((now.replica == EMPTY).all(1), -now.balance, 0)

    def fill(now: _Shared) -> _Shared:
        lack = lacking(now)
        donor, receiver = now.balance.argmax(), lack.argmax()
        largest, chosen = jax.lax.top_k(now.at_home[donor], width)
        before = jnp.cumsum(largest, dtype=jnp.int32) - largest
        moved = jnp.clip(lack.max() - before, 0, largest)
        source = jnp.where(moved > 0, donor * homes + chosen, EMPTY).astype(jnp.int32)
        change = jnp.where(rank == receiver, 1, 0) - jnp.where(rank == donor, 1, 0)
        return _Shared(
            now.balance + change.astype(jnp.int32) * moved.sum(dtype=jnp.int32),
            now.at_home.at[donor, chosen].add(-moved),
            now.replica.at[receiver, :width].set(source),
            now.tokens.at[receiver, :width].set(moved),
        )

    def unfinished(now: _Shared) -> jax.Array:
        return (now.balance.max() > 0) & (lacking(now).max() > 0)

    return jax.lax.while_loop(unfinished, fill, _unshared(load, shares, slots))
