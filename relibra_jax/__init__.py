"""relibra_jax: expert load balancing as planning, for mixture-of-experts reinforcement learning in JAX."""

from relibra_jax.plan_files import load_plan, save_plan
from relibra_jax.plan import check_plan, rank_load
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.eplb import eplb, rebalance_experts
from relibra_jax.planning.lplb import lplb
from relibra_jax.planning.metrics import batch_imbalance, imbalance
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.planners import PLANNERS, plan_batch, static
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.replay import expert_load, load_replay, sample_load, save_replay
from relibra_jax.rollout import replay_from_rollout
from relibra_jax.token_split import source_quota
from relibra_jax.types import EMPTY, Assignment, Plan, Planner, RoutingReplay, Topology

__all__ = [
    "EMPTY",
    "PLANNERS",
    "Assignment",
    "Plan",
    "Planner",
    "RoutingReplay",
    "Topology",
    "assign_in_order",
    "assign_samples",
    "batch_imbalance",
    "check_plan",
    "eplb",
    "expert_load",
    "imbalance",
    "load_plan",
    "load_replay",
    "lplb",
    "place_experts",
    "plan_batch",
    "rank_load",
    "rebalance_experts",
    "relibra",
    "replay_from_rollout",
    "replicate_experts",
    "sample_load",
    "save_plan",
    "save_replay",
    "source_quota",
    "static",
]
