"""The figure of a comparison: balance, modelled time and the course of every planner over a batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, PHASES, planner_style
from relibra_jax.evaluation import Outcome
from relibra_jax.planning.planners import PLANNERS

LINES: Final = ("static", "eplb", "lplb", "ultraep", "relibra")
"""The planners that get a line of their own where there are too many for all to have one."""
MOST_LINES: Final = 8
PARTS: Final = {
    "attention": ("attention", PHASES["attention"]),
    "compute": ("experts", PHASES["home"]),
    "exchange": ("exchange", PHASES["inside"]),
    "gather": ("buffers", PHASES["gather"]),
    "exposed": ("replicas, not hidden", PHASES["transfer"]),
    "push": ("residents", PHASES["resident"]),
    "reorder": ("reorder", PHASES["crossing"]),
    "rest": ("rest", PHASES["rest"]),
}
"""The parts of a batch's time (`relibra_jax.cost.batch_time.BatchTime`) with their labels and colours."""


def compare_figure(path: Path, outcomes: list[Outcome], title: str) -> None:
    """Draw the imbalance and the modelled time of every planner, and the imbalance of some by micro-batch.

    Args:
        path: the PNG file to write.
        outcomes: the outcome of each planner, in the order of the rows.
        title: the setting that was run.
    """
    figure, (left, middle, right) = plt.subplots(
        1,
        3,
        figsize=(13, max(4.2, 1.6 + 0.23 * len(outcomes))),
        width_ratios=[1, 1, 1.05],
        gridspec_kw={"wspace": 0.05},
        layout="constrained",
    )
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left", parse_math=False)
    _draw_imbalance(left, outcomes)
    _draw_time(middle, outcomes)
    _draw_micro_batches(right, outcomes)
    save_figure(figure, path)


def _draw_imbalance(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    names = [outcome.planner for outcome in outcomes]
    means = np.array([outcome.imbalance for outcome in outcomes])
    tails = np.array([outcome.imbalance_p95 for outcome in outcomes])
    axes.barh(names, means - 1, left=1, color=[planner_style(name).colour for name in names], height=0.66)
    axes.hlines(names, means, tails, color=INK, linewidth=1)
    axes.plot(tails, names, "|", color=INK, markersize=7)
    for name, mean, tail in zip(names, means, tails, strict=True):
        at = (max(mean, tail), name)
        axes.annotate(f"{mean:.3f}", at, (5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlim(1, 1 + 1.22 * (tails.max() - 1 + 1e-3))
    _rows(axes, len(names))
    axes.set_xlabel("imbalance, max / mean of rank load\n(line: 95th percentile of layers and micro-batches)")


def _draw_time(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    names = [outcome.planner for outcome in outcomes]
    start = np.zeros(len(names))
    for part, (label, colour) in PARTS.items():
        seconds = np.array([outcome.modelled_parts[part] for outcome in outcomes])
        if seconds.max() > 0:
            axes.barh(names, seconds, left=start, color=colour, height=0.66, label=label)
        start += seconds
    for name, total in zip(names, start.tolist(), strict=True):
        axes.annotate(
            f"{total:#.3g}".rstrip("."),
            (total, name),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(0, 1.13 * max(start.max(), 1e-9))
    _rows(axes, len(names))
    axes.set_yticklabels([])
    axes.set_xlabel("modelled seconds of a batch")
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)


def _rows(axes: Axes, count: int) -> None:
    axes.set_ylim(count - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelsize=9)
    bare(axes, "x")


def _draw_micro_batches(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    drawn = set(_with_lines([outcome.planner for outcome in outcomes]))
    for outcome in outcomes:
        if outcome.planner not in drawn:
            continue
        load, style = outcome.rank_load.astype(float), planner_style(outcome.planner)
        over_layers = load.max((2, 3)).sum(1) / np.maximum(load.mean((2, 3)).sum(1), 1)
        axes.plot(
            over_layers,
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            linewidth=1.8,
            markersize=5 if style.line == "-" else 8,
            markerfacecolor=style.colour if style.line == "-" else "none",
            markevery=max(1, len(over_layers) // 12),
            label=outcome.planner,
        )
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":", label="even")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("micro-batch")
    axes.set_ylabel("imbalance over all layers")
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    bare(axes, "y")


def _with_lines(names: Sequence[str]) -> Sequence[str]:
    """Return the planners with a line: all if they are few, else `LINES` and those from outside the table."""
    if len(names) <= MOST_LINES:
        return names
    return [name for name in names if name in LINES or name not in PLANNERS][:MOST_LINES]
