"""The command line: ``python -m experiments.run compare | plan | inspect``, or the name of a training run.

``--list`` shows the training runs; their settings can be overridden, ``NAME --help`` shows them. Bad input ends with
exit status 2 and one line on standard error; nothing half-written is left behind.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.ablation.variants import ABLATION
from experiments.configs import Compare, Inspect, MakePlan
from experiments.figures import compare_figure, timeline_figure
from experiments.names import nearest
from experiments.rl.configs import CONFIGS, SUMMARIES, Train, saved_config
from experiments.rl.train import run_train
from experiments.simulate import Contender, Outcome, compare, cost_model, make_batches, run_contender
from experiments.traces import Trace, read_trace
from relibra_jax.atomic_write import write_atomically
from relibra_jax.plan_files import save_plan
from relibra_jax.plan import rank_load
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.replay import sample_load

console = Console()

PROGRAM = "python -m experiments.run"
NAMES = ("compare", "plan", "inspect")


def run_compare(config: Compare) -> None:
    """Every planner over one trace."""
    trace = read_trace(config.trace)
    topology = config.cluster.topology(trace.num_experts)
    batches = make_batches(trace, config.batching)
    costs = cost_model(config.costs, trace, batches, topology)
    contenders = {name: Contender(row=row) for name, row in PLANNERS.items()}
    if config.ablation:
        contenders = ABLATION
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("planning", total=len(contenders))
        outcomes = compare(
            contenders,
            batches,
            topology,
            costs,
            seed=config.batching.seed,
            progress=lambda name: bar.update(task, advance=1, description=name),
        )
    micro_batches, layers = outcomes[0].rank_load.shape[:2]
    setting = (
        f"{trace.name}: {micro_batches} micro-batches x {layers} layers, {trace.num_experts} experts on"
        f" {topology.num_nodes} nodes x {topology.ranks_per_node} ranks, {topology.replica_slots} replica slots"
    )
    console.print(comparison_table(outcomes, setting))
    console.print(COLUMNS_EXPLAINED, style="dim")
    for note in (trace.note, _left_over(batches.samples_left), "" if batches.history else NO_HISTORY):
        if note:
            console.print(f"note: {note}", style="dim")
    config.out.mkdir(parents=True, exist_ok=True)
    figure, timeline, numbers = (
        config.out / name for name in ("compare.png", "timeline.png", "compare.json")
    )
    compare_figure(figure, outcomes, setting)
    by_name = {outcome.planner: outcome for outcome in outcomes}
    timeline_figure(timeline, by_name["static"], by_name["relibra"], topology, costs)
    with write_atomically(numbers) as part:
        part.write_text(json.dumps(_report(config, trace, outcomes), indent=1) + "\n")
    console.print(f"figures: {figure} {timeline}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


NO_HISTORY = "there is one batch, so planners that go by history had none"
COLUMNS_EXPLAINED = (
    "imbalance: max / mean of rank load over the batch; bound: what any replication could reach with these homes;"
    " p95, max: of single layers and micro-batches; attn: imbalance of tokens over ranks, which attention feels;"
    " cross: token copies that leave their node; copy: replicas of a layer; plan: measured time of one batch's plan;"
    " time, share: modelled time of a batch, and that of a perfectly balanced one over it."
)


def comparison_table(outcomes: list[Outcome], title: str) -> Table:
    """One line a planner, and the idealised bound below them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("planner", no_wrap=True)
    for name in ("imbalance", "bound", "p95", "max", "attn", "cross", "copy", "plan", "time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.planner,
            f"{outcome.imbalance:.4f}",
            f"{outcome.bound:.4f}",
            f"{outcome.imbalance_p95:.2f}",
            f"{outcome.imbalance_max:.2f}",
            f"{outcome.attention_imbalance:.2f}",
            f"{outcome.cross_node_share:.0%}",
            f"{outcome.replicas:.1f}",
            f"{outcome.plan_seconds * 1e3:.0f}ms",
            f"{outcome.modelled_seconds:.1f}s",
            f"{outcome.share_of_balanced:.1%}",
        )
    table.add_section()
    first = outcomes[0]
    balanced = f"{first.modelled_seconds * first.share_of_balanced:.1f}s"
    table.add_row("balanced", "1.0000", "", "1.00", "1.00", "1.00", "", "", "", balanced, "100%", style="dim")
    return table


