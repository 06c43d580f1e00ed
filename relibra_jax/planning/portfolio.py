"""The homes among which every layer chooses by modelled time after the search: a portfolio of at most four.

They are the homes of the batch before, those after one exchange of experts between pairs of ranks, the homes of the
search without its residents, and homes that are packed anew, heaviest expert first, as systems do that never move an
expert again (EPLB, LAER-MoE, MoonEP). The search moves one expert at a time, and each of its moves has to pay for
itself; packed homes pay all together or not. An exchange in which no more than one expert leaves any rank costs the
least that any move does, because all ranks send as many experts as the one that sends the most. Packed and exchanged
homes are made for the mean of the batches so far, so that they suit many batches, where the search suits one.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.plan import inverse_permutation
from relibra_jax.contract.types import Array, Topology

NEAR: Final = 1.001
"""The load up to which a bin keeps its experts, as a multiple of the mean; more than 1 because of rounding."""
SEARCHED, BEFORE, EXCHANGED, PACKED = range(4)


class Trial(NamedTuple):
    """A plan that is tried after the search, under the best or the first assignment of samples."""

    home: Array
    """`SEARCHED`, `BEFORE`, `EXCHANGED` or `PACKED`."""
    bare: Array
    """Whether there are no replicas. Ranks then need not meet to fetch them, so all layers go without."""
    first_assignment: Array
    """Whether samples are assigned as the rounds began; otherwise as in the best plan."""
    begins: Array
    """Whether the trials of a merged plan begin: each layer of it takes the cheapest trial."""
    is_merged: Array
    """Whether the plan is the merged one, which is compared with the best plan as a whole."""


def list_trials(*, assigned: bool) -> tuple[Trial, ...]:
    """Return the trials of a batch in their order.

    Args:
        assigned: whether the best assignment of samples may differ from the first.

    >>> [int(trial.home) for trial in list_trials(assigned=False)]
    [0, 1, 2, 3, 0, 1, 2, 0, 0]
    """
    groups = [
        ((SEARCHED, BEFORE, EXCHANGED, PACKED), False, False),
        ((BEFORE, EXCHANGED, SEARCHED), True, False),
    ]
    if assigned:
        groups += [((BEFORE, EXCHANGED, PACKED), False, True), ((BEFORE, EXCHANGED), True, True)]
    trials: list[Trial] = []
    for homes, bare, first in groups:
        for number, home in enumerate((*homes, SEARCHED)):
            flags = (bare, first, number == 0, number == len(homes))
            trials.append(Trial(np.asarray(home, np.int32), *map(np.asarray, flags)))
    return tuple(trials)


def homes_of(
    trial: Trial,
    before: Int[Array, "L E"],
    searched: Int[Array, "L E"],
    load: Float[Array, "L E"],
    topology: Topology,
) -> Int[jax.Array, "L E"]:
    """Return the homes of a trial.

    Args:
        trial: the trial.
        before: the homes of the batch before.
        searched: the homes of the search.
        load: the load of each expert, for which homes are packed and exchanged.
        topology: the expert-parallel group.
    """
    searched, before = jnp.asarray(searched), jnp.asarray(before)
    load = jnp.asarray(load)
    # In the order of SEARCHED, BEFORE, EXCHANGED, PACKED. A switch packs only if the trial asks for it.
    homes = (
        lambda: searched,
        lambda: before,
        lambda: exchange_pairs(load, before, topology),
        lambda: pack_near(load, before, topology),
    )
    return jax.lax.switch(trial.home, homes)


def exchange_pairs(
    load: Float[jax.Array, "L E"], before: Int[Array, "L E"], topology: Topology
) -> Int[jax.Array, "L E"]:
    """Exchange one expert between the fullest and the emptiest rank, then between the next ones, each rank once.

    Of all exchanges of a pair, the one that leaves the lower maximum is made, if it is lower than before.

    Args:
        load: the load of each expert.
        before: the homes of the batch before.
        topology: the expert-parallel group.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> exchange_pairs(jnp.array([[9.0, 8.0, 2.0, 1.0]]), jnp.array([[0, 1, 2, 3]]), topology).tolist()
    [[2, 1, 0, 3]]
    """
    ranks, size = topology.num_ranks, topology.home_slots

    def one_layer(load: jax.Array, home: jax.Array) -> jax.Array:
        expert = inverse_permutation(home).reshape(ranks, size)
        total = load[expert].sum(1)
        order = jnp.argsort(-total, stable=True)

        def exchange(full: jax.Array, empty: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return the expert of each rank that is exchanged; without an exchange, twice the same."""
            gives, takes = expert[full], expert[empty]
            moved = load[gives][:, None] - load[takes][None]
            top = jnp.maximum(total[full] - moved, total[empty] + moved)
            best = top.argmin()
            a, b = gives[best // size], takes[best % size]
            return a, jnp.where(top.min() < total[full], b, a)

        a, b = jax.vmap(exchange)(order[: ranks // 2], order[::-1][: ranks // 2])
        return home.at[a].set(home[b]).at[b].set(home[a])

    return jax.vmap(one_layer)(load, jnp.asarray(before, jnp.int32))


def pack_near(
    load: Float[jax.Array, "L E"], before: Int[Array, "L E"], topology: Topology
) -> Int[jax.Array, "L E"]:
    """Pack experts on nodes and then on the ranks of each node, heaviest first, near the homes that they have.

    An expert stays where it is as long as that is no fuller than the mean, and else goes to the lightest bin that has
    room.

    Args:
        load: the load of each expert over the batch.
        before: the homes of the batch before.
        topology: the expert-parallel group.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> pack_near(jnp.array([[9.0, 8.0, 2.0, 1.0]]), jnp.array([[0, 1, 2, 3]]), topology).tolist()
    [[0, 3, 2, 1]]
    """
    nodes, ranks, experts = topology.num_nodes, topology.num_ranks, topology.num_experts

    def one_layer(load: jax.Array, before: jax.Array) -> jax.Array:
        order = jnp.argsort(-load, stable=True)

        def place(carry, expert):
            node_load, rank_load, node_count, rank_count = carry

            def lightest(total, count, room, own, allowed):
                free = allowed & (count < room)
                stays = free[own] & (total[own] + load[expert] <= load.sum() / total.size * NEAR)
                return jnp.where(stays, own, jnp.where(free, total, jnp.inf).argmin())

            own_rank = before[expert] // topology.home_slots
            own_node = own_rank // topology.ranks_per_node
            node = lightest(node_load, node_count, experts // nodes, own_node, jnp.ones(nodes, bool))
            inside = jnp.arange(ranks) // topology.ranks_per_node == node
            rank = lightest(rank_load, rank_count, topology.home_slots, own_rank, inside)
            share = load[expert]
            carry = (
                node_load.at[node].add(share),
                rank_load.at[rank].add(share),
                node_count.at[node].add(1),
                rank_count.at[rank].add(1),
            )
            return carry, rank

        start = tuple(jnp.zeros(bins, kind) for kind in (jnp.float32, jnp.int32) for bins in (nodes, ranks))
        _, rank = jax.lax.scan(place, start, order)
        rank = jnp.zeros(experts, jnp.int32).at[order].set(rank.astype(jnp.int32))
        return keep_slots(rank, before, topology.home_slots)

    return jax.vmap(one_layer)(load, jnp.asarray(before, jnp.int32))


def keep_slots(
    new_bin: Int[jax.Array, " E"], previous_home: Int[jax.Array, " E"], size: int
) -> Int[jax.Array, " E"]:
    """Choose slots in one layer: an expert that stays in its bin keeps its slot, the others fill the free slots.

    Args:
        new_bin: the bin of each expert, ``size`` experts in each.
        previous_home: flat home slot of each expert before.
        size: the number of slots of a bin.
    """
    stays = previous_home // size == new_bin
    free = jnp.argsort(jnp.zeros_like(stays).at[previous_home].set(stays), stable=True).astype(jnp.int32)
    movers = jnp.argsort(jnp.where(stays, new_bin.size, new_bin), stable=True)
    return jnp.where(stays, previous_home, jnp.zeros_like(previous_home).at[movers].set(free))
