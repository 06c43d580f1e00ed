"""The public names of the packages: each has a docstring and types, and importing them is cheap."""

import ast
import importlib
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "relibra_jax": [
        "BALANCE",
        "EMPTY",
        "PLANNERS",
        "Assignment",
        "Batch",
        "BatchPlan",
        "LayerPlan",
        "PlacedRoutes",
        "Placement",
        "Plan",
        "PlanRequest",
        "Planner",
        "Price",
        "RoutingReplay",
        "Stage",
        "Topology",
        "assign_in_order",
        "assign_samples",
        "batch_imbalance",
        "check_plan",
        "count_batch",
        "eplb",
        "expert_load",
        "fill_unfinished",
        "imbalance",
        "load_plan",
        "load_replay",
        "lplb",
        "micro_batches_for",
        "pack_samples",
        "place_experts",
        "plan_batch",
        "rank_load",
        "rebalance_experts",
        "relibra",
        "replay_from_rollout",
        "replicate_experts",
        "sample_counts",
        "sample_load",
        "save_plan",
        "save_replay",
        "source_quota",
        "static",
    ],
    "relibra_jax.evaluation": [
        "COLUMNS",
        "Batches",
        "Batching",
        "Costs",
        "Outcome",
        "PlannedBatch",
        "Ranks",
        "Setting",
        "ablation",
        "compare",
        "make_setting",
        "run_planner",
        "table_columns",
    ],
    "relibra_jax.models": [
        "Cache",
        "LanguageModel",
        "ModelConfig",
        "ModelOutput",
        "load_pretrained",
        "make_model",
        "pretrained_tensors",
        "save_pretrained",
    ],
    "relibra_jax.execution": [
        "OVERLAP_OPTIONS",
        "Capacities",
        "ExpertParallel",
        "LayerExperts",
        "PreparedLayer",
        "Residents",
        "check_capacities",
        "check_residents",
        "check_same_plan",
        "count_capacities",
        "expert_mesh",
        "fetch_replicas",
        "grow_capacities",
        "migrate_experts",
        "moe_layer",
        "optimizer_layers",
        "prepare_layer",
        "prepare_layers",
        "push_residents",
        "rank_sharding",
        "return_gradients",
        "worst_case_capacities",
    ],
    "relibra_jax.nnx": [
        "GATINGS",
        "Balancer",
        "BalancerState",
        "CorrectionBias",
        "ExpertParallel",
        "ExpertParam",
        "Gating",
        "Homes",
        "MoELayer",
        "MoEOutput",
        "PreparedBatch",
        "RowPacking",
        "accumulate_gradients",
        "check_executed",
        "expert_labels",
        "expert_mesh",
        "get_homes",
        "prepare_residents",
        "reorder_experts",
        "restore_training",
        "save_training",
        "set_homes",
    ],
}
# Values have no __doc__ of their own; a string after their definition documents them.
VALUES = {
    "BALANCE": "relibra_jax.contract.types",
    "EMPTY": "relibra_jax.contract.types",
    "PLANNERS": "relibra_jax.planning.planners",
    "COLUMNS": "relibra_jax.evaluation.outcome",
    "OVERLAP_OPTIONS": "relibra_jax.execution.mesh",
    "GATINGS": "relibra_jax.execution.gating",
}


def string_below(module, name):
    """Return the string directly below the assignment of ``name`` in a module's source."""
    body = ast.parse(Path(importlib.import_module(module).__file__).read_text()).body
    for assignment, after in itertools.pairwise(body):
        targets = getattr(assignment, "targets", None) or [getattr(assignment, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(after, "value", None)
            return value.value if isinstance(value, ast.Constant) else None
    return None


@pytest.mark.parametrize("package", PUBLIC)
def test_the_names_are_these(package):
    module = importlib.import_module(package)
    assert module.__all__ == PUBLIC[package]
    assert module.__doc__
    for name in PUBLIC[package]:
        assert hasattr(module, name), name


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in PUBLIC.items() for name in names]
)
def test_every_name_says_what_it_is(package, name):
    value = getattr(importlib.import_module(package), name)
    documented = string_below(VALUES[name], name) if name in VALUES else value.__doc__
    assert documented
    # Without a docstring, that of a dataclass or a NamedTuple is its signature.
    assert not documented.startswith(f"{name}(")


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert importlib.import_module("relibra_jax").__version__ == project["version"]


@pytest.mark.parametrize("package", ["relibra_jax", "pallas_kernels"])
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


HEAVY = ("flax", "optax", "orbax", "chex", "scipy", "matplotlib", "tyro", "rich", "torch")


@pytest.mark.parametrize(
    "module",
    [
        "relibra_jax",
        "relibra_jax.evaluation",
        "relibra_jax.integrations.maxtext",
        "relibra_jax.integrations.megatron",
    ],
)
def test_the_planning_core_loads_jax_and_numpy_alone(module):
    """Planning, and following a plan in another trainer, imports no framework in a fresh process."""
    program = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ran.stdout.split() == []


def test_the_page_lists_them():
    text = (ROOT / "docs" / "public-api.md").read_text()
    for module, names in PUBLIC.items():
        listed = re.search(rf"\n`{re.escape(module)}`\n\n(.*?)\n\n", text, re.DOTALL)
        assert listed, module
        assert re.findall(r"`(\w+)`", listed[1]) == names
