"""The results that the report of the claims is written from."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.claims.cells import CellResult
from experiments.claims.measured import Measurement
from experiments.claims.own_loads import OwnLoad


class Results(NamedTuple):
    """Everything that was run or read for one report."""

    about: Mapping[str, str]
    """The command, machine, date, versions and traces of the run."""
    cells: Sequence[tuple[str, CellResult]]
    """The section and the result of every study."""
    own_loads: Sequence[OwnLoad]
    """The results of baselines on the loads of their own publications."""
    measured: Sequence[Measurement]
    """The kept measurements."""
    figures: Mapping[str, str]
    """The captions of the figures beside the report, by file name."""

    def of(self, section: str, *, synthetic: bool) -> list[CellResult]:
        """Return the results of one section, on recorded or on synthetic routing."""
        return [cell for name, cell in self.cells if name == section and cell.synthetic == synthetic]
