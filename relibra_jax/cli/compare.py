"""``relibra compare``: runs planners on a trace; writes a table, two figures, the numbers and an optional HTML page."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import jax
import tyro
from rich.console import Console
from rich.table import Table

from relibra_jax.cli.comparison_page import command_line, write_page
from relibra_jax.cli.figures import compare_figure
from relibra_jax.cli.options import TraceName
from relibra_jax.cli.outside_planner import import_planner
from relibra_jax.cli.terminal import progress_bar, wide_table
from relibra_jax.cli.timeline import timeline_figure
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.evaluation import (
    Batching,
    Costs,
    Outcome,
    Ranks,
    ablation,
    make_setting,
    run_planner,
    table_columns,
)
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.counted import counted
from relibra_jax.support.output_paths import check_folder, check_page
from relibra_jax.support.suggestions import look_up
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
    ablation: bool = False
    """Compare the parts of ReLibra, each alone, and alternatives to them, instead of all planners."""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: all rows)")] = ()
    """The names of the planners (rows of the table) to run."""
    planner: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A planner of your own as one more row, written module:attribute; see docs/guides/write-a-planner.md."""
    legend: bool = False
    """Explain the columns of the table below it."""
    out: Path = Path("out/compare")
    """The folder that the figures and the numbers are written to."""
    html: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: no page)")] = None
    """The HTML file to write: one self-contained page with the table, the figures and their explanations."""


def run_compare(options: Compare, console: Console) -> None:
    """Run planners on a trace, print the table, and write the figures and the numbers.

    Args:
        options: the trace, the settings, the rows to run, and the folder to write to.
        console: the console that the table is printed on.

    Raises:
        ValueError: if the trace and the settings do not fit each other, or a row or planner is unknown, or
            a path to write to cannot be written. Nothing is written then.
    """
    check_folder(options.out, option="out")
    if options.html is not None:
        check_page(options.html, option="html", example="compare.html")
    trace = read_trace(options.trace)
    topology = options.ranks.topology(trace.num_experts)
    chosen = choose_rows(ablation() if options.ablation else PLANNERS, options.rows, options.planner)
    setting = make_setting(trace, topology, batching=options.batching, cost=options.costs)
    with progress_bar(console, width=16) as bar:
        task = bar.add_task("planning", total=len(chosen))
        outcomes, rows = [], []
        for name, entry in chosen.items():
            outcomes.append(run_planner(name, entry, setting))
            rows.append(outcomes[-1].numbers())
            bar.update(task, advance=1, description=name)
    micro_batches, layers = outcomes[0].rank_load.shape[:2]
    title = (
        f"{counted(micro_batches, 'micro-batch')} x {counted(layers, 'layer')}, {trace.num_experts} experts on"
        f" {counted(topology.num_nodes, 'node')} x {counted(topology.ranks_per_node, 'rank')},"
        f" {counted(topology.replica_slots, 'replica slot')}"
        + (f", {counted(topology.resident_slots, 'resident slot')}" if topology.resident_slots else "")
    )
    console.print(comparison_table(outcomes, f"{trace.name}: {title}"), crop=False, soft_wrap=True)
    if any(outcome.entry.reconstruction for outcome in outcomes):
        console.print(RECONSTRUCTION, style="dim")
    legend = [f"{each.heading}: {each.meaning}" for each in table_columns(outcomes[0])]
    console.print("\n".join(legend if options.legend else [COLUMNS_HINT]), style="dim", highlight=False)
    priced = _priced(options.costs, setting.cost_model.on(topology))
    console.print(f"modelled times are for {priced}", style="dim")
    samples = _samples_used(options.batching, setting.batches.samples_left)
    notes = [note for note in (trace.note, samples, "" if setting.batches.history else NO_HISTORY) if note]
    for note in notes:
        console.print(f"note: {note}", style="dim")
    options.out.mkdir(parents=True, exist_ok=True)
    figure, timeline, numbers = (
        options.out / name for name in ("compare.png", "timeline.png", "compare.json")
    )
    compare_figure(figure, outcomes, f"{trace.name}: {title}")
    timeline_figure(timeline, _for_timeline(outcomes))
    write_json(numbers, {**_settings(options, trace), "planners": rows})
    console.print(f"figures: {figure} {timeline}\nnumbers: {numbers}", highlight=False, soft_wrap=True)
    if options.html is not None:
        about = {
            "Command": command_line("relibra compare", options),
            "Trace": trace.name,
            "Setting": title,
            "Modelled times": f"for {priced}",
            **({"Notes": "; ".join(notes)} if notes else {}),
        }
        write_page(options.html, outcomes, about, {"compare": figure, "timeline": timeline})
        console.print(f"page: {options.html}", highlight=False, soft_wrap=True)


