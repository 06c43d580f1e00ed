"""``relibra advise``: MoE-GPS's question, which prediction pays for copying experts, answered with foresight.

Source of the question: arXiv 2506.07366. All times are modelled.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import tyro
from rich.console import Console
from rich.table import Table

from relibra_jax.atomic_write import write_json
from relibra_jax.cli.advise.figure import draw_advice
from relibra_jax.cli.advise.pricing import (
    STEPS,
    Advice,
    Setting,
    best_slots,
    over_skew,
    over_tokens,
    price,
)
from relibra_jax.cli.advise.strategies import Strategy, strategies
from relibra_jax.cli.advise.thresholds import EVEN_SHARES, PAYS, Point, threshold
from relibra_jax.cli.options import Batching, Costs, Ranks, TraceName
from relibra_jax.cli.terminal import progress_bar, wide_table
from relibra_jax.limits import check_positive
from relibra_jax.traces.read import read_trace
from relibra_jax.types import Topology

TABLE_WIDTH: Final = 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advise:
    """Say which strategy of balancing pays on a trace, and from which size and which skew any does."""

    trace: TraceName = None
    """A trace by name or path (.npz); else what RELIBRA_TRACE gives, else the recorded one of the package."""
    nodes: int = 2
    """The number of nodes N."""
    ranks_per_node: int = 4
    """The number of ranks of a node G."""
    replica_slots: tuple[int, ...] = (1, 2)
    """The numbers of replica slots to try."""
    resident_slots: tuple[int, ...] = (1,)
    """The numbers of resident slots to try."""
    memory: float | None = None
    """The GB that a rank may hold of weights and optimizer state; those of the cluster when not given."""
    batching: Annotated[Batching, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Batching)
    costs: Annotated[Costs, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Costs)
    out: Path = Path("out/advise")
    """The folder for the figure and the numbers."""


def run_advise(options: Advise, console: Console) -> None:
    """Price every strategy, print the table, the best one and the thresholds, and write the figure and the numbers.

    Args:
        options: the trace, the settings, the slots to try, and the folder for what is written.
        console: the console for the table.

    Raises:
        ValueError: if the trace or the settings do not fit, or no strategy fits the memory; nothing is written then.
    """
    trace = read_trace(options.trace)
    topology = _topology(options, 0, 0, trace.num_experts)
    setting = Setting(trace, topology, options.batching, options.costs)
    _, cost_model = setting.read()
    tried = strategies(cost_model, replica_slots=options.replica_slots, resident_slots=options.resident_slots)
    for strategy in tried:  # refused before anything runs
        _topology(options, strategy.replica_slots, strategy.resident_slots, trace.num_experts)
    limit = cost_model.cluster.memory
    if options.memory is not None:
        check_positive("memory", options.memory)
        limit = options.memory * 1e9
    with progress_bar(console, width=12) as bar:
        task = bar.add_task("strategies", total=len(tried))

        def progress() -> None:
            bar.update(task, advance=1)

        advice = price(tried, setting, progress=progress)
        best = _best_within(advice, limit)
        few = best_slots([each for each in advice if each.memory <= limit or each is advice[0]])
        bar.reset(task, description="thresholds", total=(STEPS + len(EVEN_SHARES)) * len(few))
        sizes = over_tokens(few, setting, progress=progress)
        skews = over_skew(few, setting, progress=progress)
    title = (
        f"{trace.name} on {options.nodes} nodes x {options.ranks_per_node} ranks: {options.costs.model} on"
        f" {options.costs.cluster}, {options.costs.tokens_per_rank:g} tokens of a rank in a micro-batch"
    )
    console.print(advice_table(advice, limit, title), crop=False, soft_wrap=True)
    for line in (
        f"best within {limit / 1e9:.0f} GB: {best.strategy.label}, {best.strategy.foresight} foresight",
        _pays("tokens of a rank in a micro-batch", sizes, "{:,.0f}"),
        _pays("imbalance under static placement", skews, "{:.2f}"),
    ):
        console.print(line, highlight=False, soft_wrap=True)
    options.out.mkdir(parents=True, exist_ok=True)
    figure, numbers = options.out / "advise.png", options.out / "advise.json"
    draw_advice(figure, advice, sizes, skews, title)
    told = {
        "setting": title,
        "memory_limit": limit,
        "strategies": [_numbers(each) for each in advice],
        "best": best.strategy.label,
        "tokens": [point._asdict() for point in sizes],
        "tokens_from_which_it_pays": threshold(sizes),
        "skew": [point._asdict() for point in skews],
        "imbalance_from_which_it_pays": threshold(skews),
    }
    write_json(numbers, told)
    console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def advice_table(advice: Sequence[Advice], limit: float, title: str) -> Table:
    """A table of strategies, one a line.

    Args:
        advice: what strategies come to, the one that does nothing first.
        limit: the bytes that a rank may hold.
        title: what was priced.
    """
    table = wide_table(title, width=TABLE_WIDTH)
    for name in ("strategy", "foresight"):
        table.add_column(name, no_wrap=True)
    for name in ("R", "B", "imbalance", "exposed", "time", "gain", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in advice:
        fits = each.memory <= limit
        table.add_row(
            each.strategy.name,
            each.strategy.foresight,
            str(each.strategy.replica_slots),
            str(each.strategy.resident_slots),
            f"{each.imbalance:.3f}",
            f"{each.transfers:.2f}s",
            f"{each.seconds:.2f}s",
            f"{advice[0].seconds / each.seconds - 1:+.1%}",
            f"{each.memory / 1e9:.1f}" + ("" if fits else " too much"),
            style="" if fits else "dim",
        )
    return table


def _topology(options: Advise, replica_slots: int, resident_slots: int, num_experts: int) -> Topology:
    return Ranks(
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        replica_slots=replica_slots,
        resident_slots=resident_slots,
    ).topology(num_experts)


def _best_within(advice: Sequence[Advice], limit: float) -> Advice:
    fitting = [each for each in advice if each.memory <= limit]
    if not fitting:
        least = min(each.memory for each in advice)
        raise ValueError(
            f"memory={limit / 1e9:.1f} GB: a rank needs at least {least / 1e9:.1f} GB; take more ranks, or shards"
        )
    return min(fitting, key=lambda each: each.seconds)


def _pays(what: str, points: Sequence[Point], number: str) -> str:
    """One line on where balancing pays."""
    tried = f"tried: {number.format(points[0].at)} to {number.format(points[-1].at)}"
    start = threshold(points)
    if start is None:
        return f"{what}: nothing gains {PAYS:.0%} ({tried})"
    if start == points[0].at:
        return f"{what}: balancing gains {PAYS:.0%} and more everywhere ({tried})"
    return f"{what}: balancing gains {PAYS:.0%} and more from about {number.format(start)} on ({tried})"


def _numbers(advice: Advice) -> dict[str, object]:
    strategy: Strategy = advice.strategy
    numbers = {name: value for name, value in advice._asdict().items() if name != "strategy"}
    named = {name: value for name, value in strategy._asdict().items() if name != "contender"}
    return named | numbers
