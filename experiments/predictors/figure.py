"""The figure of predictors, as MoE-GPS (arXiv 2506.07366) draws them, with a row for each load.

From left to right: the overhead of predicting every token by accuracy, with the exponential through the networks; the
time of the layers by parts, without prediction, with the distribution and with tokens at rising accuracies, over a fast
and over a slow network; and by how much the distribution saves more than the best network that predicts tokens, by
skew, for every speed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from experiments.predictors.prices import DISTRIBUTION, NONE, REPLAY, Priced
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, PHASES, SERIES

PARTS: Final = {
    "attention": "attention",
    "experts": "home",
    "exchange": "crossing",
    "copies": "transfer",
    "predictor": "rest",
}
"""The parts of a time, and their phases in the palette."""


class Row(NamedTuple):
    """One kind of load, at rising skews."""

    name: str
    """The load."""
    skews: list[float]
    """The skews, the last of which is that of the trace."""
    priced: list[list[Priced]]
    """The predictors at each skew."""


def lead(priced: Sequence[Priced], cluster: int, *, published: bool) -> float:
    """Return how much more the distribution saves than the best network, as a share of the time without prediction.

    Args:
        priced: the predictors.
        cluster: the index of the cluster.
        published: whether rightly predicted copies skip dispatch, as in the paper's system.
    """
    by_name = {each.name: each.times[cluster] for each in priced}
    tokens = [each.times[cluster] for each in priced if each.is_network]
    best = min(times.published if published else times.total for times in tokens)
    return (best - by_name[DISTRIBUTION].total) / by_name[NONE].total


def draw_predictors(path: Path, rows: Sequence[Row], speeds: Sequence[float], title: str) -> None:
    """Draw the figure.

    Args:
        path: the PNG file to write.
        rows: the loads.
        speeds: the speeds of the clusters' networks, in GB/s, fastest first.
        title: the setting that was priced.
    """
    figure, axes = plt.subplots(
        len(rows), 4, figsize=(15, 4 * len(rows)), width_ratios=[1, 1.5, 1.5, 1.1], layout="constrained"
    )
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left", parse_math=False)
    for row, (overhead, fast, slow, leads) in zip(rows, axes, strict=True):
        _draw_overhead(overhead, row)
        _draw_times(fast, row, 0, f"{row.name}, network of {speeds[0]:g} GB/s")
        _draw_times(slow, row, len(speeds) - 1, f"{row.name}, network of {speeds[-1]:g} GB/s")
        _draw_leads(leads, row, speeds)
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, frameon=False, ncols=len(labels), loc="outside lower center")
    save_figure(figure, path)


def _draw_overhead(panel: Axes, row: Row) -> None:
    """Draw the time of every predictor of tokens over the time without one, by accuracy."""
    priced, base = row.priced[-1], row.priced[-1][0].times[0].total
    for number, (label, marker, line) in enumerate(
        (("networks, simulated", "o", "-"), ("tables, counted", "s", "none"))
    ):
        chosen = [each for each in priced if each.by_token and each.is_network == (number == 0)]
        panel.plot(
            [each.accuracy or 0.0 for each in chosen],
            [each.times[0].predictor / base for each in chosen],
            color=SERIES[number],
            marker=marker,
            linestyle=line,
            label=label,
        )
    panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.yaxis.set_major_formatter(PercentFormatter(1))
    panel.set_xlabel("token copies predicted right", fontsize=9)
    panel.set_ylabel("overhead, of the time without prediction", fontsize=9)
    panel.set_title(f"{row.name}: accuracy and overhead", fontsize=9, loc="left")
    panel.legend(fontsize=8, frameon=False)
    panel.tick_params(labelsize=8)
    bare(panel, "y")


def _draw_times(panel: Axes, row: Row, cluster: int, title: str) -> None:
    """Draw the time of every predictor by parts, relative to no prediction, in the order of their accuracy."""
    priced = _in_order(row.priced[-1])
    base, places, below = priced[0].times[cluster].total, np.arange(len(priced)), np.zeros(len(priced))
    for part, phase in PARTS.items():
        heights = np.array([getattr(each.times[cluster], part) for each in priced]) / base
        label = "copies of experts, not hidden" if part == "copies" else part
        panel.bar(places, heights, bottom=below, color=PHASES[phase], width=0.7, label=label)
        below += heights
    skipped, upto = (
        np.array([getattr(each.times[cluster], name) for each in priced]) / base
        for name in ("skipped", "layers")
    )
    panel.bar(
        places,
        skipped,
        bottom=upto - skipped,
        width=0.7,
        fill=False,
        hatch="////",
        edgecolor="white",
        linewidth=0,
    )
    tokens = [place for place, each in zip(places, priced, strict=True) if each.by_token]
    panel.plot(
        tokens,
        (below - skipped)[tokens],
        color=INK,
        marker="o",
        markersize=3,
        linewidth=1,
        label="predictions of tokens, if right ones skip dispatch (hatched), as published",
    )
    for place, height in zip(places, below, strict=True):
        panel.annotate(
            f"{height:.2f}",
            (place, height),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    panel.set_xticks(places, [_label(each) for each in priced], fontsize=7, rotation=45, ha="right")
    panel.set_ylim(0, 1.1 * max(below))
    panel.set_ylabel("modelled time, without prediction = 1", fontsize=9)
    panel.set_title(title, fontsize=9, loc="left")
    panel.tick_params(axis="y", labelsize=8)
    bare(panel, "y")


def _draw_leads(panel: Axes, row: Row, speeds: Sequence[float]) -> None:
    """Draw by how much the distribution saves more than the best network, by skew."""
    for number, speed in enumerate(speeds):
        for published, line in ((True, "-"), (False, ":")):
            panel.plot(
                row.skews,
                [lead(priced, number, published=published) for priced in row.priced],
                color=SERIES[number],
                linestyle=line,
                marker="o",
                markersize=3,
                label=f"{speed:g} GB/s" if published else None,
            )
    panel.axhline(0, color=INK, linewidth=0.8)
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.set_xlabel("skew: most popular expert / mean", fontsize=9)
    panel.set_ylabel("lead of the distribution over networks", fontsize=9)
    panel.set_title(
        "above 0 the distribution pays more\n(dotted: no token copy skips dispatch)",
        fontsize=9,
        loc="left",
    )
    panel.legend(fontsize=8, frameon=False, ncols=2, loc="upper left")
    panel.margins(y=0.3)
    panel.tick_params(labelsize=8)
    bare(panel, "y")


def _in_order(priced: Sequence[Priced]) -> list[Priced]:
    """Return no prediction, the distribution, the predictions of tokens by accuracy, and replay."""
    by_name = {each.name: each for each in priced}
    tokens = sorted((each for each in priced if each.by_token), key=lambda each: each.accuracy or 0.0)
    return [by_name[NONE], by_name[DISTRIBUTION], *tokens, by_name[REPLAY]]


def _label(priced: Priced) -> str:
    short = {NONE: "none", DISTRIBUTION: "distribution", REPLAY: "routes known"}
    name = short.get(priced.name, priced.name.removeprefix("a ").split(",")[0])
    return name if not priced.by_token else f"{name}, {priced.accuracy:.0%}"
