"""``relibra claims``: one command that runs what papers claim, and writes one report."""

import dataclasses
import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Final

import jax
from rich.console import Console

from relibra_jax.atomic_write import write_atomically, write_json
from relibra_jax.cli.claims.behind import behind
from relibra_jax.cli.claims.cells import CellResult, run_cell
from relibra_jax.cli.claims.figures import draw_planners, draw_sweeps
from relibra_jax.cli.claims.measured import read_measured
from relibra_jax.cli.claims.own_loads import run_own_loads
from relibra_jax.cli.claims.report import SWEEPS, write_report
from relibra_jax.cli.claims.results import Results
from relibra_jax.cli.claims.settings import PAPER_RANKS, Study, full_studies, quick_studies
from relibra_jax.cli.modelled_time import find_model
from relibra_jax.cli.options import TraceName
from relibra_jax.cli.terminal import progress_bar
from relibra_jax.limits import check_integer
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace

QUICK_LAYERS: Final = 4
FULL_RANKS: Final = max(nodes * local for nodes, local in PAPER_RANKS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claims:
    """Run what papers claim beside ours: one report as Markdown, figures, the numbers as JSON."""

    trace: TraceName = None
    """A recorded trace by name or path (.npz); else what RELIBRA_TRACE gives, else the one of the package."""
    quick: bool = False
    """Six rows on 2 x 4 ranks and at most four layers, in minutes; otherwise everything, in most of an hour."""
    model: str = "gpt-oss-20b"
    """The model that the trace was recorded from, whose sizes are priced beside those of the paper's models."""
    layers: int = 8
    """The layers of each trace that are run, at even distances; all of them where it has fewer."""
    measured: Path = Path("experiments/results")
    """The folder of kept measurements; without them the column of measured figures is left out."""
    out: Path = Path("out/claims")
    """The folder for the report, its figures and the numbers."""


def run_claims(options: Claims, console: Console) -> None:
    """Run the studies, print where ours is behind, and write the report.

    Args:
        options: the trace, the form, and the folder for what is written.
        console: the console for progress and the findings.

    Raises:
        ValueError: if the trace, the model or a kept measurement does not fit; nothing is written then.
    """
    find_model(options.model)
    check_integer("layers", options.layers, least=1)
    measured = read_measured(options.measured)
    studies = quick_studies(options.model) if options.quick else full_studies(options.model)
    layers = min(options.layers, QUICK_LAYERS) if options.quick else options.layers
    traces = {
        name: some_layers(read_trace(options.trace if name is None else name), layers)
        for name in dict.fromkeys(study.trace for study in studies)
    }
    recorded = traces[None]
    if not options.quick and recorded.num_experts % FULL_RANKS:
        raise ValueError(
            f"{recorded.name} has {recorded.num_experts} experts, which do not divide over the {FULL_RANKS} ranks of"
            " the full form: name a trace with more experts, or give --quick"
        )
    cells = _run_studies(studies, traces, console)
    own_loads = [] if options.quick else run_own_loads()
    results = Results(_about(options, traces), cells, own_loads, measured, {})
    options.out.mkdir(parents=True, exist_ok=True)
    results = results._replace(figures=_draw(results, options.out))
    numbers = {
        "about": results.about,
        "cells": [{"section": section, **dataclasses.asdict(cell)} for section, cell in cells],
        "own_loads": [load._asdict() for load in own_loads],
        "measured": [each._asdict() for each in measured],
    }
    write_json(options.out / "claims.json", numbers)
    with write_atomically(options.out / "claims.md") as part:
        part.write_text(write_report(results))
    for line in behind(results) or ["ours is behind nowhere, in what was run"]:
        console.print(f"- {line}", highlight=False, soft_wrap=True)
    console.print(f"report: {options.out / 'claims.md'}", highlight=False, soft_wrap=True)


def some_layers(trace: Trace, count: int) -> Trace:
    """A trace with so many of its layers, at even distances from the first to the last; all where it has no more.

    Args:
        trace: the trace.
        count: the layers to keep, at least 1.
    """
    layers = trace.replay.expert_ids.shape[2]
    if layers <= count:
        return trace
    kept = [layer * (layers - 1) // max(count - 1, 1) for layer in range(count)]
    replay = trace.replay._replace(expert_ids=trace.replay.expert_ids[:, :, kept])
    return trace._replace(replay=replay, note=f"{trace.note}; {count} of {layers} layers".removeprefix("; "))


def _run_studies(
    studies: list[Study], traces: dict[str | None, Trace], console: Console
) -> list[tuple[str, CellResult]]:
    cells = []
    with progress_bar(console, width=48) as bar:
        task = bar.add_task("planning", total=sum(len(study.rows) for study in studies))
        for study in studies:
            trace, ranks = traces[study.trace], study.cell.ranks
            title = f"{trace.name} {ranks.nodes}x{ranks.ranks_per_node} {study.section}"

            def progress(name: str, title: str = title) -> None:
                bar.update(task, advance=1, description=f"{title}: {name}")

            if not console.is_terminal:  # a log has no bar
                console.print(f"{title}, {study.cell.costs.model}", highlight=False, soft_wrap=True)
            cells.append((study.section, run_cell(trace, study.cell, study.rows, progress=progress)))
            jax.clear_caches()  # programs stay mapped, and a process may hold 65,530 maps on Linux
    return cells


def _draw(results: Results, folder: Path) -> dict[str, str]:
    """Draw what was run on recorded routing; the files' names with what they show."""
    figures = {}
    headline = [cell for cell in results.of("headline", synthetic=False) if cell.rows]
    if headline:
        fullest = max(len(cell.rows) for cell in headline)
        draw_planners(folder / "planners.png", [cell for cell in headline if len(cell.rows) == fullest])
        figures["planners.png"] = "Modelled speed of every system, a perfectly balanced run being 100%"
    if {section for section, cell in results.cells if cell.rows} >= SWEEPS.keys():
        draw_sweeps(folder / "sweeps.png", results)
        figures["sweeps.png"] = "Modelled speed over what each sweep varies"
    return figures


def _about(options: Claims, traces: dict[str | None, Trace]) -> dict[str, str]:
    arguments = [Path(trace).name] if (trace := options.trace or os.environ.get("RELIBRA_TRACE")) else []
    arguments += ["--quick"] * options.quick + ["--layers", str(options.layers), "--model", options.model]
    return {
        "command": " ".join(["relibra", "claims", *arguments]),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), on which plans were timed",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "versions": f"relibra_jax {version('relibra-jax')}, jax {jax.__version__}, Python {platform.python_version()}",
        "traces": "; ".join(f"{trace.name} ({trace.note or 'recorded'})" for trace in traces.values()),
    }
