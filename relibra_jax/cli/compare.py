"""``relibra compare``: planners over a trace, as one table, two figures and the numbers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import jax
import tyro
from rich.console import Console
from rich.table import Table

from relibra_jax.atomic_write import write_json
from relibra_jax.cli.batching import make_batches
from relibra_jax.cli.figures import compare_figure, timeline_figure
from relibra_jax.cli.modelled_time import CostModel, make_cost_model
from relibra_jax.cli.options import Batching, Costs, Ranks, TraceName
from relibra_jax.cli.outcomes import Outcome, compare
from relibra_jax.cli.outside_planner import import_planner
from relibra_jax.cli.planner_runs import Contender
from relibra_jax.cli.terminal import progress_bar, wide_table
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.suggestions import suggest_names
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare planners on a trace: prints a table, and writes two figures and the numbers as JSON."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    batching: Annotated[Batching, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Batching)
    costs: Annotated[Costs, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Costs)
    rows: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: all rows)")] = ()
    """The names of the planners (rows of the table) to run."""
    planner: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A planner of your own as one more row, written module:attribute; see docs/guides/write-a-planner.md."""
    out: Path = Path("out/compare")
    """The folder for the figures and the numbers."""


def run_compare(options: Compare, console: Console) -> None:
    """Compare the planners of the planner table, by `compare_contenders`."""
    planners = {name: Contender(entry=entry) for name, entry in PLANNERS.items()}
    compare_contenders(lambda _: planners, options, console)


def compare_contenders(
    contenders_of: Callable[[CostModel], Mapping[str, Contender]], options: Compare, console: Console
) -> None:
    """Run planners on a trace, print the table, and write the figures and the numbers.

    Args:
        contenders_of: makes the contenders by name; it is given the cost model, for contenders that choose by modelled
            time.
        options: the trace, the settings, the rows to run, and the folder for what is written.
        console: the console for the table.

    Raises:
        ValueError: if the trace and the settings do not fit each other, or a row or planner is unknown. Nothing is
            written then.
    """
    trace = read_trace(options.trace)
    topology = options.ranks.topology(trace.num_experts)
    batches = make_batches(trace, options.batching, topology)
    cost_model = make_cost_model(options.costs, trace, batches, topology)
    contenders = choose_rows(contenders_of(cost_model), options.rows, options.planner)
    with progress_bar(console, width=16) as bar:
        task = bar.add_task("planning", total=len(contenders))
        outcomes = compare(
            contenders,
            batches,
            topology,
            cost_model,
            seed=options.batching.seed,
            progress=lambda name: bar.update(task, advance=1, description=name),
        )
    micro_batches, layers = outcomes[0].rank_load.shape[:2]
    setting = (
        f"{trace.name}: {micro_batches} micro-batches x {layers} layers, {trace.num_experts} experts on"
        f" {topology.num_nodes} nodes x {topology.ranks_per_node} ranks, {topology.replica_slots} replica slots"
        + (f", {topology.resident_slots} resident slots" if topology.resident_slots else "")
    )
    table = comparison_table(outcomes, setting, residents=topology.resident_slots > 0)
    console.print(table, crop=False, soft_wrap=True)
    if any(is_reconstruction(outcome.planner) for outcome in outcomes):
        console.print(RECONSTRUCTION, style="dim")
    console.print(COLUMNS_EXPLAINED, style="dim")
    console.print(f"time is that of {_priced(options.costs)}", style="dim")
    used = _samples_used(options.batching, batches.samples_left)
    for note in (trace.note, used, "" if batches.history else NO_HISTORY):
        if note:
            console.print(f"note: {note}", style="dim")
    options.out.mkdir(parents=True, exist_ok=True)
    figure, timeline, numbers = (
        options.out / name for name in ("compare.png", "timeline.png", "compare.json")
    )
    compare_figure(figure, outcomes, setting)
    by_name = {outcome.planner: outcome for outcome in outcomes}
    before, after = by_name.get("static", outcomes[0]), by_name.get("relibra", outcomes[-1])
    timeline_figure(timeline, before, after, topology, cost_model)
    write_json(numbers, _report(options, trace, outcomes))
    console.print(f"figures: {figure} {timeline}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def choose_rows(
    table: Mapping[str, Contender], rows: Sequence[str], outside: Sequence[str]
) -> dict[str, Contender]:
    """Choose the contenders to run.

    Args:
        table: all contenders, by name.
        rows: the names of the contenders to run. If empty, the whole table is run.
        outside: the user's own planners, each written ``module:attribute``. They come after the others.

    Raises:
        ValueError: if a name is not in the table, or a user's planner cannot be imported.
    """
    for name in rows:
        if name not in table:
            raise ValueError(f"row {name!r} must be one of {', '.join(table)}{suggest_names(name, table)}")
    chosen = {name: table[name] for name in (rows or table)}
    return chosen | {name: Contender(entry=import_planner(name)) for name in outside}


