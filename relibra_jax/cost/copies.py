"""Modelled seconds of the transfers of experts: replicas per micro-batch, residents per update, homes per batch.

What is transferred, and when:

    replicas   bfloat16 weights, for each layer and micro-batch, in the forward and again in the backward pass; then
               their gradients, also in bfloat16. The source is the home, or a resident of the same node
               (`relibra_jax.plan.copy_source`). Counted are the experts that the ragged fetch of
               `relibra_jax.execution.replica_exchange` moves. The padded fetch instead moves every exported expert
               once, in pieces, and then R experts to each rank
    residents  bfloat16 weights before an update, float32 gradients after it, on the route of
               `relibra_jax.resident_push`: an expert crosses once for every node that needs it, in pieces of equal size
               that all ranks of the home's node send. Gradients take the same route back and are summed on the way
    homes      float32 master weights and two Adam moments, once per batch (`relibra_jax.execution.migration`)
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

WEIGHT_BYTES = 2
"""Bytes of one weight in computation, and of one gradient of a replica: bfloat16."""
ACCUMULATOR_BYTES = 4
"""Bytes of one gradient that is summed over micro-batches: float32."""
STATE_BYTES = 12
"""Bytes of one parameter that changes home: a float32 master weight and two float32 Adam moments."""
RESIDENT_BYTES = WEIGHT_BYTES + ACCUMULATOR_BYTES
"""Bytes that one parameter of a resident transfers in one update: its weight and its gradient."""


def push_time(
    layer_plans: LayerPlan, topology: Topology, *, cluster: Cluster, model: Model
) -> Float[jax.Array, "M L N G"]:
    """Model the seconds in which each rank sends and receives the replicas of a layer, once in a forward pass.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``. The load is not read.
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
    """Model the seconds in which residents' weights are sent and their gradients returned, for all layers together.

    No computation hides these transfers: weights are sent before the first micro-batch of an update, and gradients are
    returned after its last one.

    Args:
        plan: the plan of a batch.
        topology: the expert-parallel group.
        cluster: the hardware.
        model: the sizes of the model.
        updates: the number of optimizer updates of the batch, each of which sends weights and returns gradients.
    """
    traffic = jax.tree.map(lambda leaf: leaf.sum(0), resident_traffic(plan, topology))
    return updates * transfer_time(traffic, float(RESIDENT_BYTES * model.expert_params), cluster).max()


def resident_traffic(plan: Plan, topology: Topology) -> Traffic:
    """Count the residents' weights that ranks send and receive in one update, ``[L, N, G]``, in experts.

    Gradients take the same route back. The padding of buffers is not counted.
    """
    local, apart = topology.ranks_per_node, 1 - 1 / topology.ranks_per_node
    away = ~np.eye(topology.num_nodes, dtype=bool)

    def one(home: jax.Array, resident: jax.Array) -> Traffic:
        exports, pairs = push_counts(home[None], resident[None], topology)
        crossing = pairs * away / local
        away_sent, away_received = (
            jnp.broadcast_to(crossing.sum(axis)[:, None], resident.shape[:2]) for axis in (1, 0)
        )
        exports, residents = exports.reshape(resident.shape[:2]), (resident != EMPTY).sum(-1)
        # Inside a node, a rank sends pieces of its own experts to the others, and then pieces of the others' residents.
        sent = exports * apart + _sum_over_others(residents) / local
        received = _sum_over_others(exports) / local + residents * apart
        return Traffic(away_sent, away_received, sent, received)

    return jax.vmap(one)(jnp.asarray(plan.home), jnp.asarray(resident_experts(plan, topology)))


def _sum_over_others(counts: Int[jax.Array, "N G"]) -> Int[jax.Array, "N G"]:
    """Sum the counts of the other ranks of each rank's node."""
    return counts.sum(1, keepdims=True) - counts


def reorder_time(
    home: Int[Array, "L E"],
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
) -> Float[jax.Array, ""]:
    """Model the seconds to move experts with their optimizer state to new homes, once per batch, for all layers.

    Args:
        home: flat home slot of each expert in this batch.
        previous_home: flat home slot of each expert before this batch.
        topology: the expert-parallel group.
        cluster: the hardware.
        model: the sizes of the model.
    """
    source, target = (jnp.asarray(slots) // topology.home_slots for slots in (previous_home, home))
    traffic = count_experts(source, target, jnp.ones(home.shape, bool), topology)
    return transfer_time(traffic, float(STATE_BYTES * model.expert_params), cluster).max()


def _own_rank(topology: Topology) -> Int[jax.Array, "N G 1"]:
    """Return the flat rank of every slot, ``[N, G, 1]``."""
    ranks = jnp.arange(topology.num_ranks)
    return ranks.reshape(topology.num_nodes, topology.ranks_per_node, 1)
