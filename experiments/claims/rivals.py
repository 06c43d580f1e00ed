"""The systems of others at their best: of each system the fastest of its rows, and the fastest of all of them."""

from collections.abc import Mapping
from typing import Any

from relibra_jax.cli.palette import system_of
from relibra_jax.planning.planners import PLANNERS

OWN = "relibra"
"""The system whose rows are no rivals."""


def best_rows(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Find the fastest row of every system of others, among the rows that fit the memory of a rank.

    Args:
        rows: the numbers of a cell, by row.

    Returns:
        The name of the fastest row, by system. A system without a row that fits is missing.

    >>> speeds = {"static": 0.8, "eplb": 0.85, "eplb_repacked": 0.9, "relibra": 0.95}
    >>> best_rows({name: {"share_of_balanced": speed, "fits": True} for name, speed in speeds.items()})
    {'static': 'static', 'eplb': 'eplb_repacked'}
    """
    best: dict[str, str] = {}
    for name, row in rows.items():
        system = system_of(name)
        if name not in PLANNERS or system == OWN or not row["fits"]:
            continue
        if system not in best or row["share_of_balanced"] > rows[best[system]]["share_of_balanced"]:
            best[system] = name
    return best


def best_rival(rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the name of the fastest row of all systems of others; None if none fits the memory of a rank.

    Args:
        rows: the numbers of a cell, by row.
    """
    names = best_rows(rows).values()
    return max(names, key=lambda name: rows[name]["share_of_balanced"]) if names else None
