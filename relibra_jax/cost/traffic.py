"""Counts of what ranks send and receive over the slow network between nodes and over the fast network inside them.

The counts are of the rows of dispatch, from the plan alone (flat dispatch) or also from the replayed routes
(hierarchical dispatch), and of the experts that ranks send to each other. `count_traffic` counts the rows that are
needed, and `count_sent` those that the exchange sends. A padded exchange sends lanes that are all as long as the
longest of any layer and micro-batch, with the spare room of its buffers. A fitted exchange sends as much of them as the
longest lane of the layer and micro-batch needs, or with pieces as much of all lanes as the longest of any hop needs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from relibra_jax.contract.types import Array, LayerPlan, Price, Topology, check_shape, visited_ranks
from relibra_jax.routing.exchange_rules import IN_LANES, between_nodes
from relibra_jax.routing.lane_lengths import sent_lanes
from relibra_jax.routing.sizes import layer_sixteenths, padded_rows
from relibra_jax.routing.split import pair_load


class Traffic(NamedTuple):
    """The numbers of rows or experts that each rank sends and receives."""

    slow_sent: Num[Array, "*stack N G"]
    """Sent to other nodes."""
    slow_received: Num[Array, "*stack N G"]
    """Received from other nodes."""
    fast_sent: Num[Array, "*stack N G"]
    """Sent to other ranks of the node."""
    fast_received: Num[Array, "*stack N G"]
    """Received from other ranks of the node."""


class Sent(NamedTuple):
    """The rows that the exchanges of dispatch send as they run; combine sends as many back."""

    between: Float[Array, "*stack N G"]
    """Rows that a rank sends or receives between nodes, whichever is more."""
    inside: Float[Array, "*stack N G"]
    """Rows that a rank sends or receives inside its node, whichever is more."""
    gathered: Float[Array, "*stack N G"]
    """Rows that gathers and sums read or write for an exchange, averaged over dispatch and combine: the rows of tokens
    and slots that they read, and the buffers that they write. Exchanges read and write buffers while they send. The
    sums of a rank's own tokens, one row for K copies, are left out."""


def count_experts(
    source: Int[Array, "*places"],
    target: Int[Array, "*places"],
    moved: Bool[Array, "*places"],
    topology: Topology,
) -> Traffic:
    """Count the experts that ranks send and receive.

    Args:
        source: the flat rank that sends each expert.
        target: the flat rank that receives each expert.
        moved: True for experts that are moved, False for entries to ignore. An expert whose source and target are the
            same rank does not count.
        topology: the expert-parallel group.

    Returns:
        Traffic ``[N, G]`` in experts.

    >>> topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> count_experts(jnp.array([0, 0, 1]), jnp.array([1, 2, 1]), jnp.ones(3, bool), topology).slow_sent.tolist()
    [[1, 0], [0, 0]]
    """
    same_node = source // topology.ranks_per_node == target // topology.ranks_per_node
    shape = (topology.num_nodes, topology.ranks_per_node)

    def by_rank(ranks, counted):
        return (
            jnp.zeros(topology.num_ranks, jnp.int32).at[ranks].add(counted.astype(jnp.int32)).reshape(shape)
        )

    away, near = moved & ~same_node, moved & same_node & (source != target)
    return Traffic(by_rank(source, away), by_rank(target, away), by_rank(source, near), by_rank(target, near))


def busier_way(
    traffic: Traffic, *, shared_link: bool
) -> tuple[Float[jax.Array, "*stack N G"], Float[jax.Array, "*stack N G"]]:
    """Return what each rank sends or receives, whichever is more, over the slow and over the fast network.

    Args:
        traffic: the numbers of rows or experts that each rank sends and receives.
        shared_link: True if the ranks of a node share one link to other nodes: the slow network then takes as long for
            each of them as for the mean of the node.
    """
    slow_sent, slow_received, fast_sent, fast_received = (jnp.asarray(way, jnp.float32) for way in traffic)
    if shared_link:
        slow_sent, slow_received = (
            jnp.broadcast_to(way.mean(-1, keepdims=True), way.shape) for way in (slow_sent, slow_received)
        )
    return jnp.maximum(slow_sent, slow_received), jnp.maximum(fast_sent, fast_received)


@functools.partial(jax.jit, static_argnames="topology")
def count_traffic(
    layer_plans: LayerPlan,
    topology: Topology,
    *,
    visits: Int[Array, "M L P V"] | None = None,
) -> Traffic:
    """Count the rows that ranks need to exchange at dispatch, without padding; combine needs as many back.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``.
        topology: the expert-parallel group.
        visits: the counts of `relibra_jax.routing.visits.node_visits` for hierarchical dispatch, where a token crosses
            once to a node, to the rank with the same local index, and its copies are distributed inside that node. On
            a single node it is sent once to a rank. None for flat dispatch, where every token copy is sent by itself.

    Returns:
        Traffic ``[M, L, N, G]`` in token copies; in tokens over the slow network of hierarchical dispatch, and inside
        a single node.

    Raises:
        ValueError: if the shape of ``visits`` does not fit the plans.
    """
    pairs = _count_pairs(jax.tree.map(jnp.asarray, layer_plans), topology)
    if visits is None:
        return _flat_traffic(pairs)
    traffic = _hierarchical_traffic(_on_grid(pairs, topology.visited), visits, topology.visited)
    if topology.num_nodes > 1:
        return traffic
    sent, received = (visited_ranks(way, topology, axis=2) for way in traffic[:2])
    return Traffic(jnp.zeros_like(sent), jnp.zeros_like(sent), sent, received)


