"""The split of each expert's token copies over the slots that hold it: nearest slot first, equal on every process.

A plan says how many token copies each slot computes, but not from which ranks they come. `source_quota` decides that: a
slot on the same rank serves first, then slots in the same node, then all others. In each of these three rounds the
supply of the ranks and the demand of the slots are laid out along one line, in rank order, and matched where they
overlap (the north-west corner rule). So the result is exact, in integers, and deterministic.

The functions work on one layer of one micro-batch; callers vmap them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, LayerPlan, Topology


@functools.partial(jax.jit, static_argnames="topology")
def source_quota(plan: LayerPlan, topology: Topology) -> Int[jax.Array, "P N G S"]:
    """Count the token copies that each source rank sends to each slot, in one layer of one micro-batch.

    Args:
        plan: a valid layer plan. Its slots, quotas and load are read.
        topology: the expert-parallel group.

    Returns:
        int32 token copies by flat source rank P and by slot. The sum over P is the quota of the plan, and the sum over
        the slots of an expert is its load. The result takes P times the memory of the plan: with hundreds of ranks,
        call the function layer by layer.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> slots, quota = jnp.array([[[0, -1], [1, 0]]]), jnp.array([[[6, 0], [4, 4]]])
    >>> plan = LayerPlan(slots, jnp.array([0, 1]), quota, load=jnp.array([[[5, 2], [5, 2]]]))
    >>> source_quota(plan, topology)[:, 0].tolist()
    [[[5, 0], [2, 0]], [[1, 0], [2, 4]]]
    """
    ranks, slots = topology.num_ranks, topology.slots
    supply, demand, expert, rank = _sides(plan, topology)
    slot_expert = jnp.where(expert == EMPTY, 0, expert)
    sent = jnp.zeros((ranks, expert.size), jnp.int32)
    for neighbours in (1, topology.ranks_per_node, ranks):
        matched = _overlap(supply, demand, slot_expert, rank, neighbours).T
        matched = jnp.where(expert == EMPTY, 0, matched)
        supply = supply - jnp.zeros_like(supply).at[:, slot_expert].add(matched)
        demand = demand - jnp.zeros_like(demand).at[rank, slot_expert].add(
            matched.sum(0, dtype=matched.dtype)
        )
        sent = sent + matched
    return sent.reshape(ranks, topology.num_nodes, topology.ranks_per_node, slots)


def pair_load(plan: LayerPlan, topology: Topology) -> Int[jax.Array, "P P"]:
    """Count the token copies that each rank sends to each rank, in one layer of one micro-batch.

    The counts are sums of `source_quota` over slots, but take a fraction of its time and memory.

    Args:
        plan: a valid layer plan. Its slots, quotas and load are read.
        topology: the expert-parallel group.

    Returns:
        int32 token copies by flat source rank and by flat target rank.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> slots, quota = jnp.array([[[0, -1], [1, 0]]]), jnp.array([[[6, 0], [4, 4]]])
    >>> plan = LayerPlan(slots, jnp.array([0, 1]), quota, load=jnp.array([[[5, 2], [5, 2]]]))
    >>> pair_load(plan, topology).tolist()
    [[5, 2], [1, 6]]
    """
    ranks, local = topology.num_ranks, topology.ranks_per_node
    supply, demand, expert, rank = _sides(plan, topology)
    slot_expert = jnp.where(expert == EMPTY, 0, expert)
    own = jnp.minimum(supply, demand)
    supply, demand = supply - own, demand - own
    sent = jnp.diag(own.sum(1, dtype=jnp.int32))
    for neighbours in (local, ranks)[: 1 + (topology.num_nodes > 1)]:
        matched = _overlap(supply, demand, slot_expert, rank, neighbours)
        matched = jnp.where(expert[:, None] == EMPTY, 0, matched)
        sent = sent + matched.reshape(ranks, -1, ranks).sum(1, dtype=jnp.int32).T
        supply, demand = _unmatched(supply, demand, neighbours), _unmatched(demand, supply, neighbours)
    return sent


@functools.partial(jax.jit, static_argnames="topology")
def refit_quota(plan: LayerPlan, load: Int[Array, "N G E"], topology: Topology) -> LayerPlan:
    """Fit the quotas of a layer plan to another load, for routing that the plan was not made for.

    The experts stay in their slots. The token copies of each expert are split over its slots in proportion to their
    quotas. An expert that had no load in the plan is computed in its home slot.

    Args:
        plan: one layer plan. Its own load is not read.
        load: token copies of each expert, on the rank where their token is.
        topology: the expert-parallel group.

    Returns:
        ``plan`` with ``load``, and with quotas that sum to it.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> slots, quota = jnp.array([[[0, -1], [1, 0]]]), jnp.array([[[3, 0], [0, 1]]])
    >>> plan = LayerPlan(slots, jnp.array([0, 1]), quota, load=None)
    >>> refit_quota(plan, jnp.array([[[5, 2], [5, 2]]]), topology).quota.tolist()
    [[[7, 0], [4, 3]]]
    """
    expert, shares = jnp.asarray(plan.slot_expert).reshape(-1), jnp.asarray(plan.quota).reshape(-1)
    load = jnp.asarray(load, jnp.int32)
    total = load.sum((0, 1), dtype=jnp.int32)
    slot_expert = jnp.where(expert == EMPTY, topology.num_experts, expert)
    planned = jnp.zeros(topology.num_experts + 1, jnp.int32).at[slot_expert].add(shares)
    at_home = np.tile(np.arange(topology.slots) < topology.home_slots, topology.num_ranks)
    share = jnp.where(planned[slot_expert] > 0, shares, at_home.astype(np.int32))
    share = jnp.where(expert == EMPTY, 0, share)

    # The shares of an expert's slots follow one another; their ends, rounded down, divide its copies into integers.
    slots = jnp.argsort(slot_expert, stable=True)
    slot_expert, share = slot_expert[slots], share[slots]
    whole = jnp.maximum(planned, 1)[slot_expert]
    first = jnp.searchsorted(slot_expert, slot_expert, side="left")
    until = jnp.cumsum(share, dtype=jnp.int32)
    until = until - (until - share)[first]
    total = jnp.append(total, 0)[slot_expert]
    end = jnp.where(until == whole, total, jnp.floor(total * (until / whole)).astype(jnp.int32))
    end = jnp.minimum(end, total)
    begin = jnp.where(jnp.arange(slot_expert.size) == first, 0, jnp.roll(end, 1))
    quota = jnp.zeros_like(end).at[slots].set(end - begin, unique_indices=True)
    return plan._replace(quota=quota.reshape(plan.quota.shape), load=load)


def _sides(
    plan: LayerPlan, topology: Topology
) -> tuple[Int[jax.Array, "P E"], Int[jax.Array, "P E"], Int[jax.Array, " PS"], Int[np.ndarray, " PS"]]:
    """Return the copies that ranks have and that they are to compute, and the expert and the rank of every slot."""
    supply = jnp.asarray(plan.load, jnp.int32).reshape(topology.num_ranks, -1)
    expert, quota = jnp.asarray(plan.slot_expert).reshape(-1), jnp.asarray(plan.quota, jnp.int32).reshape(-1)
    rank = np.repeat(np.arange(topology.num_ranks), topology.slots)
    demand = jnp.zeros_like(supply).at[rank, jnp.where(expert == EMPTY, 0, expert)].add(quota)
    return supply, demand, expert, rank


def _unmatched(
    side: Int[jax.Array, "P E"], other: Int[jax.Array, "P E"], neighbours: int
) -> Int[jax.Array, "P E"]:
    """Return what remains of one side after it was matched with the other inside each group of neighbouring ranks."""
    side_runs, other_runs = (each.reshape(-1, neighbours, each.shape[1]) for each in (side, other))
    matched = jnp.clip(
        other_runs.sum(1, keepdims=True, dtype=side.dtype) - line_starts(side_runs), 0, side_runs
    )
    return side - matched.reshape(side.shape)


def line_starts(amount: Int[Array, "*runs neighbours E"]) -> Int[jax.Array, "*runs neighbours E"]:
    """Return the start of each rank's copies when neighbouring ranks lay their copies of an expert along one line.

    Args:
        amount: copies of each expert on each of the neighbouring ranks.

    Returns:
        The number of copies before each rank's own. The line of expert e begins at rank ``e % neighbours`` and wraps
        around.

    >>> line_starts(jnp.array([[5, 5], [3, 3]])).tolist()
    [[0, 3], [5, 0]]
    """
    neighbours, experts = amount.shape[-2:]
    first = np.arange(experts) % neighbours
    before = jnp.cumsum(amount, axis=-2, dtype=amount.dtype) - amount
    around = np.arange(neighbours)[:, None] < first
    total = jnp.where(around, amount.sum(-2, keepdims=True, dtype=amount.dtype), 0)
    return before + total - before[..., first, np.arange(experts)][..., None, :]


def _overlap(
    supply: Int[jax.Array, "P E"],
    demand: Int[jax.Array, "P E"],
    expert: Int[jax.Array, " PS"],
    rank: Int[np.ndarray, " PS"],
    neighbours: int,
) -> Int[jax.Array, "PS P"]:
    """Match supply and demand inside each group of ``neighbours`` ranks; copies to each slot from each rank."""
    ranks = supply.shape[0]

    def ends(amount):
        start = line_starts(amount.reshape(ranks // neighbours, neighbours, -1)).reshape(amount.shape)
        return jnp.stack([start, start + amount], axis=-1)

    # The ranks of one expert are neighbours in memory, which makes the gather fast.
    supplied, demanded = jnp.swapaxes(ends(supply), 0, 1)[expert], ends(demand)[rank, expert][:, None]
    overlap = jnp.minimum(supplied[..., 1], demanded[..., 1]) - jnp.maximum(
        supplied[..., 0], demanded[..., 0]
    )
    together = rank[:, None] // neighbours == np.arange(ranks)[None] // neighbours
    return jnp.where(together, jnp.maximum(overlap, 0), 0)
