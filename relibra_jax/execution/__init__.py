"""What runs a plan: expert parallelism over a device mesh with a node and a local axis.

Checkpoints are in `relibra_jax.execution.checkpoint`, gating in `relibra_jax.execution.gating`, the layer for Flax in
`relibra_jax.nnx_moe`.
"""

from relibra_jax.capacities import (
    Capacities,
    batch_capacities,
    capacities,
    check_capacities,
    grow_capacities,
    safe_capacities,
)
from relibra_jax.execution.agreement import check_agreement
from relibra_jax.execution.expert_leaves import optimizer_layers
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
    "check_agreement",
    "check_capacities",
    "expert_mesh",
    "fetch_replicas",
    "grow_capacities",
    "migrate_experts",
    "moe_layer",
    "optimizer_layers",
    "rank_sharding",
    "safe_capacities",
]
