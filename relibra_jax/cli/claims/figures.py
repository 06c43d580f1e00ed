"""Figures of the claims: every planner beside the balanced run, and what it takes for balancing to pay."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from relibra_jax.atomic_write import write_atomically
from relibra_jax.cli.claims.cells import CellResult
from relibra_jax.cli.claims.report import SWEEPS, varied
from relibra_jax.cli.claims.results import Results
from relibra_jax.cli.figures import GRID, INK
from relibra_jax.planning.planners import PLANNERS

OURS, THEIRS = "#1f6fb2", "#c7a27c"


def draw_planners(path: Path, cells: Sequence[CellResult]) -> None:
    """Draw the modelled speed of every row of some cells, the balanced run being 1.

    Args:
        path: the PNG file to write.
        cells: the cells, a panel each.
    """
    height = 1 + 0.24 * max(len(cell.rows) for cell in cells)
    figure, panels = plt.subplots(
        1, len(cells), figsize=(5.2 * len(cells), height), layout="constrained", squeeze=False
    )
    for axes, cell in zip(panels[0], cells, strict=True):
        speed = {name: row["share_of_balanced"] for name, row in cell.rows.items()}
        names = sorted(speed, key=speed.__getitem__)
        colours = [THEIRS if name in PLANNERS and not name.startswith("relibra") else OURS for name in names]
        axes.barh(names, [speed[name] for name in names], color=colours, height=0.66)
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(f"{cell.trace}, {cell.model}, {cell.ranks} ranks", fontsize=9, loc="left")
        axes.set_xlabel("modelled speed, balanced run = 1")
        axes.tick_params(labelsize=7)
        _bare(axes, "x")
    _save(figure, path)


def draw_sweeps(path: Path, results: Results) -> None:
    """Draw modelled speed over what each sweep varies, on recorded routing.

    Args:
        path: the PNG file to write.
        results: results that hold every sweep.
    """
    figure, panels = plt.subplots(
        1, len(SWEEPS), figsize=(3.1 * len(SWEEPS), 3), layout="constrained", sharey=True
    )
    for axes, (section, what) in zip(panels, SWEEPS.items(), strict=True):
        cells = [cell for cell in results.of(section, synthetic=False) if not cell.skipped]
        for name in dict.fromkeys(name for cell in cells for name in cell.rows):
            axes.plot(
                [varied(section, cell) for cell in cells],
                [cell.rows[name]["share_of_balanced"] for cell in cells],
                marker="o",
                markersize=3,
                label=name,
            )
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(what, fontsize=8)
        axes.tick_params(labelsize=7)
        _bare(axes, "y")
    panels[0].set_ylabel("modelled speed, balanced run = 1", fontsize=8)
    panels[0].legend(fontsize=7, frameon=False)
    _save(figure, path)


def _bare(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def _save(figure: plt.Figure, path: Path) -> None:
    with write_atomically(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)
