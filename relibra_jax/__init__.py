"""Expert load balancing for reinforcement learning of mixture-of-experts models in JAX.

During rollout the inference engine records which experts every token used. So the load of every expert is known before
the training step, and a planner can balance it in advance: it assigns samples to ranks, chooses the homes of the
experts, and replicates hot experts (ReLibra, arXiv 2605.08639).

This module exports the planning core, pure functions of arrays that need only jax and NumPy. Start with `plan_batch`.
`relibra_jax.nnx` is the entry point for Flax users, `relibra_jax.execution` runs plans on a device mesh, and
`relibra_jax.cost` models the time that plans take. `relibra_jax.contract.types` has the glossary.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from relibra_jax.contract.check import check_load, check_plan
from relibra_jax.contract.plan import (
    assemble_plan,
    contiguous_homes,
    home_layout,
    rank_load,
    replica_experts,
    resident_experts,
)
from relibra_jax.contract.plan_files import load_plan, save_plan
from relibra_jax.contract.planner import (
    Init,
    Place,
    PlacedRoutes,
    Placement,
    Planner,
    PlanRequest,
    Reorder,
    Replicate,
    Transitions,
    Update,
)
from relibra_jax.contract.replay import expert_load, sample_load
from relibra_jax.contract.replay_files import load_replay, save_replay
from relibra_jax.contract.types import (
    BALANCE,
    EMPTY,
    Assignment,
    BatchPlan,
    LayerPlan,
    Plan,
    Price,
    RoutingReplay,
    Topology,
)
from relibra_jax.planning.assignment import Assign, assign_in_order, assign_samples
from relibra_jax.planning.baselines.eplb import eplb, rebalance_experts
from relibra_jax.planning.baselines.lplb import lplb
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.batch import Batch, count_batch, fill_unfinished, join_batches
from relibra_jax.planning.metrics import batch_imbalance, imbalance, moved_experts
from relibra_jax.planning.per_node import plan_per_node
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts, without_replicas
from relibra_jax.planning.routes import Routes
from relibra_jax.planning.sample_packing import micro_batches_for, pack_samples
from relibra_jax.rollout.counts import sample_counts
from relibra_jax.rollout.ingest import replay_from_rollout
from relibra_jax.routing.split import source_quota
from relibra_jax.routing.visits import node_visits

try:
    __version__ = _version("relibra-jax")
except _PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

__all__ = [
    "BALANCE",
    "EMPTY",
    "PLANNERS",
    "Assign",
    "Assignment",
    "Batch",
    "BatchPlan",
    "Init",
    "LayerPlan",
    "Place",
    "PlacedRoutes",
    "Placement",
    "Plan",
    "PlanRequest",
    "Planner",
    "Price",
    "Reorder",
    "Replicate",
    "Routes",
    "RoutingReplay",
    "Stage",
    "Topology",
    "Transitions",
    "Update",
    "assemble_plan",
    "assign_in_order",
    "assign_samples",
    "batch_imbalance",
    "check_load",
    "check_plan",
    "contiguous_homes",
    "count_batch",
    "eplb",
    "expert_load",
    "fill_unfinished",
    "home_layout",
    "imbalance",
    "join_batches",
    "load_plan",
    "load_replay",
    "lplb",
    "micro_batches_for",
    "moved_experts",
    "node_visits",
    "pack_samples",
    "place_experts",
    "plan_batch",
    "plan_per_node",
    "rank_load",
    "rebalance_experts",
    "relibra",
    "replay_from_rollout",
    "replica_experts",
    "replicate_experts",
    "resident_experts",
    "sample_counts",
    "sample_load",
    "save_plan",
    "save_replay",
    "source_quota",
    "static",
    "without_replicas",
]