def _report(config: Compare, trace: Trace, outcomes: list[Outcome]) -> dict:
    settings = {"trace": trace.name, "note": trace.note}
    for part in (config.cluster, config.batching, config.costs):
        settings |= asdict(part)
    return {"settings": settings, "jax": jax.__version__, "planners": [o.numbers() for o in outcomes]}


def _left_over(samples: int) -> str:
    return (
        f"{samples} samples at the end of the trace do not fill a batch and were not used" if samples else ""
    )


def run_plan(config: MakePlan) -> None:
    """The plan of one planner for the last batch of a trace."""
    if config.planner not in PLANNERS:
        hint = nearest(config.planner, PLANNERS)
        raise ValueError(f"planner {config.planner!r} must be one of {', '.join(PLANNERS)}{hint}")
    row = PLANNERS[config.planner]
    trace = read_trace(config.trace)
    topology = config.cluster.topology(trace.num_experts)
    batches = make_batches(trace, config.batching)
    planned, _ = run_contender(Contender(row=row), batches, topology, seed=config.batching.seed)
    plan = planned[-1].plan
    config.out.parent.mkdir(parents=True, exist_ok=True)
    save_plan(config.out, plan, topology)
    console.print(
        f"{config.planner}: imbalance {batch_imbalance(rank_load(plan)):.4f} over {len(plan.quota)} micro-batches"
        f"\nplan: {config.out}",
        highlight=False,
        soft_wrap=True,
    )


def run_inspect(config: Inspect) -> None:
    """What a trace holds, and how unevenly its experts are used."""
    trace = read_trace(config.trace)
    tokens = trace.replay.mask.sum(1)
    layers, top_k = trace.replay.expert_ids.shape[2:]
    load = np.asarray(
        jax.jit(sample_load, static_argnames="num_experts")(trace.replay, num_experts=trace.num_experts)
    )
    by_expert = load.sum(0)
    top = by_expert.max(-1) / by_expert.mean(-1)
    unused = int((by_expert == 0).sum())
    table = Table(title=trace.name, title_justify="left", show_header=False)
    for name, value in (
        ("samples", f"{len(tokens)}"),
        ("tokens", f"{tokens.sum()} ({tokens.min()} to {tokens.max()} a sample)"),
        ("MoE layers", f"{layers}"),
        ("experts", f"{trace.num_experts}, top-{top_k}"),
        ("hottest expert, times the mean", f"{top.min():.2f} to {top.max():.2f} by layer"),
        ("experts never used", f"{unused} of {by_expert.size} over all layers"),
        ("note", trace.note or "none"),
    ):
        table.add_row(name, value)
    console.print(table)


def list_runs() -> None:
    """The training runs that have names."""
    table = Table("name", "what it is", title=f"{PROGRAM} NAME [--overrides]", box=box.SIMPLE_HEAD)
    for name, run in CONFIGS.items():
        sizes = f"{run.task}, {run.policy} model, {run.samples} samples a batch, {run.planner}"
        length = (
            f"{run.warmup_steps} supervised steps, then {run.steps}; seeds {', '.join(map(str, run.seeds))}"
        )
        table.add_row(name, f"{SUMMARIES[name]}\n{sizes}\n{length}")
    console.print(table)


COMMANDS: dict[type, Callable[[Any], None]] = {Compare: run_compare, MakePlan: run_plan, Inspect: run_inspect}

type Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[MakePlan, tyro.conf.subcommand("plan")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
)


def parse_run(name: str, default: Train, args: list[str]) -> Train:
    """The settings of a training run; where ``args`` say nothing, those of ``default``."""
    program = f"{PROGRAM} {name}"
    return tyro.cli(Train, default=default, prog=program, description=SUMMARIES[name], args=args)


def resumed_folder(args: list[str]) -> Path | None:
    """What ``--resume`` names: its settings are the defaults of all others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", type=Path)
    return parser.parse_known_args(args)[0].resume


def main(args: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 for bad input."""
    args = sys.argv[1:] if args is None else args
    name, *rest = args or [""]
    if name == "--list":
        list_runs()
        return 0
    try:
        if name in CONFIGS:
            resume = resumed_folder(rest)
            default = CONFIGS[name] if resume is None else saved_config(resume)
            run_train(parse_run(name, default, rest), console, name=name)
        elif name in NAMES or name.startswith("-") or not name:
            config = tyro.cli(Command, prog=PROGRAM, description=__doc__, args=args)
            COMMANDS[type(config)](config)
        else:
            known = (*NAMES, *CONFIGS)
            raise ValueError(f"command {name!r} must be one of {', '.join(known)}{nearest(name, known)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
