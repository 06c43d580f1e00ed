"""What a run has written so far, read from its folder while it goes or afterwards.

Nothing is required of a line but its step and its kind, so the metrics of earlier versions can be read as well.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from experiments.rl.metrics import LEARN
from experiments.rl.metrics_log import METRICS_FILE, SAMPLES_FILE, read_metrics
from experiments.rl.run_folder import SETTINGS_FILE
from relibra_jax.support.json_text import parse_json

Line = dict[str, Any]
"""A line of metrics."""
Number = int | float
Points = list[tuple[Number, Number]]
"""The values of a metric, with their steps."""
SEED_FOLDER: Final = re.compile(r"seed-(\d+)")


class SeedData(NamedTuple):
    """What one seed has written."""

    seed: int
    lines: list[Line]
    """Its lines of metrics."""
    samples: list[Line]
    """Its lines of sample texts."""
    written: float
    """When it last wrote metrics, in seconds since 1970."""

    def of_kind(self, kind: str) -> list[Line]:
        """Return the lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def last(self) -> Line | None:
        """The last learning step. None before the first."""
        return next((line for line in reversed(self.lines) if line["kind"] == LEARN), None)


class RunData(NamedTuple):
    """What a run has written."""

    folder: Path
    settings: dict[str, Any]
    """The settings in ``config.json``."""
    seeds: list[SeedData]
    """The seeds that have begun, in their order."""

    @property
    def total_steps(self) -> int:
        """The steps of a seed in warm-up and learning together. 0 if the settings do not say."""
        counts = [self.settings.get(name) for name in ("warmup_steps", "steps")]
        return sum(count for count in counts if isinstance(count, int))

    @property
    def finished(self) -> bool:
        """Whether all seeds have written all their lines, of which an evaluation after the last step is the last."""
        total, seeds = self.total_steps, self.settings.get("seeds") or [seed.seed for seed in self.seeds]
        last_step = total if self.settings.get("evaluation_batches") else total - 1
        ends = {seed.seed: seed.lines[-1]["step"] for seed in self.seeds if seed.lines}
        return bool(total and seeds) and all(ends.get(seed, -1) >= last_step for seed in seeds)

    @property
    def latest(self) -> SeedData | None:
        """The seed that wrote last. None if none has begun."""
        return max(self.seeds, key=lambda seed: seed.written, default=None)


def read_run(folder: Path) -> RunData:
    """Read what a run has written so far.

    Args:
        folder: the folder of the run.

    Raises:
        ValueError: if the folder contains no run, or a file of it cannot be read.
    """
    config = folder / SETTINGS_FILE
    files = {
        int(match[1]): path
        for path in folder.glob(f"seed-*/{METRICS_FILE}")
        if (match := SEED_FOLDER.fullmatch(path.parent.name))
    }
    if not config.is_file() and not files:
        raise ValueError(
            f"{folder}: no run, because it has neither {SETTINGS_FILE} nor seed-*/{METRICS_FILE}"
        )
    settings = _parse(config) if config.is_file() else {}
    return RunData(folder, settings, [_read_seed(seed, files[seed]) for seed in sorted(files)])


def values_of(lines: Iterable[Line], name: str) -> Points:
    """Return the values of a metric with their steps, without lines that have no finite number of it.

    >>> values_of([{"step": 0, "a": None}, {"step": 1, "a": 2}, {"step": 2}], "a")
    [(1, 2)]
    """
    return [(line["step"], line[name]) for line in lines if is_number(line.get(name))]


def list_of(line: Line | None, name: str) -> list[Number]:
    """Return a metric that is a list of finite numbers; empty if the line has none.

    >>> list_of({"a": [1, 2.5]}, "a"), list_of({"a": [1, None]}, "a"), list_of(None, "a")
    ([1, 2.5], [], [])
    """
    values = [] if line is None else line.get(name)
    return values if isinstance(values, list) and all(map(is_number, values)) else []


def is_number(value: Any) -> TypeGuard[Number]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_seed(seed: int, path: Path) -> SeedData:
    return SeedData(
        seed,
        _read_lines(path, "kind"),
        _read_lines(path.with_name(SAMPLES_FILE), "samples"),
        path.stat().st_mtime,
    )


def _read_lines(path: Path, key: str) -> list[Line]:
    """Read the lines that have a step and this key."""
    try:
        lines = read_metrics(path)
    except ValueError as error:
        raise ValueError(f"{path}: not lines of JSON ({error})") from error
    return [line for line in lines if isinstance(line, dict) and key in line and is_number(line.get("step"))]


def _parse(path: Path) -> dict[str, Any]:
    try:
        settings = parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not the settings of a run ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: not the settings of a run, but a {type(settings).__name__}")
    return settings