@functools.partial(jax.jit, static_argnames="topology")
def count_sent(
    layer_plans: LayerPlan,
    topology: Topology,
    cost: Price,
    *,
    visits: Num[Array, "M L P V"] | None = None,
    pairs: Num[Array, "M L N G N G"] | None = None,
) -> Sent:
    """Count the rows that the exchanges of dispatch send as they run.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``: all that one compiled step runs, whose buffers
            have the sizes of the fullest.
        topology: the expert-parallel group.
        cost: the kinds of the exchanges, and the number of rows for which one counted row stands.
        visits: the tokens that each rank sends to each node, for hierarchical dispatch; None for flat dispatch.
        pairs: an estimate of the token copies that each rank sends to each rank. None counts them.

    Returns:
        The rows ``[M, L, N, G]``, in the unit of the plans.

    Raises:
        ValueError: if ``visits`` does not fit the plans or the path.
    """
    if (visits is None) == cost.hierarchical:
        expected = "visits of nodes" if cost.hierarchical else "no visits"
        raise ValueError(f"cost has hierarchical={cost.hierarchical}, which needs {expected}")
    plans = jax.tree.map(jnp.asarray, layer_plans)

    def room(rows: Array) -> jax.Array:
        """Return the buffer for the most rows of any rank, layer and micro-batch."""
        return padded_rows(jnp.max(rows) * cost.scale, spare_room=cost.spare_room) / cost.scale

    sent = _count_pairs(plans, topology) if pairs is None else jnp.asarray(pairs)
    if visits is None:
        return _flat_sent(plans, topology, cost, room, sent)
    visited = topology.visited
    across = _hierarchical_sent(plans, visited, cost, room, _on_grid(sent, visited), visits)
    if topology.num_nodes > 1:
        return across
    inside, gathered = (visited_ranks(each, topology, axis=2) for each in (across.between, across.gathered))
    return Sent(jnp.zeros_like(inside), inside, gathered)


def _flat_sent(
    plans: LayerPlan, topology: Topology, cost: Price, room: Callable[[Array], jax.Array], pairs: jax.Array
) -> Sent:
    ranks, local = topology.num_ranks, topology.ranks_per_node
    slots, shape = room(plans.quota.sum(-1)), plans.quota.shape[:-1]
    leaving, arriving = pairs.sum((4, 5)), pairs.sum((2, 3))
    if cost.exchange not in IN_LANES:
        slow, fast = busier_way(_flat_traffic(pairs), shared_link=cost.shared_link)
        return Sent(slow, fast, leaving + room(leaving) / 2)
    (lane,) = _lanes(cost, [_flat_lanes(pairs, topology)], room)
    kept = pairs.reshape(*shape[:2], ranks, ranks).diagonal(axis1=2, axis2=3).reshape(shape)
    gathered = ranks * lane + leaving + arriving - kept + slots / 2
    return Sent(
        *(jnp.broadcast_to(rows, shape) for rows in ((ranks - local) * lane, (local - 1) * lane, gathered))
    )


def _hierarchical_sent(
    plans: LayerPlan,
    topology: Topology,
    cost: Price,
    room: Callable[[Array], jax.Array],
    pairs: jax.Array,
    visits: Num[Array, "M L P V"],
) -> Sent:
    nodes, local = topology.num_nodes, topology.ranks_per_node
    traffic = _hierarchical_traffic(pairs, visits, topology)
    slow, fast = busier_way(traffic, shared_link=cost.shared_link)
    by_node = jnp.asarray(visits).reshape(*slow.shape[:2], nodes, local, nodes)
    tokens, arriving = by_node.sum(4), jnp.moveaxis(by_node.sum(2), 2, 3)
    arrived = room(arriving)
    # The copies of arrived tokens, by the rank at which they arrived.
    copies = jnp.moveaxis(pairs.sum((2, 5)), 2, 3)
    if cost.exchange == "needed":
        buffers = traffic.slow_sent if local == 1 else (room(tokens) + arrived) / 2
        return Sent(slow, fast, tokens + buffers + copies + room(copies) / 2)
    lanes = _hierarchical_lanes(pairs, visits, topology)
    if cost.exchange == "ragged" or local == 1:
        kind = between_nodes(cost.exchange)
        (across,) = _lanes(dataclasses.replace(cost, exchange=kind), lanes[:1], room)
        # Rows that arrive are gathered once, and sums are written into the lanes between nodes and where they are kept.
        gathered = nodes * across + tokens + copies + room(copies) / 2
        return Sent(jnp.broadcast_to((nodes - 1) * across, slow.shape), fast, gathered)
    across, inside = _lanes(cost, lanes, room)
    slots = room(plans.quota.sum(-1))
    # Of the rows that leave and those that arrive, the kept ones are the same and are not packed.
    gathered = nodes * across + local * inside + arrived + slots / 2
    gathered += arriving + traffic.slow_sent + pairs.sum((2, 3)) + traffic.fast_sent
    return Sent(
        *(
            jnp.broadcast_to(each, slow.shape)
            for each in ((nodes - 1) * across, (local - 1) * inside, gathered)
        )
    )


