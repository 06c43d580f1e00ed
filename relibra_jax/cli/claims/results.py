"""Everything that the report of the claims tells."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from relibra_jax.cli.claims.cells import CellResult
from relibra_jax.cli.claims.measured import Measurement
from relibra_jax.cli.claims.own_loads import OwnLoad


class Results(NamedTuple):
    """What was run, and what was read."""

    about: Mapping[str, str]
    """Command, versions, date, machine."""
    cells: Sequence[tuple[str, CellResult]]
    """The section and the result of every study."""
    own_loads: Sequence[OwnLoad]
    """Rivals on the loads that they publish."""
    measured: Sequence[Measurement]
    """Kept measurements."""
    figures: Mapping[str, str]
    """The files of figures beside the report, with what they show."""

    def of(self, section: str, *, synthetic: bool) -> list[CellResult]:
        """The results of one section, on recorded or on synthetic routing."""
        return [cell for name, cell in self.cells if name == section and cell.synthetic == synthetic]
