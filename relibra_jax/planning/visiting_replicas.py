"""Replicas on other nodes: experts that visit a node for one micro-batch.

A replica inside a node evens out its ranks. A replica on another node also keeps tokens there that would cross, like a
resident that stays for one micro-batch, but its weights cross in every pass. While attention hides that transfer it
costs nothing, as LAER-MoE (arXiv 2602.11686) uses it. So some of the slots of every rank may hold *visiting* experts of
other nodes, those that save the most crossings, and the remaining slots even out the ranks.
`relibra_jax.planning.replicate_for_time` chooses where and how many.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.contract.plan import assemble_plan
from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Plan, Topology
from relibra_jax.planning.greedy_replication import replicate_domain
from relibra_jax.planning.node_split import split_nodes
from relibra_jax.planning.per_node import home_slots_of, plan_per_node_with_residents
from relibra_jax.planning.residents import choose_residents, nodes_holding, residents_on_ranks


def replicate_with_visitors(
    request: PlanRequest,
    placement: Placement,
    topology: Topology,
    *,
    visitors: int,
    **options: Any,
) -> Plan:
    """Let each rank hold a number of experts of other nodes for one micro-batch, and even out ranks with other slots.

    Args:
        request: the request, of which only the load is used.
        placement: the homes and residents.
        topology: the expert-parallel group.
        visitors: the number of replica slots of a rank for experts of other nodes, 1 to R.
        **options: ``min_tokens``, ``tile`` and ``exact``, as for
            `relibra_jax.planning.replication.replicate_experts`.

    Returns:
        A Plan. A visitor without tokens leaves its slot EMPTY.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=1)
    >>> load = jnp.array([[[[[8, 0]], [[8, 4]]]]])
    >>> placement = Placement.without_residents(jnp.array([[0, 1]]), topology)
    >>> plan = replicate_with_visitors(PlanRequest(load), placement, topology, visitors=1)
    >>> plan.slot_expert.tolist(), plan.quota.tolist()
    ([[[[[0, -1]], [[1, 0]]]]], [[[[[10, 0]], [[4, 6]]]]])
    """
    by_node = request.by_node
    micro_batches, layers, nodes, experts = by_node.shape
    stack = micro_batches * layers
    held = nodes_holding(placement, topology)  # [L N E]
    home_node = jnp.asarray(placement.home) // (experts // nodes)

    def of_all(leaf: Array) -> jax.Array:
        """Repeat an array of layers for every micro-batch, ``[M*L, ...]``."""
        leaf = jnp.asarray(leaf)
        return jnp.broadcast_to(leaf[None], (micro_batches, *leaf.shape)).reshape(stack, *leaf.shape[1:])

    home, resident = of_all(placement.home), of_all(placement.resident)
    load = by_node.reshape(stack, nodes, experts)
    wider = dataclasses.replace(
        topology,
        replica_slots=topology.replica_slots - visitors,
        resident_slots=topology.resident_slots + visitors,
    )
    chosen = _choose_visitors(load, of_all(held), of_all(home_node), topology, visitors)
    only_visitors = dataclasses.replace(topology, resident_slots=visitors)
    copies = jnp.moveaxis(load, 0, -1).astype(jnp.float32)
    visiting = residents_on_ranks(chosen, copies, copies.sum(0), home, only_visitors)
    held_experts = jnp.concatenate([resident, visiting], axis=-1)
    holds = nodes_holding(Placement(home, held_experts), wider)
    load = jax.vmap(split_nodes)(load, holds, of_all(home_node))
    replicate = functools.partial(replicate_domain, replica_slots=wider.replica_slots, **options)
    plan = plan_per_node_with_residents(replicate, load[None], home, held_experts, wider)
    return _as_replicas(plan, placement, topology, micro_batches)


def _choose_visitors(
    load: Int[jax.Array, "stack N E"],
    held: Bool[jax.Array, "stack N E"],
    home_node: Int[jax.Array, "stack E"],
    topology: Topology,
    visitors: int,
) -> Bool[jax.Array, "N E stack"]:
    """Choose the experts of other nodes whose copies save each node most, as residents of loads are chosen."""
    copies = jnp.moveaxis(jnp.where(held, 0, load), 0, -1).astype(jnp.float32)
    count = topology.ranks_per_node * visitors
    return choose_residents(None, copies, home_node.T, crossing=1.0, push=0.0, count=count)


def _as_replicas(plan: Plan, placement: Placement, topology: Topology, micro_batches: int) -> Plan:
    """Turn visitors, which were planned as residents, into replicas, and drop those without tokens."""
    homes, layers = topology.home_slots, len(placement.home)
    shape = (micro_batches, layers, topology.num_nodes, topology.ranks_per_node, -1)
    slots, quota = (each.reshape(shape) for each in (plan.slot_expert, plan.quota))
    copies, copied = slots[..., homes:], quota[..., homes:]
    resident = jnp.asarray(placement.resident)
    same = (copies[..., :, None] == resident[None, ..., None, :]) & (copies != EMPTY)[..., None]
    at_resident = jnp.where(same, copied[..., None], 0).sum(-2)
    dropped = same.any(-1) | (copied == 0) | (copies == EMPTY)

    home = jnp.asarray(placement.home)
    replica = jax.vmap(home_slots_of, (0, 1), 1)(home, jnp.where(dropped, EMPTY, copies))
    # A rank has at most R copies that are not residents; they come first.
    key = jnp.where(dropped, topology.num_experts, replica)
    key, at_replica = jax.lax.sort((key, jnp.where(dropped, 0, copied)), num_keys=1)
    first = slice(0, topology.replica_slots)
    replica = jnp.where(key == topology.num_experts, EMPTY, key)[..., first]
    quota = jnp.concatenate([quota[..., :homes], at_resident, at_replica[..., first]], axis=-1)
    resident = jax.vmap(home_slots_of)(home, resident)
    return assemble_plan(home, replica, quota, topology, resident=resident)
