"""``python -m experiments.compare_runs A B ...``: what differs between runs: settings, code and metrics.

A and B are folders of runs, with ``config.json`` and ``seed-*``. The others are compared with the first one.
Settings that are the same in all runs are left out.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.markup import escape
from rich.table import Table

from experiments.program import run_program, wide_console
from experiments.rl.provenance import START, read_starts
from experiments.rl.run_folder import UNSAVED_SETTINGS, saved_config
from experiments.rl.settings import flat, plain_settings
from experiments.sweep import read_runs
from experiments.sweep_report import EXPLAINED, draw, make_table, summarise


@dataclasses.dataclass(frozen=True)
class CompareRuns:
    """Compare training runs."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """The folders of the runs."""
    figure: Path | None = None
    """The PNG file for a figure. None draws none."""


def main(options: CompareRuns) -> None:
    """Print what differs between runs.

    Raises:
        ValueError: if there are fewer than two folders, or one contains no run.
    """
    names = short_names(options.folders)
    settings = {
        name: {
            key: value
            for key, value in flat(plain_settings(saved_config(folder))).items()
            if key not in UNSAVED_SETTINGS
        }
        for name, folder in zip(names, options.folders, strict=True)
    }
    starts = {name: read_starts(folder) for name, folder in zip(names, options.folders, strict=True)}
    console = wide_console()
    console.print(_differences("Settings that differ", settings) or "Settings that differ: none")
    if all(starts.values()):
        console.print(_differences("Code that differs", _codes(starts)) or "Code that differs: none")
    else:
        console.print("Code that differs: not recorded")
    lines = {name: read_runs(folder) for name, folder in zip(names, options.folders, strict=True)}
    console.print(make_table(summarise(lines)))
    console.print(EXPLAINED, style="dim")
    if options.figure is not None:
        draw(options.figure, lines)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the ends of paths that tell the folders apart.

    Raises:
        ValueError: if there are fewer than two folders, or one is given twice.

    >>> short_names([Path("out/a/grpo"), Path("out/b/grpo")])
    ['a/grpo', 'b/grpo']
    """
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < max(len(paths), 2):
        raise ValueError(f"folders {' '.join(map(str, folders))}: give two or more different ones")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _codes(starts: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, str]]:
    """Return the versions of packages and sources that the starts of every run had."""
    result = {}
    for name, each in starts.items():
        keys = [key for key in each[-1] if key not in START]
        result[name] = {key: ", ".join(dict.fromkeys(str(start.get(key)) for start in each)) for key in keys}
    return result


def _differences(title: str, values: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """Make a table of the names whose values are not the same in all runs. None if there is none."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for head in ("", *values):
        table.add_column(escape(head))
    for name in dict.fromkeys(name for run in values.values() for name in run):
        cells = [run.get(name) for run in values.values()]
        if any(cell != cells[0] for cell in cells):
            table.add_row(escape(name), *("" if cell is None else escape(str(cell)) for cell in cells))
    return table if table.row_count else None


if __name__ == "__main__":
    sys.exit(run_program(main, CompareRuns, description=__doc__))
