"""The runs of a comparison: every variant trains in a folder of its own, and the same command resumes a stopped one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from jaxtyping import Float
from rich.console import Console

from experiments.rl.configs import Train
from experiments.rl.metrics_log import read_metrics
from experiments.rl.run_folder import saved_config
from experiments.rl.train import run_train

FINISHED: Final = "summary.json"
"""The file that `experiments.rl.train.run_train` writes when the runs of all seeds are complete."""


def run_variants(
    variants: Mapping[str, Train], console: Console
) -> dict[str, list[list[dict[str, Any]]]] | None:
    """Start or resume the runs that are not complete, and read the metrics of all.

    Args:
        variants: the settings of each variant's runs, with the folder of each in ``out``.
        console: the console for progress.

    Returns:
        The metrics of every variant, a list of lines for each seed. None if a run has stopped and is saved.

    Raises:
        ValueError: if a folder contains runs with other settings.
    """
    settings = {variant: _resumed(config) for variant, config in variants.items()}
    lines = {}
    for variant, config in variants.items():
        assert config.out is not None, "every variant has a folder"
        if not (config.out / FINISHED).exists():
            run_train(settings[variant], console, name=variant)
        if not (config.out / FINISHED).exists():
            console.print("the run has stopped and is saved; run the same command to resume it")
            return None
        files = [config.out / f"seed-{seed}" / "metrics.jsonl" for seed in config.seeds]
        lines[variant] = [read_metrics(file) for file in files]
    return lines


def _resumed(config: Train) -> Train:
    """Return the settings that resume the runs in the folder, or ``config`` if there are none."""
    assert config.out is not None
    if not (config.out / "config.json").exists():
        return config
    saved = saved_config(config.out)
    if dataclasses.replace(saved, out=config.out) != config:
        raise ValueError(f"{config.out} contains runs with other settings; choose another --out")
    return dataclasses.replace(saved, resume=config.out)


def mean_and_error(values: Float[np.ndarray, "runs *shape"]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the mean over runs, and its standard error: the deviation of a sample over the root of their number.

    Args:
        values: the values of every run.

    Returns:
        The mean, and its error. None in place of the error for a single run.

    >>> [float(number) for number in mean_and_error(np.array([0.5, 0.75]))]
    [0.625, 0.125]
    """
    mean = np.asarray(values.mean(0))
    return mean, np.asarray(values.std(0, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def command_of(module: str, config: Any) -> str:
    """Return the command of a comparison, with the options that differ from their defaults, without ``--out``.

    Args:
        module: the name of the module.
        config: the settings of the comparison, a dataclass.
    """
    fields = dataclasses.fields(config)
    changed = {
        field.name: getattr(config, field.name)
        for field in fields
        if field.name != "out" and getattr(config, field.name) != field.default
    }
    options = [f"--{name.replace('_', '-')} {_text(value)}" for name, value in changed.items()]
    return " ".join([f"python -m {module}", *options])


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
