"""The command line: ``python -m experiments.run compare | plan | inspect``.

Bad input ends with exit status 2 and one line on standard error; nothing half-written is left behind.
"""

import difflib
import json
import sys
from dataclasses import asdict
from typing import Annotated

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.configs import Compare, Inspect, MakePlan
from experiments.figures import compare_figure
from experiments.simulate import Outcome, compare, make_batches, run_planner
from experiments.traces import Trace, read_trace
from relibra_jax.files import whole_file
from relibra_jax.formats import save_plan
from relibra_jax.plan import rank_load
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.planner import PLANNERS
from relibra_jax.replay import sample_load

console = Console()


def run_compare(config: Compare) -> None:
    """Every planner over one trace."""
    trace = read_trace(config.trace)
    topology = config.cluster.topology(trace.num_experts)
    batches = make_batches(trace, config.batching, topology)
    config.out.mkdir(parents=True, exist_ok=True)
    with Progress(
        TextColumn("{task.description:>16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("planning", total=len(PLANNERS))
        outcomes = compare(
            PLANNERS,
            batches,
            topology,
            seed=config.batching.seed,
            progress=lambda name: bar.update(task, advance=1, description=name),
        )
    micro_batches, layers = outcomes[0].rank_load.shape[:2]
    setting = (
        f"{trace.name}: {micro_batches} micro-batches x {layers} layers, {trace.num_experts} experts on"
        f" {topology.num_nodes} nodes x {topology.ranks_per_node} ranks, {topology.replica_slots} replica slots"
    )
    console.print(comparison_table(outcomes, setting))
    for note in (trace.note, _left_over(batches.samples_left)):
        if note:
            console.print(f"note: {note}", style="dim")
    figure, numbers = config.out / "compare.png", config.out / "compare.json"
    compare_figure(figure, outcomes, setting)
    with whole_file(numbers) as part:
        part.write_text(json.dumps(_report(config, trace, outcomes), indent=1) + "\n")
    console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def comparison_table(outcomes: list[Outcome], title: str) -> Table:
    """One line a planner, and the idealised bound below them."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("planner", no_wrap=True)
    for name in ("imbalance", "p95", "max", "cross-node", "replicas", "plan ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.planner,
            f"{outcome.imbalance:.4f}",
            f"{outcome.imbalance_p95:.3f}",
            f"{outcome.imbalance_max:.3f}",
            f"{outcome.cross_node_share:.1%}",
            f"{outcome.replicas:.2f}",
            f"{outcome.plan_seconds * 1e3:.1f}",
        )
    table.add_section()
    table.add_row("balanced bound", "1.0000", "1.000", "1.000", style="dim")
    table.caption = (
        "imbalance: over the batch; p95, max: of single layers and micro-batches; cross-node: token copies that"
        " leave their node; replicas: of a layer; plan ms: one batch"
    )
    table.caption_justify = "left"
    return table


def _report(config: Compare, trace: Trace, outcomes: list[Outcome]) -> dict:
    rows = [{k: v for k, v in asdict(outcome).items() if k != "rank_load"} for outcome in outcomes]
    settings = {"trace": trace.name, "note": trace.note, **asdict(config.cluster), **asdict(config.batching)}
    return {"settings": settings, "jax": jax.__version__, "planners": rows}


def _left_over(samples: int) -> str:
    return (
        f"{samples} samples at the end of the trace do not fill a batch and were not used" if samples else ""
    )


def run_plan(config: MakePlan) -> None:
    """The plan of one planner for the last batch of a trace."""
    if config.planner not in PLANNERS:
        near = difflib.get_close_matches(config.planner, PLANNERS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"planner {config.planner!r} must be one of {', '.join(PLANNERS)}{hint}")
    row = PLANNERS[config.planner]
    trace = read_trace(config.trace)
    topology = config.cluster.topology(trace.num_experts)
    batches = make_batches(trace, config.batching, topology)
    *_, plan = run_planner(row, batches, topology, seed=config.batching.seed)
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


COMMANDS = {Compare: run_compare, MakePlan: run_plan, Inspect: run_inspect}

type Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[MakePlan, tyro.conf.subcommand("plan")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
)


def main(args: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 for bad input."""
    config = tyro.cli(Command, prog="python -m experiments.run", description=__doc__, args=args)  # type: ignore[call-overload]
    try:
        COMMANDS[type(config)](config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
