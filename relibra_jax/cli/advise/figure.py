"""The figure of the advice: every strategy, and what the best gains over size and skew."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from relibra_jax.atomic_write import write_atomically
from relibra_jax.cli.advise.pricing import Advice
from relibra_jax.cli.advise.thresholds import PAYS, Point
from relibra_jax.cli.palette import GRID, INK

BLUE, RED = "#1f6fb2", "#b5541c"


def draw_advice(
    path: Path, advice: Sequence[Advice], sizes: Sequence[Point], skews: Sequence[Point], title: str
) -> None:
    """Draw what every strategy takes, and the gain of the best over tokens of a rank and over skew.

    Args:
        path: the PNG file to write.
        advice: every strategy, the one that does nothing first.
        sizes: the best by tokens of a rank.
        skews: the best by the imbalance under static placement.
        title: what was priced.
    """
    figure, axes = plt.subplot_mosaic(
        [["time", "size"], ["time", "skew"]], figsize=(11, 1.6 + 0.24 * len(advice)), layout="constrained"
    )
    figure.suptitle(title, color=INK, fontsize=9)
    bars = axes["time"]
    names = [f"{each.strategy.label} ({each.strategy.foresight})" for each in advice][::-1]
    computing = [each.seconds - each.transfers for each in advice][::-1]
    bars.barh(names, computing, color=BLUE, height=0.66, label="layers")
    bars.barh(
        names,
        [each.transfers for each in advice][::-1],
        left=computing,
        color=RED,
        height=0.66,
        label="experts travelling, exposed",
    )
    bars.set_xlabel("modelled seconds of a batch")
    bars.tick_params(labelsize=7)
    bars.legend(fontsize=7, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    for panel, points, what in (
        (axes["size"], sizes, "tokens of a rank in a micro-batch"),
        (axes["skew"], skews, "imbalance under static placement"),
    ):
        panel.plot([point.at for point in points], [100 * point.gain for point in points], "o-", color=BLUE)
        panel.axhline(100 * PAYS, color=INK, linewidth=0.8, linestyle=":")
        panel.set_xlabel(what, fontsize=8)
        panel.set_ylabel("gain, %", fontsize=8)
    axes["size"].set_xscale("log")
    for panel in axes.values():
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x" if panel is bars else "y", color=GRID, linewidth=0.7)
        panel.set_axisbelow(True)
    with write_atomically(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)
