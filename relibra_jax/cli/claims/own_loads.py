"""Rivals on the kind of load that they publish, beside their published figures."""

from typing import NamedTuple


class OwnLoad(NamedTuple):
    """One rival on one kind of load; figures as they are printed."""

    planner: str
    """The rival."""
    load: str
    """The load and the ranks."""
    published: str
    """The published figure."""
    reached: str
    """What its row reaches here."""
    relibra: str
    """What ReLibra's replication reaches with the same homes and slots."""
    source: str
    """Where the figure is published."""


def run_own_loads() -> list[OwnLoad]:
    """Run every rival that publishes figures on loads that can be drawn."""
    return []
