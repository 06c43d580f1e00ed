"""A sweep: every variant trains in a folder of its own, and the same command resumes a stopped one."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from experiments.rl.configs import Train
from experiments.rl.metrics_log import read_metrics
from experiments.rl.run_folder import UNSAVED_SETTINGS, saved_config
from experiments.rl.train import run_train
from experiments.sweep_report import write_report

FINISHED: Final = "summary.json"
"""The file that `experiments.rl.train.run_train` writes when the runs of all seeds are complete."""


def run_sweep(name: str, variants: Mapping[str, Train], out: Path, console: Console, *, command: str) -> None:
    """Start or resume the runs that are not complete, and compare all variants with the first.

    Args:
        name: the name or file of the configuration.
        variants: the settings of each variant's runs, without a folder.
        out: the folder of the sweep. Every variant has a folder in it, and ``sweep.json`` and ``sweep.png`` are the
            results.
        console: the console for progress and the table.
        command: the command that made the sweep, for the results.

    Raises:
        ValueError: if a folder contains runs with other settings.
    """
    folders = {variant: out / variant for variant in variants}
    # Before the first run, so that no time is lost if another folder has other settings.
    settings = {variant: _started(config, folders[variant]) for variant, config in variants.items()}
    for variant, config in settings.items():
        if not (folders[variant] / FINISHED).exists():
            console.print(f"variant {variant}", style="bold", highlight=False)
            run_train(config, console, name=name)
        if not (folders[variant] / FINISHED).exists():
            console.print("the run has stopped and is saved; run the same command to resume the sweep")
            return
    lines = {variant: read_runs(folder) for variant, folder in folders.items()}
    write_report(lines, out, console, command=command)


def read_runs(folder: Path) -> list[list[dict[str, Any]]]:
    """Read the metrics of the runs in a folder, one list of lines for each seed.

    Raises:
        ValueError: if the folder contains no runs.
    """
    return [read_metrics(folder / f"seed-{seed}" / "metrics.jsonl") for seed in saved_config(folder).seeds]


def _started(config: Train, folder: Path) -> Train:
    """Return the settings that start the runs in a folder, or resume those that are there."""
    if not (folder / "config.json").exists():
        return dataclasses.replace(config, out=folder)
    saved = saved_config(folder)
    unsaved = {name: getattr(config, name) for name in UNSAVED_SETTINGS}
    if dataclasses.replace(saved, **unsaved) != config:
        raise ValueError(f"{folder} contains runs with other settings; choose another --out")
    return dataclasses.replace(config, resume=folder)
