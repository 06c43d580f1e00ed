"""Where relibra_jax is behind: published figures that it does not reach, and planners that take less modelled time."""

from typing import Final

from experiments.claims.cells import CellResult
from experiments.claims.published import CLAIMS, Figure, figure_of
from experiments.claims.results import Results
from experiments.claims.rivals import best_rows
from experiments.claims.rows import ASSIGNED, WITH_ALL, WITH_RESIDENTS

AHEAD: Final = 0.005
"""The share by which modelled times must differ for one planner to be ahead of another."""


def behind(results: Results) -> list[str]:
    """List where a published figure is better than relibra_jax's, and where another planner is ahead of ReLibra.

    Args:
        results: the results of all studies.

    Returns:
        One sentence for each place, first on recorded and then on synthetic routing.
    """
    lines = []
    for synthetic in (False, True):
        kind = "synthetic" if synthetic else "recorded"
        for paper in CLAIMS:
            for claim in paper.claims:
                cells = [
                    f"{figure.shown} ({cell.model}, {cell.ranks})"
                    for cell in results.of(paper.section, synthetic=synthetic)
                    if isinstance(figure := figure_of(claim, cell), Figure)
                    and claim.least is not None
                    and figure.value < claim.least
                ]
                if cells:
                    lines.append(
                        f"{claim.text}; published: {claim.published}; relibra_jax on {kind} routing: {', '.join(cells)}"
                    )
        for cell in results.of("headline", synthetic=synthetic):
            lines += _planners_ahead(cell, kind) + _slower_assignments(cell, kind)
    return lines


def _slower_assignments(cell: CellResult, kind: str) -> list[str]:
    """Describe where assigning samples takes more modelled time than assigning them by their lengths."""
    lines = []
    for packed, assigned in (("relibra", ASSIGNED), (WITH_RESIDENTS, WITH_ALL)):
        if {packed, assigned} <= cell.rows.keys():
            gain = cell.rows[packed]["modelled_seconds"] / cell.rows[assigned]["modelled_seconds"] - 1
            if gain < -AHEAD:
                lines.append(
                    f"{assigned} is {-gain:.0%} slower than {packed} on {kind} routing ({cell.model}, {cell.ranks}):"
                    " assigning samples costs more than it gains"
                )
    return lines


def _planners_ahead(cell: CellResult, kind: str) -> list[str]:
    """Describe the systems of others whose best row takes less modelled time than ReLibra."""
    if "relibra" not in cell.rows or not cell.rows["relibra"]["fits"]:
        return []
    own = cell.rows["relibra"]["modelled_seconds"]
    gains = {name: own / cell.rows[name]["modelled_seconds"] - 1 for name in best_rows(cell.rows).values()}
    return [
        f"{name} is {gain:.1%} faster than relibra in modelled time on {kind} routing ({cell.model}, {cell.ranks})"
        for name, gain in gains.items()
        if gain > AHEAD
    ]
