"""``relibra plan``: writes the plan of one planner for the last batch of a trace to a file."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from relibra_jax.cli.options import TraceName
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.plan_files import save_plan
from relibra_jax.evaluation import Batching, Costs, Ranks, make_setting, run_planner
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.support.counted import counted
from relibra_jax.support.output_paths import check_file
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.read import read_trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakePlan:
    """Write the plan of one planner for the last batch of a trace."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    planner: str = "relibra"
    """The name of the planner, from the table that relibra compare prints."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    batching: Annotated[Batching, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Batching)
    costs: Annotated[Costs, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Costs)
    out: Path = Path("out/plan.npz")
    """The file to write: slot_expert, home and quota of the plan, and the sizes of the topology."""


def run_plan(options: MakePlan, console: Console) -> None:
    """Plan all batches of a trace, and save the plan of the last one.

    Args:
        options: the trace, the planner, the settings, and the file to write.
        console: the console that the imbalance of the plan, and the line that loads it, are printed on.

    Raises:
        ValueError: if the planner is unknown, or the trace and the settings do not fit each other, or the file cannot
            be written. Nothing is written then.
    """
    check_file(options.out, option="out", example="plan.npz")
    entry = look_up("planner ", options.planner, PLANNERS)
    trace = read_trace(options.trace)
    topology = options.ranks.topology(trace.num_experts)
    setting = make_setting(trace, topology, batching=options.batching, cost=options.costs)
    outcome = run_planner(options.planner, entry, setting, timed_runs=0)
    plan = outcome.batches[-1].batch_plan.plan
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_plan(options.out, plan, topology)
    console.print(
        f"{options.planner}: imbalance {batch_imbalance(rank_load(plan)):.4f} over"
        f" {counted(len(plan.quota), 'micro-batch')}\nplan: {options.out}"
        f"\nin Python: from relibra_jax import load_plan; plan, topology = load_plan({str(options.out)!r})",
        highlight=False,
        soft_wrap=True,
    )
