"""The figures of the claims: every system beside the balanced run, and the sizes from which balancing pays."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from experiments.claims.cells import CellResult
from experiments.claims.report import SWEEPS, varied
from experiments.claims.results import Results
from experiments.claims.rivals import OWN, best_rival, best_rows
from experiments.claims.rows import ASSIGNED, WITH_ALL, WITH_RESIDENTS, is_reconstruction
from experiments.claims.rows import PARTS as ABLATIONS
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, PARTS, SYSTEMS, planner_style, system_of

RESIDENTS: Final = "residents"
"""The group of ReLibra's rows with a resident slot."""
BEST_RIVAL: Final = "best rival"
"""The group of the fastest row of all systems of others."""
LABELS: Final = {name: system.label for name, system in SYSTEMS.items()} | {
    RESIDENTS: "ReLibra, one resident per rank",
    PARTS: "parts of ReLibra",
}
"""The groups of rows, each of which is one line of a figure."""
PARTS_OF_RELIBRA: Final = tuple(name for name in ABLATIONS if name != ASSIGNED)
DIM: Final = "#6a737c"


def draw_planners(path: Path, cells: Sequence[CellResult]) -> None:
    """Draw the modelled speed of every system, the balanced run being 100%.

    Each system has one line, with a bar for one row and a dot for each of its other rows. The bar of a system of others
    is its fastest row. One more line has the fastest row of all these systems.

    Args:
        path: the PNG file to write.
        cells: the cells, a panel each, with the same rows.
    """
    groups = [_by_group(cell.rows) for cell in cells]
    bars = [_bar_rows(cell.rows) for cell in cells]
    first = groups[0]
    order = sorted(first, key=lambda name: (name == PARTS, -first[name].get(bars[0].get(name, ""), 0)))
    figure, panels = plt.subplots(
        1,
        len(cells),
        figsize=(2.4 + 4.3 * len(cells), 1.6 + 0.36 * len(order)),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    separator = "\n" if len(cells) == 1 else "; "  # one panel is too narrow for one line
    title = f"Modelled speed of expert-parallel layers in training{separator}a perfectly balanced run is 100%"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    fastest = max(max(rows.values()) for group in groups for rows in group.values())
    for axes, cell, group, bar_of in zip(panels[0], cells, groups, bars, strict=True):
        for line, name in enumerate(order):
            _draw_group(axes, line, bar_of.get(name), group[name])
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        nodes, local = cell.ranks.split("x")
        axes.set_title(f"{nodes} nodes x {local} ranks", fontsize=11, loc="left", color=INK)
        axes.set_xlim(0, max(fastest, 1) + 0.17)
        axes.set_ylim(len(order) - 0.4, -0.7)
        axes.set_yticks(range(len(order)), [_label(name, first[name]) for name in order], fontsize=10)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=9, colors=DIM)
        bare(axes, "x")
        axes.spines["left"].set_visible(False)
    for label in panels[0][0].get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("ReLibra") else "normal")
    figure.supxlabel(
        separator.join(_footnote(cells[0])), x=0.01, ha="left", fontsize=8.5, color=DIM, parse_math=False
    )
    save_figure(figure, path)


def _footnote(cell: CellResult) -> list[str]:
    """Return the parts of the line below the panels: the setting, and the meaning of bars, dots and the star."""
    parts = [
        f"{cell.routing}, {cell.model} on {cell.cell['costs']['cluster']}",
        "bars: systems of others at their best; dots: other settings of a system",
    ]
    if any(is_reconstruction(name) for name in cell.rows):
        parts.append("* written from the text of its paper, whose code was not available")
    return parts


def _by_group(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the speed of every row, under the group to which the row belongs."""
    groups: dict[str, dict[str, float]] = {}
    for name, row in rows.items():
        group = system_of(name)
        if name in (WITH_RESIDENTS, WITH_ALL):
            group = RESIDENTS
        elif name in PARTS_OF_RELIBRA:
            group = PARTS
        groups.setdefault(group, {})[name] = row["share_of_balanced"]
    rival = best_rival(rows)
    return groups if rival is None else groups | {BEST_RIVAL: {rival: rows[rival]["share_of_balanced"]}}


def _bar_rows(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the row that each group's bar stands for, by group."""
    bars = {OWN: OWN, RESIDENTS: WITH_RESIDENTS} | best_rows(rows)
    rival = best_rival(rows)
    return bars if rival is None else bars | {BEST_RIVAL: rival}


def _label(group: str, rows: Mapping[str, float]) -> str:
    return LABELS.get(group, group) + "*" * all(is_reconstruction(name) for name in rows)


def _draw_group(axes: Axes, line: int, main_row: str | None, rows: Mapping[str, float]) -> None:
    """Draw one line of a panel: the bar, the dots, and the number in a column at the right."""
    if main_row is not None and main_row in rows:
        axes.barh(line, rows[main_row], color=planner_style(system_of(main_row)).colour, height=0.7)
        weight = "bold" if main_row.startswith("relibra") else "normal"
        axes.annotate(
            f"{rows[main_row]:.0%}",
            (1, line),
            xycoords=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=10,
            fontweight=weight,
            color=INK,
        )
    other_speeds = [speed for name, speed in rows.items() if name != main_row]
    axes.plot(
        other_speeds,
        [line] * len(other_speeds),
        "o",
        markersize=4.5,
        markeredgewidth=0.8,
        markerfacecolor="white",
        markeredgecolor=INK,
    )


def draw_sweeps(path: Path, results: Results) -> None:
    """Draw modelled speed over the number that each sweep varies, on recorded routing.

    Args:
        path: the PNG file to write.
        results: results that hold every sweep.
    """
    figure, panels = plt.subplots(
        1, len(SWEEPS), figsize=(3.1 * len(SWEEPS), 3.3), layout="constrained", sharey=True
    )
    for axes, (section, quantity) in zip(panels, SWEEPS.items(), strict=True):
        cells = [cell for cell in results.of(section, synthetic=False) if not cell.skipped]
        places = np.arange(len(cells))
        for name in dict.fromkeys(name for cell in cells for name in cell.rows):
            style = planner_style(name)
            axes.plot(
                places,
                [cell.rows[name]["share_of_balanced"] for cell in cells],
                color=style.colour,
                marker=style.marker,
                linestyle=style.line,
                markersize=5,
                linewidth=1.8,
                label=LABELS[system_of(name)],
            )
        axes.set_xticks(places, [str(varied(section, cell)) for cell in cells])
        axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_xlabel(quantity, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        bare(axes, "y")
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("modelled speed, balanced run = 100%", fontsize=9)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        fontsize=9,
        frameon=False,
        loc="outside upper left",
        ncols=3,
    )
    save_figure(figure, path)
