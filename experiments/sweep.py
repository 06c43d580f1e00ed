"""A sweep: every variant trains in a folder of its own, and the same command resumes a stopped one."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.rl.configs import Train
from experiments.rl.devices import host_devices
from experiments.rl.dry_run import dry_run
from experiments.rl.metrics_log import read_seed
from experiments.rl.report import SUMMARY_FILE
from experiments.rl.run_folder import SETTINGS_FILE, UNSAVED_SETTINGS, saved_config
from experiments.rl.train import run_train
from experiments.sweep_report import RESULTS, write_report


def run_sweep(name: str, variants: Mapping[str, Train], out: Path, console: Console, *, command: str) -> None:
    """Start or resume the runs that are not complete, and compare all variants with the first.

    Args:
        name: the name or file of the configuration.
        variants: the settings of each variant's runs, with its folder in ``out``.
        out: the folder of the sweep. Every variant has a folder in it, and ``sweep.json`` and ``sweep.png`` are the
            results.
        console: the console for progress and the table.
        command: the command that made the sweep, for the results.

    Raises:
        ValueError: if a folder contains runs with other settings, or a variant cannot be run here.
    """
    previous = json.loads((out / RESULTS).read_text())["summary"] if (out / RESULTS).exists() else {}
    if previous.keys() - variants.keys():
        raise ValueError(f"{out} is a sweep of other variants, {', '.join(previous)}; choose another --out")
    # Before the first run, so that no time is lost if another one cannot be made.
    host_devices(max(config.num_ranks for config in variants.values()))
    for variant, config in variants.items():
        _started(config)
        if refusals := dry_run(config, plan=False).refusals:
            raise ValueError(f"variant {variant}: {refusals[0]}")
    for variant, config in variants.items():
        console.print(f"variant {variant}", style="bold", highlight=False)
        if not run_variant(name, config, console):
            console.print("the run has stopped and is saved; run the same command to resume the sweep")
            return
    lines = {variant: read_runs(out / variant) for variant in variants}
    write_report(lines, out, console, command=command)


def run_variant(name: str, config: Train, console: Console) -> bool:
    """Start or resume the runs of a variant, if they are not complete.

    Args:
        name: the name or file of the configuration.
        config: the settings, with the folder of the variant in ``out``.
        console: the console for progress.

    Returns:
        Whether they are complete.

    Raises:
        ValueError: if the folder contains runs with other settings.
    """
    settings, folder = _started(config), config.out
    assert folder is not None, "every variant has a folder"
    if not (folder / SUMMARY_FILE).exists():
        run_train(settings, console, name=name)
    return (folder / SUMMARY_FILE).exists()


def read_runs(folder: Path) -> list[list[dict[str, Any]]]:
    """Read the metrics of the runs in a folder, one list of lines for each seed.

    Raises:
        ValueError: if the folder contains no runs.
    """
    return [read_seed(folder, seed) for seed in saved_config(folder).seeds]


def _started(config: Train) -> Train:
    """Return the settings that start the runs in a variant's folder, or resume those that are there."""
    folder = config.out
    assert folder is not None
    if not (folder / SETTINGS_FILE).exists():
        return config
    saved = saved_config(folder)
    unsaved = {name: getattr(config, name) for name in UNSAVED_SETTINGS}
    if dataclasses.replace(saved, **unsaved) != config:
        raise ValueError(f"{folder} contains runs with other settings; choose another --out")
    return dataclasses.replace(config, out=None, resume=folder)