def choose_rows(
    table: Mapping[str, PlannerEntry], rows: Sequence[str], outside: Sequence[str]
) -> dict[str, PlannerEntry]:
    """Choose the planners to run.

    Args:
        table: all planners, by name.
        rows: the names of the planners to run. If empty, the whole table is run.
        outside: the user's own planners, each written ``module:attribute``. They come after the others.

    Raises:
        ValueError: if a name is not in the table, or a user's planner cannot be imported.
    """
    chosen = {name: look_up("row ", name, table) for name in (rows or table)}
    return chosen | {name: import_planner(name) for name in outside}


NO_HISTORY: Final = "there is only one batch, so planners that plan from earlier batches had no history"
COLUMNS_HINT: Final = "columns: --legend explains them"
TIMELINE: Final = ("static", "eplb", "relibra")
"""The planners that the timeline shows, besides the user's own planners."""
MOST_TIMELINES: Final = 4
"""The most planners that the timeline shows."""
TABLE_WIDTH: Final = 124
"""The width of a line of the table, in characters. A narrower terminal wraps the lines instead of cutting numbers."""
RECONSTRUCTION: Final = (
    "* reconstruction: the source's code was not available, so this row implements our reading of its text"
)


def comparison_table(outcomes: list[Outcome], title: str) -> Table:
    """Make a table with one line for each outcome, and the perfectly balanced run below them.

    Args:
        outcomes: the outcomes, in the order of the lines.
        title: the title of the table: the trace and the ranks.
    """
    table, columns = wide_table(title, width=TABLE_WIDTH), table_columns(outcomes[0])
    table.add_column("planner", no_wrap=True)
    for each in columns:
        table.add_column(each.heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        name = f"{outcome.planner}{'*' * outcome.entry.reconstruction}"
        table.add_row(name, *(each.cell(outcome) for each in columns))
    table.add_section()
    table.add_row("balanced", *(each.balanced(outcomes[0]) for each in columns), style="dim")
    return table


def _for_timeline(outcomes: list[Outcome]) -> list[Outcome]:
    """Select the outcomes for the timeline: `TIMELINE` and the user's planners, or else the first and the last."""
    selection = [outcome for outcome in outcomes if outcome.planner in TIMELINE or ":" in outcome.planner]
    return selection[:MOST_TIMELINES] if len(selection) > 1 else [outcomes[0], *outcomes[1:][-1:]]


def _priced(costs: Costs, run: CostModel) -> str:
    passes = f"{counted(costs.updates, 'update')} per batch{', recompute' * costs.recompute}"
    sequences = f"{run.sequences} sequences, {costs.tokens_per_rank:g} tokens per rank"
    return f"{costs.model} on {costs.cluster}, {run.path} dispatch, {passes}, {run.exchange} exchange, {sequences}"


def _settings(options: Compare, trace: Trace) -> dict[str, object]:
    """Return what was compared, for the JSON file."""
    settings: dict[str, object] = {"trace": trace.name, "note": trace.note}
    for part in (options.ranks, options.batching, options.costs):
        settings |= dataclasses.asdict(part)
    return {"settings": settings, "jax": jax.__version__}


def _samples_used(batching: Batching, left: int) -> str:
    if batching.bootstrap is not None:
        batches = counted(batching.bootstrap, "batch")
        return f"{batches}, whose samples were drawn from the trace with replacement, by domain"
    return f"samples at the end of the trace that fill no batch and were not used: {left}" if left else ""
