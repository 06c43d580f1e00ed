"""The last resort against wrong plans: a layer that is run under one returns NaN, outputs and gradients.

Plans are checked on the host before a step (`relibra_jax.plan_check`, which says what is wrong and where). This is the
same, cheaply, inside the step and for one layer of one micro-batch, where the host's look was left out.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from relibra_jax.types import EMPTY, LayerPlan, Topology


def is_valid(plan: LayerPlan, topology: Topology, *, across_nodes: bool) -> Bool[jax.Array, ""]:
    """Whether a layer plan follows the rules of `relibra_jax.types.Plan` and adds up to its load.

    Args:
        plan: the plan of one layer of one micro-batch, with its load.
        topology: the expert-parallel group.
        across_nodes: whether replicas may be in nodes that hold their expert neither as home nor as resident.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> load = jnp.array([[[5, 2], [5, 2]]])
    >>> plan = LayerPlan(jnp.array([[[0, -1], [1, 0]]]), jnp.array([0, 1]), jnp.array([[[6, 0], [4, 4]]]), load)
    >>> bool(is_valid(plan, topology, across_nodes=False))
    True
    >>> bool(is_valid(plan._replace(home=jnp.array([1, 0])), topology, across_nodes=False))
    False
    """
    experts, homes, ranks = topology.num_experts, topology.home_slots, topology.num_ranks
    slots = plan.slot_expert.reshape(ranks, -1)
    quota, home = plan.quota.reshape(ranks, -1), plan.home
    known = ((home >= 0) & (home < experts)).all() & ((slots >= EMPTY) & (slots < experts)).all()

    # If the home slot that an expert names holds it, for all experts, no slot is named twice.
    layout = slots[:, :homes].ravel()
    at_home = (layout[jnp.clip(home, 0, experts - 1)] == jnp.arange(experts)).all()

    # Empty arrays of replicas are kept out of the compiled layer: Shardy crashes (jaxlib 0.11) where a scan's backward
    # pass hoists one out of the shard_map.
    placed = _copies_valid(slots, home, topology, across_nodes) if slots.shape[1] > homes else True

    load = jnp.asarray(plan.load)
    total = load.sum((0, 1), dtype=jnp.int32)
    most = jnp.where(slots == EMPTY, 0, total[jnp.maximum(slots, 0)])
    held = jnp.where(slots == EMPTY, experts, slots)
    planned = jnp.zeros(experts, jnp.int32).at[held].add(quota, mode="drop")
    exact = ((quota >= 0) & (quota <= most)).all() & (planned == total).all() & (load >= 0).all()
    return known & at_home & placed & exact


def _copies_valid(slots, home, topology: Topology, across_nodes: bool) -> jax.Array | bool:
    """Whether no rank holds an expert twice, and no replica is in a node that does not hold its expert."""
    homes, held, per_node = topology.home_slots, topology.held_slots, topology.ranks_per_node
    resident, replica = slots[:, homes:held], slots[:, held:]
    valid: jax.Array | bool = True
    if topology.resident_slots:
        valid &= _once_in_order(resident, home, topology)
    if not topology.replica_slots:
        return valid
    valid &= _once_in_order(replica, home, topology)
    if topology.resident_slots:
        valid &= ((replica[:, :, None] != resident[:, None]) | (resident[:, None] == EMPTY)).all()
    if across_nodes:
        return valid
    node = jnp.arange(topology.num_ranks)[:, None] // per_node
    near = (replica == EMPTY) | (home[jnp.maximum(replica, 0)] // (homes * per_node) == node)
    if topology.resident_slots:
        experts = topology.num_experts
        holds = jnp.zeros((topology.num_nodes, experts), bool)
        holds = holds.at[node, jnp.where(resident == EMPTY, experts, resident)].set(True, mode="drop")
        near |= holds[node, jnp.maximum(replica, 0)]
    return valid & near.all()


def _once_in_order(copies, home, topology: Topology) -> jax.Array:
    """Whether residents, or replicas, are in their order, none of them twice or beside its own home on a rank."""
    # Home slots that ascend along a rank rule out an expert that is held twice, but for its own home.
    source = jnp.where(copies == EMPTY, topology.num_experts, home[jnp.maximum(copies, 0)])
    once = (source // topology.home_slots != jnp.arange(topology.num_ranks)[:, None]).all()
    if copies.shape[1] > 1:
        once &= ((source[:, :-1] < source[:, 1:]) | (source[:, 1:] == topology.num_experts)).all()
    return once


def one_or_nan(sound: Bool[jax.Array, ""], like: jax.Array) -> jax.Array:
    """A factor in the dtype of ``like``: 1, or NaN where something is not sound. Unlike a choice, it makes the
    gradients NaN too."""
    return jnp.where(sound, 1, jnp.nan).astype(like.dtype)
