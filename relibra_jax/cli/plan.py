"""``relibra plan``: writes the plan of one planner for the last batch of a trace to a file."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from relibra_jax.cli.batch_prices import with_fetch_of
from relibra_jax.cli.batching import make_batches
from relibra_jax.cli.modelled_time import make_cost_model
from relibra_jax.cli.options import TraceName
from relibra_jax.cli.planner_runs import Contender, run_contender
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.plan_files import save_plan
from relibra_jax.evaluation import Batching, Costs, Ranks
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.support.suggestions import suggest_names
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
        console: the console that the imbalance of the plan is printed on.

    Raises:
        ValueError: if the planner is unknown, or the trace and the settings do not fit each other. Nothing is written
            then.
    """
    if options.planner not in PLANNERS:
        hint = suggest_names(options.planner, PLANNERS)
        raise ValueError(f"planner {options.planner!r} must be one of {', '.join(PLANNERS)}{hint}")
    trace = read_trace(options.trace)
    topology = options.ranks.topology(trace.num_experts)
    batches = make_batches(trace, options.batching, topology)
    contender = Contender(entry=PLANNERS[options.planner])
    cost_model = make_cost_model(options.costs, trace, batches, topology)
    across_nodes = contender.entry.across_nodes
    cost = with_fetch_of(cost_model, topology, across_nodes=across_nodes).price(topology)
    planned, _ = run_contender(contender, batches, topology, cost=cost, seed=options.batching.seed)
    plan = planned[-1].batch_plan.plan
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_plan(options.out, plan, topology)
    console.print(
        f"{options.planner}: imbalance {batch_imbalance(rank_load(plan)):.4f} over {len(plan.quota)} micro-batches"
        f"\nplan: {options.out}",
        highlight=False,
        soft_wrap=True,
    )
