"""The split of each expert's token copies over the slots that hold it: nearest slot first, equal on every process.

A plan says how many token copies each slot computes, but not from which ranks they come. `source_quota` decides that: a
slot on the same rank serves first, then slots in the same node, then all others. In each of the last two rounds the
supply of the ranks and the demand of the slots are laid out along one line and matched where they overlap (the
north-west corner rule). So the result is exact, in integers, and deterministic.

An exchange is as long as its longest lane, so every slot should get about as many copies from each rank. Each rank
lays out its supply in `PARTS` parts, one part of every rank after another. And where a node has fewer copies of an
expert than its slots compute, each of these slots takes a share of them in proportion; otherwise one slot would take
all of them, and the copies of other nodes would go to the rest.

The functions work on one layer of one micro-batch; callers vmap them.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, LayerPlan, Topology
from relibra_jax.support.argument_types import checks_arguments

PARTS: Final = 8
"""The number of parts in which a rank lays out its supply of an expert."""


@checks_arguments
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
    supply, demand, expert = _sides(plan, topology)
    own = jnp.minimum(supply, demand)
    is_own = _rank_of_slot(topology)[None] == np.arange(topology.num_ranks)[:, None]
    copies = jnp.where(expert[None] == EMPTY, 0, own[:, jnp.maximum(expert, 0)])
    sent = jnp.where(is_own, copies, 0)
    supply, demand = supply - own, demand - own
    for neighbours in _rounds(topology):
        served = _served(supply, demand, neighbours)
        matched = _overlap(supply, served, expert, neighbours)
        sent = sent + _on_diagonal(jnp.swapaxes(matched, 1, 2))
        supply, demand = _unmatched(supply, served, neighbours), demand - served
    return sent.reshape(-1, topology.num_nodes, topology.ranks_per_node, topology.slots)


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
    supply, demand, expert = _sides(plan, topology)
    own = jnp.minimum(supply, demand)
    supply, demand = supply - own, demand - own
    sent = jnp.diag(own.sum(1, dtype=jnp.int32))
    for neighbours in _rounds(topology):
        served = _served(supply, demand, neighbours)
        matched = _overlap(supply, served, expert, neighbours)
        by_rank = matched.reshape(len(matched), neighbours, topology.slots, neighbours)
        sent = sent + _on_diagonal(jnp.swapaxes(by_rank.sum(2, dtype=jnp.int32), 1, 2))
        supply, demand = _unmatched(supply, served, neighbours), demand - served
    return sent


@functools.partial(jax.jit, static_argnames="topology")
def refit_quota(plan: LayerPlan, load: Int[Array, "N G E"], topology: Topology) -> LayerPlan:
    """Fit the quotas of a layer plan to another load, for routing that the plan was not made for.

    The experts stay in their slots. The token copies of each expert are split over its slots in proportion to their
    quotas. An expert that had no load in the plan is computed in its home slot.

    Args:
        plan: one layer plan. Its own load is not read.
        load: token copies of each expert, on the rank that dispatches their token.
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
    first = jnp.searchsorted(slot_expert, slot_expert, side="left")
    until = jnp.cumsum(share, dtype=jnp.int32)
    until = until - (until - share)[first]
    total = jnp.append(total, 0)[slot_expert]
    end = _proportion(until, planned[slot_expert], total)
    begin = jnp.where(jnp.arange(slot_expert.size) == first, 0, jnp.roll(end, 1))
    quota = jnp.zeros_like(end).at[slots].set(end - begin, unique_indices=True)
    return plan._replace(quota=quota.reshape(plan.quota.shape), load=load)


def split_quota(
    plan: LayerPlan, loads: Int[Array, "pieces N G E"], topology: Topology
) -> tuple[LayerPlan, ...]:
    """Split the quotas of a layer plan over pieces of its tokens.

    Args:
        plan: one layer plan, with its load.
        loads: the load of each piece. They add up to that of the plan.
        topology: the expert-parallel group.

    Returns:
        The plan of each piece, with its load. The quotas of all pieces add up to those of the plan, and each slot
        computes about its share of every piece.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> slots, quota = jnp.array([[[0, -1], [1, 0]]]), jnp.array([[[7, 0], [4, 3]]])
    >>> plan = LayerPlan(slots, jnp.array([0, 1]), quota, load=jnp.array([[[5, 2], [5, 2]]]))
    >>> loads = jnp.array([[[[4, 1], [1, 1]]], [[[1, 1], [4, 1]]]])
    >>> [piece.quota.tolist() for piece in split_quota(plan, loads, topology)]
    [[[[3, 0], [2, 2]]], [[[4, 0], [2, 1]]]]
    """
    pieces, left = [], plan
    for load in loads:
        pieces.append(refit_quota(left, load, topology))
        left = plan._replace(quota=left.quota - pieces[-1].quota)
    return tuple(pieces)


def _sides(
    plan: LayerPlan, topology: Topology
) -> tuple[Int[jax.Array, "P E"], Int[jax.Array, "P E"], Int[jax.Array, " PS"]]:
    """Return the copies that ranks have and that they are to compute, and the expert of every slot."""
    supply = jnp.asarray(plan.load, jnp.int32).reshape(topology.num_ranks, -1)
    expert, quota = jnp.asarray(plan.slot_expert).reshape(-1), jnp.asarray(plan.quota, jnp.int32).reshape(-1)
    demand = (
        jnp.zeros_like(supply).at[_rank_of_slot(topology), jnp.where(expert == EMPTY, 0, expert)].add(quota)
    )
    return supply, demand, expert


