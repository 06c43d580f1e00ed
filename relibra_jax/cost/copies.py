"""Seconds in which experts travel: replicas each micro-batch, residents each update, homes each batch.

What travels, and when:

    replicas   bfloat16 weights, for each layer and micro-batch, forward and again backward; then their gradients, in
               bfloat16 too. From the home, or from a resident of the same node (`relibra_jax.plan.copy_source`), by
               the ragged fetch of `relibra_jax.execution.replica_exchange`; its reduce-scatter moves R slots from
               each rank of the node to each other one, filled or not, and takes longer
    residents  bfloat16 weights before an update, float32 gradients after it. Each home sends an expert once to each
               other node that holds it, to the first of its ranks that do; that one sends it on inside the node.
               Gradients take the same way back and are summed on it
    homes      float32 master weights and two Adam moments, once a batch (`relibra_jax.execution.migration`)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.cost.traffic import Traffic, count_experts, transfer_time
from relibra_jax.plan import copy_source, resident_experts
from relibra_jax.types import EMPTY, Array, LayerPlan, Plan, Topology

WEIGHT_BYTES = 2  # bfloat16, of weights that are computed with, and of a replica's gradient
ACCUMULATOR_BYTES = 4  # float32, of gradients summed over micro-batches
STATE_BYTES = 12  # a parameter that changes home: float32 master weight and two Adam moments
RESIDENT_BYTES = (
    WEIGHT_BYTES + ACCUMULATOR_BYTES
)  # of a resident's parameter, pushed and returned, in one update


def push_time(
    layer_plans: LayerPlan, topology: Topology, *, cluster: Cluster, model: Model
) -> Float[jax.Array, "M L N G"]:
    """Seconds in which each rank gives and takes its layer's replicas, which the forward pass does once.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``; the load is not read.
        topology: the expert-parallel group.
        cluster: the hardware.
        model: the sizes of the model.
    """

    def one(plan: LayerPlan) -> Traffic:
        source = copy_source(plan, topology)
        target = jnp.broadcast_to(_own_rank(topology), source.shape)
        return count_experts(source // topology.held_slots, target, source != EMPTY, topology)

    traffic = jax.vmap(jax.vmap(one))(jax.tree.map(jnp.asarray, layer_plans))
    return transfer_time(traffic, float(WEIGHT_BYTES * model.expert_params), cluster)


def resident_time(
    plan: Plan, topology: Topology, *, cluster: Cluster, model: Model, updates: int
) -> Float[jax.Array, ""]:
    """Seconds in which residents' weights are pushed and their gradients returned, all layers together.

    Nothing hides it: weights travel before the first micro-batch of an update, gradients after its last.

    Args:
        plan: the plan of a batch.
        topology: the expert-parallel group.
        cluster: the hardware.
        model: the sizes of the model.
        updates: the optimizer updates of the batch, each of which pushes and returns.
    """
    traffic = jax.tree.map(lambda leaf: leaf.sum(0), resident_traffic(plan, topology))
    return updates * transfer_time(traffic, float(RESIDENT_BYTES * model.expert_params), cluster).max()


def resident_traffic(plan: Plan, topology: Topology) -> Traffic:
    """Residents' weights that ranks send and receive in one update, ``[L, N, G]``; gradients take the same way back."""
    own = _own_rank(topology)
    node = own // topology.ranks_per_node

    def one(resident: jax.Array, home: jax.Array) -> Traffic:
        held = jnp.where(resident == EMPTY, topology.num_experts, resident)
        first = jnp.full((topology.num_nodes, topology.num_experts + 1), topology.num_ranks)
        first = first.at[node, held].min(jnp.broadcast_to(own, held.shape))[node, held]
        owner = home[jnp.maximum(resident, 0)] // topology.home_slots
        from_home = (owner // topology.ranks_per_node == node) | (first == own)
        source = jnp.where(from_home, owner, first)
        target = jnp.broadcast_to(own, held.shape)
        return count_experts(source, target, resident != EMPTY, topology)

    return jax.vmap(one)(jnp.asarray(resident_experts(plan, topology)), jnp.asarray(plan.home))


def reorder_time(
    home: Int[Array, "L E"],
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
) -> Float[jax.Array, ""]:
    """Seconds to move experts with their optimizer state to new homes, once a batch, all layers together.

    Args:
        home: flat home slot of each expert in this batch.
        previous_home: the same before it.
        topology: the expert-parallel group.
        cluster: the hardware.
        model: the sizes of the model.
    """
    source, target = (jnp.asarray(slots) // topology.home_slots for slots in (previous_home, home))
    traffic = count_experts(source, target, jnp.ones(home.shape, bool), topology)
    return transfer_time(traffic, float(STATE_BYTES * model.expert_params), cluster).max()


def _own_rank(topology: Topology) -> Int[jax.Array, "N G 1"]:
    """The flat rank of every slot."""
    ranks = jnp.arange(topology.num_ranks)
    return ranks.reshape(topology.num_nodes, topology.ranks_per_node, 1)
