"""The figure of the advice: the modelled time of every strategy, the gain of the best by size and by skew, and the
trade-off of predictors: accuracy, overhead and gain, as in MoE-GPS (arXiv 2506.07366)."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, PHASES, planner_style
from relibra_jax.evaluation.advice import Advice
from relibra_jax.evaluation.predictor_prices import PredictorPrice
from relibra_jax.evaluation.thresholds import PAYS, Point


def draw_advice(
    path: Path,
    advice: Sequence[Advice],
    sizes: Sequence[Point],
    skews: Sequence[Point],
    predictors: Sequence[PredictorPrice],
    title: str,
) -> None:
    """Draw the modelled time of every strategy, the gain of the best by tokens of a rank and by skew, and predictors.

    Args:
        path: the PNG file to write.
        advice: the price of every strategy; the one that does nothing comes first.
        sizes: the gain of the best strategy, by tokens of a rank.
        skews: the gain of the best strategy, by the imbalance under static placement.
        predictors: the prices of the predictors; the one that predicts nothing comes first.
        title: the setting that was priced.
    """
    strategies = max(3.0, 1.6 + 0.26 * len(advice))
    figure, axes = plt.subplot_mosaic(
        [["time", "size"], ["time", "skew"], ["predictors", "predictors"]],
        figsize=(11, 5 + strategies),
        width_ratios=[1.25, 1],
        height_ratios=[strategies / 2, strategies / 2, 3.4],
        layout="constrained",
    )
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left", parse_math=False)
    _draw_times(axes["time"], advice)
    _draw_gain(axes["size"], sizes, "tokens of a rank in a micro-batch")
    _draw_gain(axes["skew"], skews, "imbalance under static placement")
    _draw_predictors(axes["predictors"], predictors)
    axes["size"].set_xscale("log")
    axes["skew"].annotate(
        f"dotted: {PAYS:.0%}, from which it pays",
        (1, PAYS),
        xycoords=axes["skew"].get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#6a737c",
    )
    save_figure(figure, path)


def _draw_times(bars: Axes, advice: Sequence[Advice]) -> None:
    """Draw the modelled time of every strategy, one below the other."""
    rows = range(len(advice))
    computing = [each.seconds - each.transfers for each in advice]
    transfers = [each.transfers for each in advice]
    bars.barh(rows, computing, color=PHASES["home"], height=0.68, label="layers")
    bars.barh(
        rows,
        transfers,
        left=computing,
        color=PHASES["transfer"],
        height=0.68,
        label="transfers of experts, not hidden",
    )
    best = min(rows, key=lambda row: advice[row].seconds)
    for row, each in enumerate(advice):
        bars.annotate(
            f"{each.seconds:.2f}",
            (each.seconds, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            fontweight="bold" if row == best else "normal",
        )
    bars.set_yticks(rows, [f"{each.strategy.label} ({each.strategy.foresight})" for each in advice])
    bars.set_ylim(len(advice) - 0.4, -0.6)
    bars.set_xlim(0, 1.1 * max(each.seconds for each in advice))
    bars.set_xlabel("modelled seconds of a batch (in brackets: foresight)", fontsize=9)
    bars.tick_params(labelsize=8)
    bars.tick_params(axis="y", length=0)
    bars.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    bare(bars, "x")


def _draw_gain(panel: Axes, points: Sequence[Point], label: str) -> None:
    """Draw the gain of the best strategy over a quantity."""
    style = planner_style("relibra")
    at, gain = [point.at for point in points], [point.gain for point in points]
    panel.plot(at, gain, color=style.colour, marker=style.marker, linewidth=1.8)
    panel.axhline(PAYS, color=INK, linewidth=0.8, linestyle=":")
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.set_xlabel(label, fontsize=9)
    panel.set_ylabel("gain of the best strategy", fontsize=9)
    panel.tick_params(labelsize=8)
    bare(panel, "y")


def _draw_predictors(panel: Axes, predictors: Sequence[PredictorPrice]) -> None:
    """Draw the modelled time of a batch by parts for every predictor, in the order of their accuracy, and the gain."""
    first, *others = predictors
    ordered = [first, *sorted(others, key=lambda each: each.accuracy or 0.0)]
    places, below = range(len(ordered)), [0.0] * len(ordered)
    for name, phase in (("compute", "home"), ("communication", "crossing"), ("overhead", "transfer")):
        parts = [getattr(each, name) for each in ordered]
        panel.bar(places, parts, bottom=below, color=PHASES[phase], width=0.6, label=name)
        below = [start + part for start, part in zip(below, parts, strict=True)]
    for place, each in enumerate(ordered):
        panel.annotate(
            f"{each.gain:+.1%}",
            (place, each.seconds),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    labels = [
        "\n".join(textwrap.wrap(each.name, 12))
        + ("" if each.accuracy is None else f"\nright: {each.accuracy:.0%}")
        for each in ordered
    ]
    panel.set_xticks(places, labels)
    panel.set_ylim(0, 1.12 * max(each.seconds for each in ordered))
    panel.set_xlabel(
        "predictors of loads, by accuracy (above: gain over none, with the overhead of the predictor)",
        fontsize=9,
    )
    panel.set_ylabel("modelled seconds of a batch", fontsize=9)
    panel.tick_params(labelsize=8)
    panel.tick_params(axis="x", length=0)
    panel.legend(fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    bare(panel, "y")
