"""Kept measurements, as speeds of one contender over another: what of the claims was run rather than modelled."""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

WHOLE_UPDATES: Final = "updates of two processes"


class Measurement(NamedTuple):
    """Seconds of contenders that ran interleaved under one setting."""

    where: str
    """What ran, on what, and on which trace."""
    seconds: dict[str, float]
    """The median seconds of each contender."""
    file: str
    """The file that keeps it, which names its command and date."""

    def gain(self, base: str, better: str) -> float | None:
        """How many times as fast one contender ran as another; None unless both ran."""
        if base not in self.seconds or better not in self.seconds:
            return None
        return self.seconds[base] / self.seconds[better]


def read_measured(folder: Path) -> list[Measurement]:
    """Read what ``python -m experiments.stragglers`` and ``experiments.bench_two_processes`` have kept.

    Args:
        folder: the folder of ``stragglers.json`` and ``two_processes.json``, either of which may be missing.

    Raises:
        ValueError: if a file is there and is not what these programs write.
    """
    readers = {"stragglers.json": _stragglers, "two_processes.json": _two_processes}
    found = []
    for name, reader in readers.items():
        path = folder / name
        if not path.is_file():
            continue
        try:
            found += [Measurement(*each, name) for each in reader(json.loads(path.read_text()))]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not what its benchmark writes: {error!r}") from error
    return found


def _stragglers(kept: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    return [
        (f"expert compute, slowest ranks, {table['ranks']}, {table['trace']}", table["seconds"])
        for table in kept["tables"]
        if not table["synthetic"]
    ]


def _two_processes(kept: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    settings: dict[tuple[str, int, str], dict[str, float]] = {}
    for line in kept["lines"]:
        if line["seconds"]:
            place = (line["path"], line["micro_batches"], line["trace"])
            settings.setdefault(place, {})[line["contender"].lower()] = float(np.median(line["seconds"]))
    return [
        (f"{WHOLE_UPDATES}, {path}, {count} micro-batches, {trace}", seconds)
        for (path, count, trace), seconds in settings.items()
    ]
