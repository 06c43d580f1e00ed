"""``python -m experiments.claims [TRACE]``: compare the claims of papers with what relibra_jax reaches.

It runs planners under the conditions of the papers, and writes a report as Markdown, figures, and the numbers as JSON.
"""

import dataclasses
import datetime
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

import jax
from rich.console import Console

from experiments.claims.behind import behind
from experiments.claims.cells import CellResult, run_cell
from experiments.claims.figures import draw_planners, draw_sweeps
from experiments.claims.measured import read_measured
from experiments.claims.own_loads import run_own_loads
from experiments.claims.report import SWEEPS, write_report
from experiments.claims.results import Results
from experiments.claims.settings import PAPER_RANKS, Study, full_studies, quick_studies
from experiments.program import TraceName, run_program
from relibra_jax.cli.terminal import progress_bar
from relibra_jax.cost.models import MODELS
from relibra_jax.support.atomic_write import write_atomically, write_json
from relibra_jax.support.limits import check_integer
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace, some_layers

QUICK_LAYERS: Final = 4
"""The most layers of a trace that the quick form runs."""
FULL_RANKS: Final = max(nodes * local for nodes, local in PAPER_RANKS)
"""The largest number of ranks of the headline studies, which the experts of the trace must divide over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claims:
    """Compare the claims of papers with relibra_jax."""

    trace: TraceName = None
    """The recorded trace: a name or the path of an .npz file."""
    quick: bool = False
    """Run only the headline rows on 2 x 4 ranks with at most four layers, in minutes. The full form takes hours."""
    model: str = "gpt-oss-20b"
    """The model that the trace was recorded from. Times are modelled for its sizes and for the paper's models."""
    layers: int = 8
    """The number of layers of each trace to run, evenly spaced; all layers if the trace has fewer."""
    measured: Path = Path("experiments/results")
    """The folder of kept measurements. Without them the report has no column of measured figures."""
    out: Path = Path("out/claims")
    """The folder that the report, its figures and the numbers are written to."""


def main(options: Claims) -> None:
    """Run the studies, print where relibra_jax is behind, and write the report.

    Args:
        options: the trace, the form (quick or full), and the folder to write to.

    Raises:
        ValueError: if the trace does not fit the full form, the model is unknown, or a file of kept measurements has
            a different format. Nothing is written then.
    """
    console = Console()
    look_up("model=", options.model, MODELS)
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
            " the full form; give a trace with more experts, or --quick"
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
    for line in behind(results) or ["relibra_jax is behind nowhere in this run"]:
        console.print(f"- {line}", highlight=False, soft_wrap=True)
    console.print(f"report: {options.out / 'claims.md'}", highlight=False, soft_wrap=True)


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

            if not console.is_terminal:  # a log shows no progress bar
                console.print(f"{title}, {study.cell.costs.model}", highlight=False, soft_wrap=True)
            cells.append((study.section, run_cell(trace, study.cell, study.rows, progress=progress)))
            jax.clear_caches()  # compiled programs stay mapped, and Linux allows a process 65,530 memory maps
    return cells


def _draw(results: Results, folder: Path) -> dict[str, str]:
    """Draw the figures of the results on recorded routing; return their captions by file name."""
    figures = {}
    headline = [cell for cell in results.of("headline", synthetic=False) if cell.rows]
    if headline:
        fullest = max(len(cell.rows) for cell in headline)
        draw_planners(folder / "planners.png", [cell for cell in headline if len(cell.rows) == fullest])
        figures["planners.png"] = (
            f"Modelled speed of every system at its best, a perfectly balanced run being 100%; {headline[0].routing}"
        )
    swept = {section: cell for section, cell in results.cells if cell.rows and section in SWEEPS}
    if swept.keys() == SWEEPS.keys():
        draw_sweeps(folder / "sweeps.png", results)
        routing = swept["nodes"].routing
        figures["sweeps.png"] = f"Modelled speed in each sweep, relative to the balanced run; {routing}"
    return figures


def _about(options: Claims, traces: dict[str | None, Trace]) -> dict[str, str]:
    arguments = [Path(trace).name] if (trace := options.trace or os.environ.get("RELIBRA_TRACE")) else []
    arguments += ["--quick"] * options.quick + ["--layers", str(options.layers), "--model", options.model]
    return {
        "command": " ".join(["python -m experiments.claims", *arguments]),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), on which planning was timed",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "versions": f"relibra_jax {version('relibra-jax')}, jax {jax.__version__}, Python {platform.python_version()}",
        "traces": "; ".join(f"{trace.name} ({trace.note or 'recorded'})" for trace in traces.values()),
    }


if __name__ == "__main__":
    sys.exit(run_program(main, Claims, description=__doc__))