def _rank_of_slot(topology: Topology) -> Int[np.ndarray, " PS"]:
    return np.repeat(np.arange(topology.num_ranks), topology.slots)


def _rounds(topology: Topology) -> tuple[int, ...]:
    """Return the numbers of neighbouring ranks that serve each other after each rank has served itself."""
    return (topology.ranks_per_node, topology.num_ranks)[: 1 + (topology.num_nodes > 1)]


def _parts(supply: Int[jax.Array, "P E"], neighbours: int) -> Int[jax.Array, "groups parts E"]:
    """Return the parts in which neighbouring ranks lay out their supply: the first of every rank, then the second."""
    part = jnp.arange(PARTS, dtype=supply.dtype)[None, :, None]
    parts = supply[:, None] // PARTS + (part < supply[:, None] % PARTS)
    parts = parts.reshape(-1, neighbours, *parts.shape[1:])
    return jnp.swapaxes(parts, 1, 2).reshape(len(parts), PARTS * neighbours, -1)


def _served(
    supply: Int[jax.Array, "P E"], demand: Int[jax.Array, "P E"], neighbours: int
) -> Int[jax.Array, "P E"]:
    """Return the demand that each group of neighbouring ranks serves itself: of each rank in proportion to its own."""
    supplies, demands = (each.reshape(-1, neighbours, each.shape[1]) for each in (supply, demand))
    offered, wanted = (each.sum(1, keepdims=True, dtype=jnp.int32) for each in (supplies, demands))
    begin = _line_starts(demands)
    parts = _proportion(begin + demands, wanted, offered) - _proportion(begin, wanted, offered)
    return jnp.where(offered < wanted, parts, demands).reshape(demand.shape)


def _unmatched(
    supply: Int[jax.Array, "P E"], served: Int[jax.Array, "P E"], neighbours: int
) -> Int[jax.Array, "P E"]:
    """Return what remains of the supply after each group of neighbouring ranks has matched its own."""
    parts = _parts(supply, neighbours)
    total = served.reshape(-1, neighbours, served.shape[1]).sum(1, keepdims=True, dtype=jnp.int32)
    left = parts - jnp.clip(total - _line_starts(parts), 0, parts)
    return (
        left.reshape(len(left), -1, neighbours, left.shape[2]).sum(1, dtype=jnp.int32).reshape(supply.shape)
    )


def _proportion(
    part: Int[jax.Array, "*stack"], whole: Int[jax.Array, "..."], total: Int[jax.Array, "..."]
) -> Int[jax.Array, "*stack"]:
    """Return ``total * part / whole`` rounded down, for ``part`` of at most ``whole``; 0 for an empty whole."""
    whole = jnp.maximum(whole, 1)
    # A float is a few copies off and differs between devices. What it leaves of the product is exact, because it is
    # small, though both products may wrap around.
    result = jnp.floor(total * (part / whole)).astype(jnp.int32)
    return result + (total * part - result * whole) // whole


def _line_starts(amount: Int[jax.Array, "groups runs E"]) -> Int[jax.Array, "groups runs E"]:
    """Return the number of copies before each run on the line of its expert.

    The line of expert e begins with run ``e % runs`` and wraps around, so that remainders fall on different ranks.
    """
    runs, experts = amount.shape[-2:]
    first = np.arange(experts) % runs
    before = jnp.cumsum(amount, axis=-2, dtype=amount.dtype) - amount
    around = np.arange(runs)[:, None] < first[None]
    total = jnp.where(around[None], amount.sum(-2, keepdims=True, dtype=amount.dtype), 0)
    return before + total - before[:, None, first, np.arange(experts)]


def _overlap(
    supply: Int[jax.Array, "P E"],
    demand: Int[jax.Array, "P E"],
    expert: Int[jax.Array, " PS"],
    neighbours: int,
) -> Int[jax.Array, "groups slots neighbours"]:
    """Match supply and demand inside each group of neighbouring ranks; copies to each slot from each rank."""
    parts, places = _parts(supply, neighbours), demand.reshape(-1, neighbours, demand.shape[1])
    slot_expert = jnp.where(expert == EMPTY, 0, expert).reshape(len(places), -1)
    slots = slot_expert.shape[1]
    group, rank = np.arange(len(places))[:, None], np.repeat(np.arange(neighbours), slots // neighbours)[None]

    def ends(amount, *slot):
        # The ranks of one expert are neighbours in memory, which makes the gather fast.
        start = jnp.swapaxes(_line_starts(amount), 1, 2)[group, slot_expert, *slot]
        return start, start + jnp.swapaxes(amount, 1, 2)[group, slot_expert, *slot]

    (first, last), (begin, end) = ends(parts), ends(places, rank)
    shared = jnp.minimum(last, end[..., None]) - jnp.maximum(first, begin[..., None])
    matched = jnp.maximum(shared, 0).reshape(len(places), slots, PARTS, neighbours).sum(2, dtype=jnp.int32)
    return jnp.where(expert.reshape(len(places), slots, 1) == EMPTY, 0, matched)


def _on_diagonal(blocks: Int[jax.Array, "groups n m"]) -> Int[jax.Array, "P all"]:
    """Return the matrix whose diagonal blocks are given, and which is zero elsewhere."""
    groups, rows, columns = blocks.shape
    matrix = jnp.where(np.eye(groups, dtype=bool)[:, None, :, None], blocks[:, :, None], 0)
    return matrix.reshape(groups * rows, groups * columns)
