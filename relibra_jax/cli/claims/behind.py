"""Where ours is behind: a published figure that is not reached, and a planner that takes less modelled time."""

from typing import Final

from relibra_jax.cli.claims.cells import CellResult
from relibra_jax.cli.claims.published import CLAIMS, Figure, ours_of
from relibra_jax.cli.claims.results import Results
from relibra_jax.cli.claims.rows import ASSIGNED, WITH_ALL, WITH_RESIDENTS
from relibra_jax.planning.planners import PLANNERS

AHEAD: Final = 0.005
"""A planner is ahead of another whose modelled time is longer by more than this."""


def behind(results: Results) -> list[str]:
    """Where a published figure is better than ours, and where another planner is ahead of ReLibra."""
    found = []
    for synthetic in (False, True):
        kind = "synthetic" if synthetic else "recorded"
        for paper in CLAIMS:
            for claim in paper.claims:
                cells = [
                    f"{figure.shown} ({cell.model}, {cell.ranks})"
                    for cell in results.of(paper.section, synthetic=synthetic)
                    if isinstance(figure := ours_of(claim, cell), Figure)
                    and claim.least is not None
                    and figure.value < claim.least
                ]
                if cells:
                    found.append(f"{claim.text}: published {claim.published}; {kind}: {', '.join(cells)}")
        for cell in results.of("headline", synthetic=synthetic):
            found += _planners_ahead(cell, kind) + _assignments_that_lose(cell, kind)
    return found


def _assignments_that_lose(cell: CellResult, kind: str) -> list[str]:
    """Where assigning samples takes more modelled time than leaving them as they are packed."""
    found = []
    for packed, assigned in (("relibra", ASSIGNED), (WITH_RESIDENTS, WITH_ALL)):
        if {packed, assigned} <= cell.rows.keys():
            gain = cell.rows[packed]["modelled_seconds"] / cell.rows[assigned]["modelled_seconds"] - 1
            if gain < -AHEAD:
                found.append(
                    f"{assigned} is {-gain:.0%} slower than {packed}: assigning samples costs more than it gains;"
                    f" {kind}: {cell.model}, {cell.ranks}"
                )
    return found


def _planners_ahead(cell: CellResult, kind: str) -> list[str]:
    """Planners of the table whose modelled time is shorter than ReLibra's."""
    if "relibra" not in cell.rows or not cell.rows["relibra"]["fits"]:
        return []
    own = cell.rows["relibra"]["modelled_seconds"]
    ahead = {
        name: own / row["modelled_seconds"] - 1
        for name, row in cell.rows.items()
        if name in PLANNERS and row["fits"] and row["modelled_seconds"] * (1 + AHEAD) < own
    }
    return [
        f"{name} is {gain:.1%} faster than relibra in modelled time; {kind}: {cell.model}, {cell.ranks}"
        for name, gain in ahead.items()
    ]
