"""Figures of what planners do, drawn from the same outcomes as the tables."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.simulate import Outcome
from relibra_jax.files import whole_file

INK, GRID = "#222222", "#dddddd"
COLOURS = ["#9a9a9a", "#c7a27c", "#d98c3f", "#b5541c", "#e3b23c", "#7fb0d6", "#1f6fb2", "#2a9d5c", "#6b4ea0"]


def compare_figure(path: Path, outcomes: list[Outcome], title: str) -> None:
    """Imbalance of every planner: over the whole batch, and micro-batch by micro-batch.

    Args:
        path: of the PNG.
        outcomes: one for each planner, drawn in this order.
        title: what was run.
    """
    colour = {outcome.planner: COLOURS[i % len(COLOURS)] for i, outcome in enumerate(outcomes)}
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=[1, 1.35], layout="constrained"
    )
    figure.suptitle(title, color=INK, fontsize=11)

    names = [outcome.planner for outcome in outcomes][::-1]
    means = np.array([outcome.imbalance for outcome in outcomes])[::-1]
    tails = np.array([outcome.imbalance_p95 for outcome in outcomes])[::-1]
    left.barh(names, means - 1, left=1, color=[colour[name] for name in names], height=0.62)
    left.hlines(names, means, tails, color=INK, linewidth=1)
    left.plot(tails, names, "|", color=INK, markersize=7)
    for name, mean, tail in zip(names, means, tails, strict=True):
        left.annotate(f"{mean:.3f}", (max(mean, tail), name), (5, 0), textcoords="offset points", va="center")
    left.set_xlim(1, 1 + 1.2 * (tails.max() - 1 + 1e-3))
    left.set_xlabel("imbalance over the batch (line: 95th percentile)")

    for outcome in outcomes:
        load = outcome.rank_load.astype(float)
        over_layers = load.max((2, 3)).sum(1) / np.maximum(load.mean((2, 3)).sum(1), 1)
        right.plot(over_layers, color=colour[outcome.planner], linewidth=1.6)
    right.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    right.set_xlabel("micro-batch (colours as on the left)")
    right.set_ylabel("imbalance, all layers")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if axes is left else "y", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
    with whole_file(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)
