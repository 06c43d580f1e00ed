"""Jobs from the metrics of training runs of this project, which record step durations (docs/guides/metrics.md)."""

import math
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.multiplex.jobs import SECONDS_MAX, Job
from relibra_jax.support.json_text import parse_json

LEARN: Final = "learn"
"""The kind of the metrics lines that describe a whole step."""
ROLLOUT_TIMES: Final = ("time/generate_seconds",)
"""The metrics that add up to the time of a step on the rollout pool."""
TRAINING_TIMES: Final = (
    "time/plan_seconds",
    "time/size_seconds",
    "time/migrate_seconds",
    "time/recompute_seconds",
    "time/score_wait_seconds",
    "time/update_seconds",
)
"""The metrics that add up to the time of a step on the training pool. Rewards are scored in parallel with planning and
recompute, so only the time that the step waits for them counts."""


class StepDurations(NamedTuple):
    """The durations of the learning steps of a run, in seconds."""

    rollout: Float[np.ndarray, " steps"]
    """The seconds of generation in each step."""
    training: Float[np.ndarray, " steps"]
    """The seconds of the rest of each step: planning, migration, recompute and updates."""
    seeds: int
    """The number of seeds (files) of the run. The first step of each seed includes compilation."""


def read_durations(folder: str | os.PathLike) -> StepDurations:
    """Read the durations of all learning steps from ``seed-*/metrics.jsonl`` in the folder of a run.

    Args:
        folder: the folder of the run.

    Raises:
        ValueError: if there are no such files, a line is not a line of metrics, or no line describes a learning step.

    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> line = {"kind": "learn"} | dict.fromkeys([*ROLLOUT_TIMES, *TRAINING_TIMES], 2.0)
    >>> (folder / "seed-0").mkdir()
    >>> _ = (folder / "seed-0" / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
    >>> read_durations(folder)
    StepDurations(rollout=array([2.]), training=array([12.]), seeds=1)
    """
    files = sorted(Path(folder).glob("seed-*/metrics.jsonl"))
    if not files:
        raise ValueError(f"{folder} has no files seed-*/metrics.jsonl")
    lines = [
        (f"{file}, line {number}", line)
        for file in files
        for number, line in enumerate(_whole_lines(file), 1)
    ]
    steps = [durations for place, line in lines if (durations := _durations(place, line)) is not None]
    if not steps:
        raise ValueError(f"{folder}: none of the {len(lines)} lines in {len(files)} files has kind {LEARN!r}")
    rollout, training = np.array(steps).T
    return StepDurations(rollout, training, len(files))


def job_of_durations(name: str, durations: StepDurations, *, quantile: float, **about: Any) -> Job:
    """Make a job from recorded durations of steps.

    The conservative duration of a phase is a quantile over all steps: the smallest recorded duration that this share of
    steps does not exceed. Of n steps, n * (1 - ``quantile``) may be longer. That must be at least one step for each
    seed, because the first step of a seed includes compilation. With a quantile of 1 the longest step is the
    conservative one, even if it includes compilation.

    Args:
        name: the name of the job.
        durations: the recorded durations.
        quantile: the share of steps that do not exceed the conservative duration, above 0 and at most 1.
        **about: the other fields of `Job`: ``rollout_nodes``, ``training_nodes`` and more.

    Raises:
        ValueError: if there are too few steps for the quantile, or a number is out of its range.

    >>> steps = StepDurations(rollout=np.array([9.0, 1.0, 2.0]), training=np.array([8.0, 3.0, 2.0]), seeds=1)
    >>> job_of_durations("a", steps, quantile=0.6, rollout_nodes=1, training_nodes=1).alone_seconds
    5.0
    >>> job_of_durations("a", steps, quantile=0.95, rollout_nodes=1, training_nodes=1)
    Traceback (most recent call last):
    ValueError: a: quantile=0.95 needs at least 20 learning steps, but there are 3; use a smaller quantile
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile={quantile} must be above 0 and at most 1")
    steps = len(durations.rollout)
    least = durations.seeds * math.ceil(round(1 / (1 - quantile), 6)) if quantile < 1 else 1
    if steps < least:
        seeds = f" of {durations.seeds} seeds" if durations.seeds > 1 else ""
        raise ValueError(
            f"{name}: quantile={quantile} needs at least {least} learning steps, but there are {steps}{seeds};"
            " use a smaller quantile"
        )
    rollout, training = (
        float(np.quantile(seconds, quantile, method="inverted_cdf"))
        for seconds in (durations.rollout, durations.training)
    )
    return Job(name=name, rollout_seconds=rollout, training_seconds=training, **about)


def _whole_lines(file: Path) -> list[str]:
    """Return the complete lines of a file. A run may still be writing it, so an unfinished last line is left out."""
    try:
        return file.read_bytes().rpartition(b"\n")[0].decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error})") from None


def _durations(place: str, line: str) -> tuple[float, float] | None:
    """Return the seconds of rollout and training in a line of metrics, or None if it describes no learning step."""
    try:
        metrics = parse_json(line)
        if metrics["kind"] != LEARN:
            return None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{place} is not a line of metrics") from None
    for name in (*ROLLOUT_TIMES, *TRAINING_TIMES):
        seconds = metrics.get(name)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 <= seconds <= SECONDS_MAX
        ):
            raise ValueError(
                f"{place}: {name}={seconds!r} must be a number of seconds from 0 to {SECONDS_MAX}, a year"
            )
    return sum(metrics[name] for name in ROLLOUT_TIMES), sum(metrics[name] for name in TRAINING_TIMES)