def _lanes(
    cost: Price, longest: Sequence[Num[Array, "M L"]], room: Callable[[Array], jax.Array]
) -> list[Float[jax.Array, "M L 1 1"]]:
    """Return the lanes that padded or fitted exchanges send in each layer and micro-batch, for each hop.

    Pieces of tokens have equal parts of the lanes.
    """
    pairs = list(map(room, longest))
    if cost.exchange != "fitted":
        lanes = [jnp.broadcast_to(pair, each.shape) for each, pair in zip(longest, pairs, strict=True)]
    elif cost.pieces == 1:
        lanes = [sent_lanes(each.astype(jnp.float32)) for each in longest]
    else:
        scaled = ([cost.scale * each for each in sizes] for sizes in (longest, pairs))
        part = layer_sixteenths(*scaled) / 16
        lanes = [part * pair for pair in pairs]
    return [lane[..., None, None] for lane in lanes]


def _count_pairs(plans: LayerPlan, topology: Topology) -> Int[jax.Array, "M L N G N G"]:
    """Count the token copies that each rank sends to each rank."""
    shape = plans.quota.shape[:2]

    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), plans)
    pairs = jax.lax.map(functools.partial(pair_load, topology=topology), flat, batch_size=16)
    return _on_grid(pairs.reshape(*shape, -1), topology)


def _on_grid(pairs: Num[jax.Array, "M L *ranks"], topology: Topology) -> Num[jax.Array, "M L N G N G"]:
    """Return counts for pairs of ranks with the axes of a topology."""
    grid = (topology.num_nodes, topology.ranks_per_node)
    return pairs.reshape(*pairs.shape[:2], *grid, *grid)


def _hierarchical_traffic(pairs: Array, visits: Num[Array, "M L P V"], topology: Topology) -> Traffic:
    """Count the traffic of hierarchical dispatch from the copies that ranks send to ranks, and visits of nodes."""
    nodes, local = topology.num_nodes, topology.ranks_per_node
    check_shape("visits", visits.shape, (*pairs.shape[:2], topology.num_ranks, nodes))
    other_node = ~np.eye(nodes, dtype=bool)[None, None, :, None]
    other_local = ~np.eye(local, dtype=bool)[None, None, None, :, None]
    away = jnp.asarray(visits).reshape(*pairs.shape[:2], nodes, local, nodes) * other_node
    spread = pairs * other_local
    return Traffic(
        slow_sent=away.sum(4),
        slow_received=jnp.moveaxis(away.sum(2), 2, 3),
        fast_sent=jnp.moveaxis(spread.sum((2, 5)), 2, 3),
        fast_received=spread.sum((2, 3)),
    )


def _hierarchical_lanes(
    pairs: Array, visits: Num[Array, "M L P V"], topology: Topology
) -> tuple[Num[Array, "M L"], Num[Array, "M L"]]:
    """Return the most rows that one rank sends to a rank of another node, and inside its node."""
    nodes, local = topology.num_nodes, topology.ranks_per_node
    stays = np.repeat(np.eye(nodes, dtype=bool), local, 0)[None, None]
    between = jnp.where(stays, 0, jnp.asarray(visits)).max((2, 3))
    # A token crosses to the rank with the local index of its source: [local source, node, local].
    own = np.eye(local, dtype=bool)[None, None, :, None]
    return between, jnp.where(own, 0, pairs.sum(2)).max((2, 3, 4))


def _flat_lanes(pairs: Array, topology: Topology) -> Num[Array, "M L"]:
    """Return the most rows that one rank sends to another."""
    ranks = topology.num_ranks
    flat, own = pairs.reshape(*pairs.shape[:2], ranks, ranks), np.eye(ranks, dtype=bool)[None, None]
    return jnp.where(own, 0, flat).max((2, 3))


def _flat_traffic(pairs: Num[Array, "M L N G N G"]) -> Traffic:
    """Count the traffic of flat dispatch from the copies that ranks send to ranks."""
    nodes, local = pairs.shape[2:4]
    same_node = np.eye(nodes, dtype=bool)[None, None, :, None, :, None]
    same_rank = np.eye(local, dtype=bool)[None, None, None, :, None, :]
    away, near = jnp.where(same_node, 0, pairs), jnp.where(same_node & ~same_rank, pairs, 0)
    return Traffic(away.sum((4, 5)), away.sum((2, 3)), near.sum((4, 5)), near.sum((2, 3)))
