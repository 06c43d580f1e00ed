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
        across_nodes: whether replicas may be on other nodes than their experts' homes.

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
    placed = (
        _replicas_valid(slots[:, homes:], home, topology, across_nodes) if slots.shape[1] > homes else True
    )

    load = jnp.asarray(plan.load)
    total = load.sum((0, 1), dtype=jnp.int32)
    most = jnp.where(slots == EMPTY, 0, total[jnp.maximum(slots, 0)])
    held = jnp.where(slots == EMPTY, experts, slots)
    planned = jnp.zeros(experts, jnp.int32).at[held].add(quota, mode="drop")
    exact = ((quota >= 0) & (quota <= most)).all() & (planned == total).all() & (load >= 0).all()
    return known & at_home & placed & exact


def _replicas_valid(replica, home, topology: Topology, across_nodes: bool) -> jax.Array:
    """Whether no rank holds an expert twice, and no replica is farther from home than it may."""
    experts, homes, per_node = topology.num_experts, topology.home_slots, topology.ranks_per_node
    # Home slots that ascend along a rank's replicas rule out an expert that is held twice, but for its own home.
    rank = jnp.arange(topology.num_ranks)[:, None]
    source = jnp.where(replica == EMPTY, experts, home[jnp.maximum(replica, 0)])
    once = (source // homes != rank).all()
    if replica.shape[1] > 1:
        once &= ((source[:, :-1] < source[:, 1:]) | (source[:, 1:] == experts)).all()
    if across_nodes:
        return once
    return once & ((replica == EMPTY) | (source // (homes * per_node) == rank // per_node)).all()


def one_or_nan(sound: Bool[jax.Array, ""], like: jax.Array) -> jax.Array:
    """A factor in the dtype of ``like``: 1, or NaN where something is not sound. Unlike a choice, it makes the
    gradients NaN too."""
    return jnp.where(sound, 1, jnp.nan).astype(like.dtype)
