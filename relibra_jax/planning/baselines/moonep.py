"""MoonEP (github.com/MoonshotAI/MoonEP) as a planner: every rank computes the same number of token copies.

Every rank has a *share*; shares differ by at most one token copy and sum to the load. As long as a rank is above its
share, the rank with the largest excess, the *donor*, fills the rank with the largest deficit, the *receiver*, up to its
share. The donor gives all that the receiver lacks, largest experts first, even if it falls below its own share.

E/P slots per rank are enough. A donor has at least one copy more than its share, and a receiver lacks at most its own
share, which is at most one larger. So the donor's own load is always enough for its gift. A filled rank is at its share
and is neither donor nor receiver again, so all ranks are filled after P - 1 steps, and each receives from at most one
donor. A donor has E/P experts, so no rank receives more than E/P of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.planner import Planner
from relibra_jax.contract.types import EMPTY
from relibra_jax.planning.baselines.fixed_homes import replicate_from_fixed_homes


@functools.cache
def moonep(*, packed: bool = False, across_nodes: bool = False) -> Planner:
    """Make a planner from MoonEP: homes stay, and the ranks of a domain get equal loads.

    Source: the planning kernel and its reference in the tests of github.com/MoonshotAI/MoonEP, read in forks of the
    repository. If ``R >= E/P``, the loads of all ranks of a domain differ by at most one token copy. Differences from
    the source:

    - There may be fewer slots than E/P, which MoonEP always has. Bisection then finds the smallest load to which all
      ranks can be reduced if a receiver takes no more than the R largest experts of its donor.
    - If the load is not a multiple of P, the shares that are one larger go to the fullest ranks instead of the first
      ranks, which takes fewer replicas.
    - A donor's experts are chosen for one receiver after the other, in the order in which they are filled, instead of
      for the receiver with the largest deficit. Both give the largest expert first.

    Args:
        packed: whether to pack homes once, from the first batch's loads, as a checkpoint could store them. Otherwise
            homes are contiguous, as in the source.
        across_nodes: whether all ranks are one domain. Otherwise every node is one. MoonEP itself needs all its ranks
            in one domain of fast interconnect.

    Returns:
        A Planner whose state is a KeptHomes.

    >>> from relibra_jax.contract.types import Topology
    >>> from relibra_jax import PlanRequest
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> planner = moonep()
    >>> plan, _ = planner.update(PlanRequest(load), planner.init(topology, 1), topology)
    >>> plan.quota.tolist()
    [[[[[40, 10, 0], [6, 4, 40]]]]]
    """
    return replicate_from_fixed_homes(_replicate, packed=packed, across_nodes=across_nodes)


class _Sharing(NamedTuple):
    """The state of a domain while ranks are filled up to their shares."""

    balance: Int[jax.Array, " P"]
    """Tokens that each rank has above its share; negative below it."""
    at_home: Int[jax.Array, "P H"]
    """Tokens that each home slot computes."""
    replica: Int[jax.Array, "P R"]
    """The domain's home slot of the expert in each replica slot; EMPTY for none."""
    tokens: Int[jax.Array, "P R"]
    """Tokens that each replica slot computes."""


def _replicate(
    load: Int[jax.Array, "P H"], replica_slots: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Bring all ranks to their shares if possible, otherwise to the smallest maximum load that bisection finds."""
    start = load.sum(1, dtype=jnp.int32)
    total, ranks = start.sum(dtype=jnp.int32), start.size
    fullest_first = jnp.argsort(-start, stable=True)
    shares = jnp.zeros_like(start).at[fullest_first].set(total // ranks + (jnp.arange(ranks) < total % ranks))
    share = functools.partial(_share, load, replica_slots)
    exact = share(shares)

    def halve(carry):
        best, low, high = carry
        middle = low + (high - low) // 2
        sharing = share(jnp.full_like(start, middle))
        reached = sharing.balance.max() <= 0
        best = jax.tree.map(functools.partial(jnp.where, reached), sharing, best)
        return best, jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    homes_alone = _initial_sharing(load, jnp.full_like(start, start.max()), replica_slots)
    solved = exact.balance.max() <= 0
    first = jax.tree.map(functools.partial(jnp.where, solved), exact, homes_alone)
    low = shares.max()
    best, *_ = jax.lax.while_loop(
        lambda carry: carry[1] < carry[2], halve, (first, low, jnp.where(solved, low, start.max()))
    )
    return best.replica, jnp.concatenate([best.at_home, best.tokens], 1)


def _initial_sharing(load: Int[jax.Array, "P H"], shares: Int[jax.Array, " P"], slots: int) -> _Sharing:
    replica = jnp.full((len(load), slots), EMPTY, jnp.int32)
    return _Sharing(load.sum(1, dtype=jnp.int32) - shares, load, replica, jnp.zeros_like(replica))


def _share(load: Int[jax.Array, "P H"], slots: int, shares: Int[jax.Array, " P"]) -> _Sharing:
    """Fill ranks up to their shares, each from one donor, until no rank is above its share or all were filled."""
    ranks, homes = load.shape
    width = min(slots, homes)
    rank = jnp.arange(ranks, dtype=jnp.int32)

    def deficits(sharing: _Sharing) -> Int[jax.Array, " P"]:
        """Return the deficit of the ranks that have not received anything yet."""
        return jnp.where((sharing.replica == EMPTY).all(1), -sharing.balance, 0)

    def fill(sharing: _Sharing) -> _Sharing:
        deficit = deficits(sharing)
        donor, receiver = sharing.balance.argmax(), deficit.argmax()
        largest, expert = jax.lax.top_k(sharing.at_home[donor], width)
        earlier = jnp.cumsum(largest, dtype=jnp.int32) - largest
        amounts = jnp.clip(deficit.max() - earlier, 0, largest)
        source = jnp.where(amounts > 0, donor * homes + expert, EMPTY).astype(jnp.int32)
        change = jnp.where(rank == receiver, 1, 0) - jnp.where(rank == donor, 1, 0)
        return _Sharing(
            sharing.balance + change.astype(jnp.int32) * amounts.sum(dtype=jnp.int32),
            sharing.at_home.at[donor, expert].add(-amounts),
            sharing.replica.at[receiver, :width].set(source),
            sharing.tokens.at[receiver, :width].set(amounts),
        )

    def unfinished(sharing: _Sharing) -> jax.Array:
        return (sharing.balance.max() > 0) & (deficits(sharing).max() > 0)

    return jax.lax.while_loop(unfinished, fill, _initial_sharing(load, shares, slots))
