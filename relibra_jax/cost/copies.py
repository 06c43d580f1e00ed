"""Seconds in which experts travel: replicas each micro-batch, residents each update, homes each batch.

What travels, and when:

    replicas   bfloat16 weights, for each layer and micro-batch, forward and again backward; then their gradients, in
               bfloat16 too. From the home, or from a resident of the same node (`relibra_jax.plan.copy_source`), as
               many as ranks give and take: what the ragged fetch of `relibra_jax.execution.replica_exchange` moves. The
               padded one moves every expert that a rank gives away once, in pieces, and then R experts to each rank
    residents  bfloat16 weights before an update, float32 gradients after it, by the way of
               `relibra_jax.resident_push`: an expert crosses once for every node that needs it, in pieces that all
               ranks of the home's node carry alike. Gradients take the same way back and are summed on it
    homes      float32 master weights and two Adam moments, once a batch (`relibra_jax.execution.migration`)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.cost.traffic import Traffic, count_experts, transfer_time
from relibra_jax.plan import copy_source, resident_experts
from relibra_jax.resident_push import push_counts
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
    """Residents' weights that ranks send and receive in one update, ``[L, N, G]``, in experts; gradients take the same
    way back. What only fills up buffers is not counted."""
    local, apart = topology.ranks_per_node, 1 - 1 / topology.ranks_per_node
    away = ~np.eye(topology.num_nodes, dtype=bool)

    def one(home: jax.Array, resident: jax.Array) -> Traffic:
        exports, pairs = push_counts(home[None], resident[None], topology)
        crossing = pairs * away / local
        there, here = (jnp.broadcast_to(crossing.sum(axis)[:, None], resident.shape[:2]) for axis in (1, 0))
        exports, taken = exports.reshape(resident.shape[:2]), (resident != EMPTY).sum(-1)
        # Pieces of its own experts to the others, then pieces of what the others take.
        sent = exports * apart + _of_others(taken) / local
        received = _of_others(exports) / local + taken * apart
        return Traffic(there, here, sent, received)

    return jax.vmap(one)(jnp.asarray(plan.home), jnp.asarray(resident_experts(plan, topology)))


def _of_others(counts: Int[jax.Array, "N G"]) -> Int[jax.Array, "N G"]:
    """What the other ranks of each rank's node have."""
    return counts.sum(1, keepdims=True) - counts


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
