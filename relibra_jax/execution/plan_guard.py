"""The last check against invalid plans, inside the step: a layer with an invalid plan has NaN outputs and gradients.

The host checks plans before a step (`relibra_jax.contract.check`, which says what is wrong and where). In case a caller
skips that check, this module checks the same rules cheaply for one layer of one micro-batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from relibra_jax.contract.types import EMPTY, LayerPlan, Topology


def is_valid(plan: LayerPlan, topology: Topology, *, across_nodes: bool) -> Bool[jax.Array, ""]:
    """Return whether a layer plan follows the rules of `relibra_jax.contract.types.Plan` and its quotas add up to its
    load.

    Args:
        plan: the plan of one layer of one micro-batch, with its load.
        topology: the expert-parallel group.
        across_nodes: whether replicas may be on nodes that have their expert neither at home nor as a resident.

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
    in_range = ((home >= 0) & (home < experts)).all() & ((slots >= EMPTY) & (slots < experts)).all()

    # If every expert is in the home slot that ``home`` gives for it, no two experts have the same home slot.
    layout = slots[:, :homes].ravel()
    homes_valid = (layout[jnp.clip(home, 0, experts - 1)] == jnp.arange(experts)).all()

    # Empty arrays of replicas must stay out of the compiled layer: Shardy crashes (jaxlib 0.11) if a scan's backward
    # pass hoists one out of the shard_map.
    others_valid = _others_valid(slots, home, topology, across_nodes) if slots.shape[1] > homes else True

    load = jnp.asarray(plan.load)
    total = load.sum((0, 1), dtype=jnp.int32)
    largest = jnp.where(slots == EMPTY, 0, total[jnp.maximum(slots, 0)])
    expert = jnp.where(slots == EMPTY, experts, slots)
    quota_sum = jnp.zeros(experts, jnp.int32).at[expert].add(quota, mode="drop")
    quotas_valid = ((quota >= 0) & (quota <= largest)).all() & (quota_sum == total).all() & (load >= 0).all()
    return in_range & homes_valid & others_valid & quotas_valid


def _others_valid(slots, home, topology: Topology, across_nodes: bool) -> jax.Array | bool:
    """Check residents and replicas: no rank has an expert twice, and every replica is on a node with its expert."""
    homes, held_slots, per_node = topology.home_slots, topology.held_slots, topology.ranks_per_node
    resident, replica = slots[:, homes:held_slots], slots[:, held_slots:]
    valid: jax.Array | bool = True
    if topology.resident_slots:
        valid &= _ordered_and_unique(resident, home, topology)
    if not topology.replica_slots:
        return valid
    valid &= _ordered_and_unique(replica, home, topology)
    if topology.resident_slots:
        valid &= ((replica[:, :, None] != resident[:, None]) | (resident[:, None] == EMPTY)).all()
    if across_nodes:
        return valid
    node = jnp.arange(topology.num_ranks)[:, None] // per_node
    on_node = (replica == EMPTY) | (home[jnp.maximum(replica, 0)] // (homes * per_node) == node)
    if topology.resident_slots:
        experts = topology.num_experts
        node_experts = jnp.zeros((topology.num_nodes, experts), bool)
        node_experts = node_experts.at[node, jnp.where(resident == EMPTY, experts, resident)].set(
            True, mode="drop"
        )
        on_node |= node_experts[node, jnp.maximum(replica, 0)]
    return valid & on_node.all()


def _ordered_and_unique(experts, home, topology: Topology) -> jax.Array:
    """Return whether a rank's residents (or replicas) are in order, without duplicates, and at home elsewhere."""
    # If the home slots of the experts ascend along a rank, no expert is twice among them.
    source = jnp.where(experts == EMPTY, topology.num_experts, home[jnp.maximum(experts, 0)])
    valid = (source // topology.home_slots != jnp.arange(topology.num_ranks)[:, None]).all()
    if experts.shape[1] > 1:
        valid &= ((source[:, :-1] < source[:, 1:]) | (source[:, 1:] == topology.num_experts)).all()
    return valid


def one_or_nan(valid: Bool[jax.Array, ""], like: jax.Array) -> jax.Array:
    """Return a factor in the dtype of ``like``: 1 if ``valid`` is true, else NaN.

    Unlike `jnp.where` on the outputs, the factor makes the gradients NaN too.
    """
    return jnp.where(valid, 1, jnp.nan).astype(like.dtype)
