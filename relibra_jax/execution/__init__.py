"""Execution of plans: expert parallelism over a device mesh with a node and a local axis.

The precision of every array is set in few places:

=========================  ============================  =====================================================
what                       dtype                         where it is set
=========================  ============================  =====================================================
master weights             float32                       ``MoELayer(param_dtype=)``; the experts that the caller casts
                                                         before `fetch_replicas`
expert compute             that of ``x``                 ``MoELayer(dtype=)``; the tokens passed to `moe_layer`
router logits and gates    float32, or wider with ``x``  `relibra_jax.execution.gating`, always
products and row sums      summed in float32             `pallas_kernels`, `relibra_jax.execution.gather`, always
replica transfers          that of expert compute        the dtype of the experts passed to `fetch_replicas`
replica gradients          that of expert compute        the dtype of the replica; the gradient is then added to that
                                                         of the home or resident of which the replica is a copy
residents                  that of expert compute        ``push_residents(dtype=)``; with Flax ``MoELayer(dtype=)``
gradient accumulators      float32, or wider with the    `relibra_jax.nnx.accumulate_gradients`, for homes and
                           parameters                    residents; gradients have the dtype of their weights
resident gradients         that of the accumulators      `return_gradients`, in the dtype of its argument
=========================  ============================  =====================================================

One optimizer update, without Flax::

    layers = prepare_layers(expert_ids, layer_plans, parallel)                  # once a batch
    residents = push_residents(experts, plan, parallel)                         # once an update, if there are slots
    for each micro-batch m and layer l:
        layer = layers.layer(m).layer(l)._replace(residents=residents.layer(l))
        layer_experts, x = fetch_replicas(experts[l], layer, x, parallel)       # before attention
        x = x + moe_layer(x, expert_ids[m, ..., l, :], gates, layer_experts, layer, parallel).output
    gradients = return_gradients(gradients of residents, gradients of experts, plan, parallel)

Replicas may also come from the host's memory: `relibra_jax.execution.host_replicas`.

The layer for Flax is in `relibra_jax.nnx`.
"""

from relibra_jax.execution.checkpoint import restore_checkpoint, save_checkpoint
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.execution.gating import balance_loss, gates_at, select_experts
from relibra_jax.execution.host_replicas import keep_on_host, prepare_host
from relibra_jax.execution.mesh import OVERLAP_OPTIONS, expert_mesh, rank_sharding
from relibra_jax.execution.migration import MoveError, migrate_experts
from relibra_jax.execution.moe import moe_layer
from relibra_jax.execution.nccl_ep import start_nccl_ep
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_agreement import check_same_plan
from relibra_jax.execution.prepared_layer import PreparedLayer, prepare_layer, prepare_layers
from relibra_jax.execution.replicas import LayerExperts, fetch_replicas
from relibra_jax.execution.residents import Residents, check_residents, push_residents, return_gradients
from relibra_jax.routing.host_share import share_with_host
from relibra_jax.routing.sizes import (
    Capacities,
    check_capacities,
    count_capacities,
    grow_capacities,
    worst_case_capacities,
)

__all__ = [
    "OVERLAP_OPTIONS",
    "Capacities",
    "ExpertParallel",
    "LayerExperts",
    "MoveError",
    "PreparedLayer",
    "Residents",
    "balance_loss",
    "check_capacities",
    "check_residents",
    "check_same_plan",
    "count_capacities",
    "expert_mesh",
    "fetch_replicas",
    "gates_at",
    "grow_capacities",
    "keep_on_host",
    "migrate_experts",
    "moe_layer",
    "optimizer_layers",
    "prepare_host",
    "prepare_layer",
    "prepare_layers",
    "push_residents",
    "rank_sharding",
    "restore_checkpoint",
    "return_gradients",
    "save_checkpoint",
    "select_experts",
    "share_with_host",
    "start_nccl_ep",
    "worst_case_capacities",
]