NO_HISTORY: Final = "there is one batch, so planners that go by history had none"
TABLE_WIDTH: Final = 124
"""The width of a line of the table, in characters. A narrower terminal wraps the lines instead of cutting numbers."""
RECONSTRUCTION: Final = (
    "* reconstruction: no code of the source could be read, so the row is our reading of its text"
)
COLUMNS_EXPLAINED: Final = (
    "imbalance: max / mean of rank load over the batch; bound: the least that replication could reach with these homes;"
    " attn: imbalance of tokens, which attention feels; error: mean error of an expert's expected load, of the mean"
    " load, as MoE-GPS (arXiv 2506.07366) has it; cross: token copies that leave their node; crossings: what the slow"
    " network carries for each token at dispatch (tokens, or copies if dispatch is flat), mean/busiest; repl, resid:"
    " replicas and residents of a layer; GB: memory of a rank; plan: measured time of one batch's plan; exchange, push,"
    " reorder: modelled time of dispatch and combine, of residents' weights and gradients, and of experts to new homes,"
    " all part of time: modelled time of a batch; share: that of a perfectly balanced one with uniform routing over it,"
    " above 100% where fewer tokens cross; left: how far time is above a lower bound of any plan: what there is to"
    " gain, at most. The bound is a relaxation, and loose for what crosses: the best plans known of recorded routing"
    " are 18% (2 nodes) to 70% (4, flat) above it."
)


def comparison_table(outcomes: list[Outcome], title: str, *, residents: bool) -> Table:
    """Make a table with one line for each outcome, and the perfectly balanced run below them.

    Args:
        outcomes: the outcomes, in the order of the lines.
        title: the title of the table: the trace and the ranks.
        residents: whether there are resident slots. If so, the table has two more columns.
    """
    table = wide_table(title, width=TABLE_WIDTH)
    lines = [_cells(outcome, residents=residents) for outcome in outcomes]
    table.add_column("planner", no_wrap=True)
    for name in lines[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome, cells in zip(outcomes, lines, strict=True):
        table.add_row(f"{outcome.planner}{'*' * is_reconstruction(outcome.planner)}", *cells.values())
    table.add_section()
    balanced = f"{outcomes[0].modelled_seconds * outcomes[0].share_of_balanced:.2f}s"
    known = {"imbalance": "1.0000", "attn": "1.00", "time": balanced, "share": "100%"}
    table.add_row("balanced", *(dict.fromkeys(lines[0], "") | known).values(), style="dim")
    return table


def _cells(outcome: Outcome, *, residents: bool) -> dict[str, str]:
    """What the table says of an outcome, by column."""
    parts = outcome.modelled_parts
    cells = {
        "imbalance": f"{outcome.imbalance:.4f}",
        "bound": f"{outcome.bound:.3f}",
        "attn": f"{outcome.attention_imbalance:.2f}",
        "error": f"{outcome.forecast_error:.0%}",
        "cross": f"{outcome.cross_node_share:.0%}",
        "crossings": f"{outcome.crossings:.2f}/{outcome.crossings_busiest:.2f}",
        "repl": f"{outcome.replicas:.1f}",
        "resid": f"{outcome.residents:.1f}",
        "GB": f"{outcome.rank_memory / 1e9:.1f}",
        "plan": f"{outcome.plan_seconds * 1e3:.0f}ms",
        "exchange": f"{parts['exchange']:.2f}s",
        "push": f"{parts['push']:.2f}s",
        "reorder": f"{parts['reorder']:.2f}s",
        "time": f"{outcome.modelled_seconds:.2f}s",
        "share": f"{outcome.share_of_balanced:.1%}",
        "left": f"{outcome.left:.0%}",
    }
    return {name: cell for name, cell in cells.items() if residents or name not in ("resid", "push")}


def is_reconstruction(name: str) -> bool:
    """Whether the planner of this name was implemented from its published text alone, without its source's code."""
    return name in PLANNERS and PLANNERS[name].reconstruction


def _priced(costs: Costs) -> str:
    passes = f"{costs.updates} update{'s' * (costs.updates > 1)} per batch{', recompute' * costs.recompute}"
    return f"{costs.model} on {costs.cluster}, {costs.dispatch} dispatch, {passes}"


def _report(options: Compare, trace: Trace, outcomes: list[Outcome]) -> dict[str, object]:
    settings: dict[str, object] = {"trace": trace.name, "note": trace.note}
    for part in (options.ranks, options.batching, options.costs):
        settings |= dataclasses.asdict(part)
    return {"settings": settings, "jax": jax.__version__, "planners": [o.numbers() for o in outcomes]}


def _samples_used(batching: Batching, left: int) -> str:
    if batching.bootstrap is not None:
        return f"{batching.bootstrap} batches, whose samples were drawn from the trace with replacement, by domain"
    return f"{left} samples at the end of the trace do not fill a batch and were not used" if left else ""
