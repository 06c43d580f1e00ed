"""Jobs described by what the steps of our own training runs took (docs/guides/metrics.md)."""

import json
import math
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float

from relibra_jax.sharing.jobs import SECONDS_MAX, Job

LEARN: Final = "learn"
"""The kind of the lines that describe a whole step."""
ROLLOUT_TIMES: Final = ("time/generate_seconds",)
TRAINING_TIMES: Final = (
    "time/plan_seconds",
    "time/size_seconds",
    "time/migrate_seconds",
    "time/recompute_seconds",
    "time/score_wait_seconds",
    "time/update_seconds",
)
"""What of a step occupies either pool. Rewards are scored beside planning and recompute, so that a step is longer by
what it waits for them alone."""


class StepDurations(NamedTuple):
    """What the learning steps of a run took, seconds."""

    rollout: Float[np.ndarray, " steps"]
    """Generation."""
    training: Float[np.ndarray, " steps"]
    """All that follows it: planning, migration, recompute and updates."""
    seeds: int
    """The files that they are from, each of which began with a step that compiles."""


def read_durations(folder: str | os.PathLike) -> StepDurations:
    """The durations of all learning steps in ``seed-*/metrics.jsonl`` of a run's folder.

    Args:
        folder: the folder of the run.

    Raises:
        ValueError: if there are no such files, a line is not one of metrics, or none is of a learning step.
    """
    files = sorted(Path(folder).glob("seed-*/metrics.jsonl"))
    if not files:
        raise ValueError(f"{folder}: no seed-*/metrics.jsonl in this folder")
    lines = [
        (f"{file}, line {number}", line)
        for file in files
        for number, line in enumerate(_whole_lines(file), 1)
    ]
    steps = [durations for place, line in lines if (durations := _durations(place, line)) is not None]
    if not steps:
        raise ValueError(f"{folder}: none of {len(lines)} lines in {len(files)} files is of kind {LEARN}")
    rollout, training = np.array(steps).T
    return StepDurations(rollout, training, len(files))


def job_from_run(folder: str | os.PathLike, *, quantile: float = 0.95, **about: Any) -> Job:
    """A job that takes as long as a run's learning steps, with what its metrics do not say.

    Args:
        folder: the folder of the run, which is also the job's name.
        quantile: the share of steps that do not exceed the conservative duration, above 0 and at most 1.
        **about: further fields of Job: ``rollout_nodes``, ``training_nodes`` and others.

    Raises:
        ValueError: if the folder has no learning steps or too few for the quantile, or a number is out of its range.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> line = {"kind": "learn"} | dict.fromkeys([*ROLLOUT_TIMES, *TRAINING_TIMES], 2.0)
    >>> (folder / "seed-0").mkdir()
    >>> _ = (folder / "seed-0" / "metrics.jsonl").write_text(20 * (json.dumps(line) + "\\n"))
    >>> job = job_from_run(folder, rollout_nodes=1, training_nodes=1)
    >>> job.rollout_seconds, job.training_seconds
    (2.0, 12.0)
    """
    return job_of_durations(str(folder), read_durations(folder), quantile=quantile, **about)


def job_of_durations(name: str, durations: StepDurations, *, quantile: float, **about: Any) -> Job:
    """A job that takes as long as recorded steps.

    The conservative duration of a phase is a quantile over all steps: the least of the recorded durations that this
    share of them does not exceed. So of n steps, n * (1 - ``quantile``) may be longer: these must be at least one of
    each seed, since the first step of a seed compiles. With a quantile of 1 the longest step is the conservative one,
    whichever it is.

    Args:
        name: the job's name.
        durations: the recorded steps.
        quantile: the share of steps that do not exceed the conservative duration, above 0 and at most 1.
        **about: further fields of Job: ``rollout_nodes``, ``training_nodes`` and others.

    Raises:
        ValueError: if there are too few steps for the quantile, or a number is out of its range.

    >>> steps = StepDurations(rollout=np.array([9.0, 1.0, 2.0]), training=np.array([8.0, 3.0, 2.0]), seeds=1)
    >>> job_of_durations("a", steps, quantile=0.6, rollout_nodes=1, training_nodes=1).alone_seconds
    5.0
    >>> job_of_durations("a", steps, quantile=0.95, rollout_nodes=1, training_nodes=1)
    Traceback (most recent call last):
    ValueError: a: 3 learning steps are too few for a quantile of 0.95, at least 20; give a smaller --quantile
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile={quantile} must be above 0 and at most 1")
    steps = len(durations.rollout)
    least = durations.seeds * math.ceil(round(1 / (1 - quantile), 6)) if quantile < 1 else 1
    if steps < least:
        seeds = f" of {durations.seeds} seeds" if durations.seeds > 1 else ""
        raise ValueError(
            f"{name}: {steps} learning steps{seeds} are too few for a quantile of {quantile}, at least {least};"
            " give a smaller --quantile"
        )
    rollout, training = (
        float(np.quantile(seconds, quantile, method="inverted_cdf"))
        for seconds in (durations.rollout, durations.training)
    )
    return Job(name=name, rollout_seconds=rollout, training_seconds=training, **about)


def _whole_lines(file: Path) -> list[str]:
    """The lines of a file that a run may still be writing: not the last, where it has no end yet."""
    try:
        return file.read_bytes().rpartition(b"\n")[0].decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not a file of UTF-8 ({error})") from None


def _durations(place: str, line: str) -> tuple[float, float] | None:
    """The seconds of both phases in a line of metrics; None if it is of another kind."""
    try:
        metrics = json.loads(line)
        if metrics["kind"] != LEARN:
            return None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{place}: not a line of metrics") from None
    for name in (*ROLLOUT_TIMES, *TRAINING_TIMES):
        seconds = metrics.get(name)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 <= seconds <= SECONDS_MAX
        ):
            raise ValueError(
                f"{place}: {name} is {seconds!r}, not a number of seconds of at most {SECONDS_MAX}, a year"
            )
    return sum(metrics[name] for name in ROLLOUT_TIMES), sum(metrics[name] for name in TRAINING_TIMES)
