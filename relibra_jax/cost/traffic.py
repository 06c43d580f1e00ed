"""Counts of what ranks send and receive over the slow network between nodes and over the fast network inside them.

The counts are of the rows of dispatch, from the plan alone (flat dispatch) or also from the replayed routes
(hierarchical dispatch), and of the experts that ranks send to each other. `transfer_time` converts counts to seconds.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from relibra_jax.cost.hardware import Cluster
from relibra_jax.token_split import line_starts, source_quota
from relibra_jax.types import EMPTY, Array, LayerPlan, Topology, check_shape


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


def transfer_time(
    traffic: Traffic, size: Float[Array, ""] | float, cluster: Cluster
) -> Float[jax.Array, "*stack N G"]:
    """Model the seconds for which the links of each rank are busy.

    A rank sends and receives at the same time, and both networks work at the same time. If the ranks of a node share
    their link to other nodes, each of them waits until the link has transferred the data of all.

    Args:
        traffic: the numbers of rows or experts that each rank sends and receives.
        size: the size of one row or expert in bytes.
        cluster: the hardware.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> slow, none = jnp.array([[8, 0]]), jnp.zeros((1, 2))
    >>> for name in ("h100", "h100-ethernet-200"):
    ...     seconds = transfer_time(Traffic(slow, none, none, none), 1e9, CLUSTERS[name])
    ...     print(*(f"{each:.1f}" for each in seconds.ravel()))
    0.2 0.0
    1.6 1.6
    """
    slow = jnp.stack([jnp.asarray(traffic.slow_sent), jnp.asarray(traffic.slow_received)])
    if cluster.shared_link:
        slow = jnp.broadcast_to(slow.mean(-1, keepdims=True), slow.shape)
    fast = jnp.maximum(traffic.fast_sent, traffic.fast_received)
    seconds = jnp.maximum(
        slow.max(0) * (size / cluster.slow_bandwidth), fast * (size / cluster.fast_bandwidth)
    )
    return seconds / cluster.network_efficiency


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


def count_traffic(
    layer_plans: LayerPlan,
    topology: Topology,
    *,
    visits: Int[Array, "M L P N"] | None = None,
) -> Traffic:
    """Count the rows that ranks exchange at dispatch; combine moves the same rows back.

    The padding of buffers is not counted, because the ragged exchange does not send it.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``.
        topology: the expert-parallel group.
        visits: the counts of `relibra_jax.node_visits.node_visits` for hierarchical dispatch, where a token crosses
            once to a node, to the rank with the same local index, and its copies are distributed inside that node. None
            for flat dispatch, where every token copy is sent by itself.

    Returns:
        Traffic ``[M, L, N, G]`` in token copies; over the slow network of hierarchical dispatch, in tokens.

    Raises:
        ValueError: if the shape of ``visits`` does not fit the plans.
    """
    plans = jax.tree.map(jnp.asarray, layer_plans)
    if visits is None:
        return jax.vmap(jax.vmap(functools.partial(_flat_traffic, topology=topology)))(plans)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    shape = plans.quota.shape[:2]
    check_shape("visits", visits.shape, (*shape, topology.num_ranks, nodes))

    def one(plan: LayerPlan) -> jax.Array:
        return source_quota(plan, topology).sum(-1).reshape(nodes, local, nodes, local)

    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), plans)
    sent = jax.lax.map(one, flat, batch_size=32)
    other_node = ~np.eye(nodes, dtype=bool)[None, :, None]
    other_local = ~np.eye(local, dtype=bool)[None, None, :, None, :]
    away = jnp.asarray(visits).reshape(-1, nodes, local, nodes) * other_node
    spread = sent * other_local
    counts = Traffic(
        slow_sent=away.sum(3),
        slow_received=jnp.moveaxis(away.sum(1), 1, 2),
        fast_sent=jnp.moveaxis(spread.sum((1, 4)), 1, 2),
        fast_received=spread.sum((1, 2)),
    )
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, nodes, local), counts)


def _flat_traffic(plan: LayerPlan, *, topology: Topology) -> Traffic:
    """Count the traffic of flat dispatch in one layer of one micro-batch.

    It follows from the supply and demand that each round of the token split leaves unmatched.
    """
    load = jnp.asarray(plan.load)
    ranks, (nodes, local) = topology.num_ranks, load.shape[:2]
    slot_expert = jnp.where(plan.slot_expert == EMPTY, 0, plan.slot_expert).reshape(ranks, -1)
    supply = load.reshape(ranks, -1)
    demand = (
        jnp.zeros_like(supply).at[jnp.arange(ranks)[:, None], slot_expert].add(plan.quota.reshape(ranks, -1))
    )
    own = jnp.minimum(supply, demand)
    supply_left, demand_left = ((side - own).reshape(nodes, local, -1) for side in (supply, demand))

    def in_node(side, other):
        return jnp.clip(other.sum(1, keepdims=True) - line_starts(side), 0, side)

    fast_sent, fast_received = in_node(supply_left, demand_left), in_node(demand_left, supply_left)
    return Traffic(
        *(
            rows.sum(-1)
            for rows in (supply_left - fast_sent, demand_left - fast_received, fast_sent, fast_received)
        )
    )
