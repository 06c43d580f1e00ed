"""What runs a plan: expert parallelism over a device mesh with a node and a local axis.

Checkpoints are in `relibra_jax.execution.checkpoint`, gating in `relibra_jax.execution.gating`, the layer for Flax in
`relibra_jax.nnx.layer`.
"""

from relibra_jax.capacity import (
    Capacities,
    batch_capacities,
    count_capacities,
    check_capacities,
    grow_capacities,
    worst_case_capacities,
)
from relibra_jax.execution.plan_agreement import check_same_plan
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.execution.mesh import OVERLAP_OPTIONS, expert_mesh, rank_sharding
from relibra_jax.execution.migration import migrate_experts
from relibra_jax.execution.moe import ExpertParallel, LayerExperts, fetch_replicas, moe_layer

__all__ = [
    "OVERLAP_OPTIONS",
    "Capacities",
    "ExpertParallel",
    "LayerExperts",
    "batch_capacities",
    "capacities",
    "check_same_plan",
    "check_capacities",
    "expert_mesh",
    "fetch_replicas",
    "grow_capacities",
    "migrate_experts",
    "moe_layer",
    "optimizer_layers",
    "rank_sharding",
    "worst_case_capacities",
]
