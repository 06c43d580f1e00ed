"""The results of the measurements, as tables and as JSON."""

import dataclasses
import datetime
import itertools
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.table import Table

from experiments.bench_two_processes.runs import Line, Settings


def make_tables(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield a table of bytes for all lines of one trace and path, and then tables of seconds for timed lines."""
    yield _bytes_table(lines)
    for _, group in itertools.groupby(lines, key=lambda line: line.micro_batches):
        group_lines = list(group)
        if group_lines[0].seconds:
            yield _seconds_table(group_lines)


def _bytes_table(lines: Sequence[Line]) -> Table:
    counts = sorted({line.micro_batches for line in lines})
    table = _table(
        f"{lines[0].trace}, {lines[0].path}: MB between the nodes in one update, including residents"
    )
    for count in counts:
        for kind in ("sent", "program", "needed"):
            table.add_column(f"{count}: {kind}" if kind == "sent" else kind, justify="right")
    for name, group in itertools.groupby(sorted(lines, key=_order(lines)), key=lambda line: line.contender):
        cells = []
        for line in group:
            needed = sum(line.bytes_needed.values())
            cells += [f"{each / 1e6:.1f}" for each in (line.bytes_sent, line.bytes_of_program, needed)]
        table.add_row(name, *cells)
    return table


def _order(lines: Sequence[Line]):
    """Return a sort key that orders lines by planner, in order of appearance, and then by number of micro-batches."""
    names = list(dict.fromkeys(line.contender for line in lines))
    return lambda line: (names.index(line.contender), line.micro_batches)


def _seconds_table(lines: Sequence[Line]) -> Table:
    first = lines[0]
    table = _table(
        f"{first.trace}, {first.path}: {first.micro_batches} micro-batches per update,"
        f" {first.tokens_per_rank:.0f} tokens per rank and micro-batch"
    )
    for column in (
        "s per update",
        "min to max",
        "speed / static",
        "of balanced",
        "s to prepare",
        "imbalance",
    ):
        table.add_column(column, justify="right")
    medians = {line.contender: float(np.median(line.seconds)) for line in lines}
    for line in lines:
        median = medians[line.contender]
        table.add_row(
            line.contender,
            f"{median:.3f}",
            f"{min(line.seconds):.3f} to {max(line.seconds):.3f}",
            f"{medians['static'] / median:.2f}",
            f"{medians['balanced'] / median:.1%}",
            f"{np.median(line.prepare_seconds):.3f}",
            f"{line.rows_imbalance:.3f}",
        )
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("planner", no_wrap=True)
    return table


def make_report(lines: Sequence[Line], settings: Settings) -> dict[str, object]:
    """Return all results with the command, the machine and the date, for a JSON file.

    Args:
        lines: the results.
        settings: the sizes that were run.
    """
    # --as-process and its arguments are not part of the user's command.
    arguments = itertools.takewhile(lambda argument: argument != "--as-process", sys.argv[1:])
    return {
        "command": " ".join(["python -m experiments.bench_two_processes", *map(_last_part, arguments)]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), one for each of two processes",
        "network": "gloo on the loopback interface",
        "jax": jax.__version__,
        "settings": dataclasses.asdict(settings),
        "lines": [dataclasses.asdict(line) for line in lines],
    }


def _last_part(argument: str) -> str:
    """Remove the folders from an argument that is a path."""
    return argument if argument.startswith("-") else Path(argument).name
