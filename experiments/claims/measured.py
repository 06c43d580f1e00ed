"""Kept measurements: the claims for which whole updates or layers were run and timed, not only modelled."""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from experiments.miniature.contenders import contenders
from relibra_jax.routing.exchange_rules import AUTO

WHOLE_UPDATES: Final = "updates on a miniature"
"""The beginning of ``Measurement.where`` for measurements of whole optimizer updates."""


class Measurement(NamedTuple):
    """Median seconds of planners that ran interleaved under one setting."""

    where: str
    """What was run, on which ranks and on which trace."""
    seconds: dict[str, float]
    """The median seconds of each planner, by its name."""
    file: str
    """The file that keeps the measurement, with its command and date."""

    def gain(self, base: str, better: str) -> float | None:
        """Return the speed of one planner divided by that of another; None unless both ran."""
        if base not in self.seconds or better not in self.seconds:
            return None
        return self.seconds[base] / self.seconds[better]


def read_measured(folder: Path) -> list[Measurement]:
    """Read the kept measurements of ``python -m experiments.stragglers`` and ``experiments.miniature compare``.

    Args:
        folder: the folder of ``stragglers.json`` and ``miniature/*.json``. Any of them may be missing.

    Returns:
        All measurements, in the order of the files.

    Raises:
        ValueError: if a file exists but is not in the format that its program writes.
    """
    paths = [*folder.glob("stragglers.json"), *sorted(folder.glob("miniature/*.json"))]
    measurements = []
    for path in paths:
        read = _stragglers if path.parent == folder else _miniature
        name = str(path.relative_to(folder))
        try:
            measurements += [Measurement(*each, name) for each in read(json.loads(path.read_text()))]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not in the format that its benchmark writes: {error!r}") from error
    return measurements


def _stragglers(kept: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    return [
        (f"expert compute, slowest ranks, {table['ranks']}, {table['trace']}", table["seconds"])
        for table in kept["tables"]
        if not table["synthetic"]
    ]


def _miniature(kept: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    settings, names = kept["settings"], {"forced balanced": "balanced"}
    nodes, ranks = settings["grid"]
    where = f"{WHOLE_UPDATES} of {nodes}x{ranks} ranks, {settings['micro_batches']} micro-batches, {kept['trace']}"
    seconds: dict[str, dict[str, float]] = {}
    for exchange in settings["exchanges"]:
        runs = contenders(settings["replica_slots"], (exchange,))
        seconds[exchange] = {
            names.get(label := name.removesuffix(f", {exchange}"), label.lower()): float(
                np.median(row["seconds"])
            )
            for name, row in kept["rows"].items()
            if name in runs
        }
    return [
        (where if exchange == AUTO else f"{where}, {exchange} exchange", each)
        for exchange, each in seconds.items()
    ]
