"""The results of a comparison: a table of measured and modelled speed, a table of ratios, and a figure."""

import datetime
import os
import platform
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table

from experiments.miniature.contenders import baseline_of
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, SERIES


class Speed(NamedTuple):
    """The speed of a contender, relative to the forced balanced run of the same round."""

    measured: float
    """The median over the rounds of updates, in each of which every contender runs once."""
    least: float
    """In the round in which it was slowest."""
    most: float
    """In the round in which it was fastest."""
    modelled: float | None
    """From the cost model with the measured rates; None for layers of another project, which it does not know."""
    predicted: float | None
    """From what the `Balancer` of the run expects of its plan (`PreparedBatch.modelled_times`); None likewise."""

    @property
    def error(self) -> float | None:
        """The modelled speed over the measured one, less 1."""
        return None if self.modelled is None else self.modelled / self.measured - 1


class Agreement(NamedTuple):
    """How well the cost model predicts the measured speeds of all contenders but the forced balanced run."""

    rank_correlation: float
    """Spearman's correlation of the orders of contenders."""
    median_error: float
    """The median of the errors' sizes."""
    largest_error: float
    """The largest of the errors' sizes."""


def speeds(rows: Mapping[str, Any]) -> dict[str, Speed]:
    """Return the speed of every contender.

    Args:
        rows: the results of `experiments.miniature.updates`, with the seconds of updates and modelled parts.

    >>> rows = {"static": {"seconds": [4.0, 5.0, 8.0], "modelled": {"compute": 8.0}, "predicted": 8.75}}
    >>> rows["forced balanced"] = {"seconds": [4.0, 4.0, 4.0], "modelled": {"compute": 7.0}, "predicted": 7.0}
    >>> speeds(rows)["static"]
    Speed(measured=0.8, least=0.5, most=1.0, modelled=0.875, predicted=0.8)
    """
    base = rows[baseline_of(rows)]

    def speed(row: Mapping[str, Any]) -> Speed:
        rounds = [even / own for even, own in zip(base["seconds"], row["seconds"], strict=True)]
        measured = statistics.median(rounds), min(rounds), max(rounds)
        if row["modelled"] is None:
            return Speed(*measured, None, None)
        modelled = sum(base["modelled"].values()) / sum(row["modelled"].values())
        return Speed(*measured, modelled, base["predicted"] / row["predicted"])

    return {name: speed(row) for name, row in rows.items()}


def agreement(of: Mapping[str, Speed]) -> Agreement:
    """Compare modelled and measured speeds.

    Args:
        of: the speeds, as `speeds` returns them.

    >>> static, even = Speed(0.5, 0.5, 0.5, 0.6, 0.6), Speed(1, 1, 1, 1, 1)
    >>> agreement({"static": static, "EPLB": Speed(0.8, 0.8, 0.8, 0.8, 0.8), "forced balanced": even})
    Agreement(rank_correlation=1.0, median_error=0.1, largest_error=0.2)
    """
    base = baseline_of(of)
    pairs = [
        (speed.measured, speed.modelled)
        for name, speed in of.items()
        if name != base and speed.modelled is not None
    ]
    errors = [abs(modelled / measured - 1) for measured, modelled in pairs]
    orders = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    correlation = float(np.asarray(np.corrcoef(orders.T))[0, 1]) if len(pairs) > 1 else float("nan")
    return Agreement(round(correlation, 3), round(statistics.median(errors), 4), round(max(errors), 4))


def make_tables(report: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a report: ratios, speeds, bytes, and phases if there are any.

    Args:
        report: the results of `experiments.miniature.updates`.
    """
    rows = report["rows"]
    tables = [_ratios_table(report), _speed_table(rows), _bytes_table(rows)]
    return [*tables, _phases_table(rows)] if rows[baseline_of(rows)]["phases"] else tables


def _ratios_table(report: Mapping[str, Any]) -> Table:
    table = new_table(f"{report['settings']['twin']}: ratios of times", "ratio", "real", "here")
    for name, real in report["there"].items():
        table.add_row(name, f"{real:.2f}", f"{report['here'][name]:.2f}")
    return table


def _speed_table(rows: Mapping[str, Any]) -> Table:
    columns = ("s per update", "speed", "by round", "modelled", "error", "by its Balancer")
    table = new_table(f"Speed, {baseline_of(rows)} = 100%", "contender", *columns)
    for name, speed in speeds(rows).items():
        table.add_row(
            name,
            f"{statistics.median(rows[name]['seconds']):.2f}",
            f"{speed.measured:.1%}",
            f"{speed.least:.1%} to {speed.most:.1%}",
            "" if speed.modelled is None else f"{speed.modelled:.1%}",
            "" if speed.error is None else f"{speed.error:+.1%}",
            "" if speed.predicted is None else f"{speed.predicted:.1%}",
        )
    return table


def _bytes_table(rows: Mapping[str, Any]) -> Table:
    columns = ("slow, sent", "busiest rank", "needed", "fast, sent", "busiest rank", "needed")
    table = new_table("MB of an update over each network", "contender", *columns)
    for name, row in rows.items():
        cells = []
        for network in ("slow", "fast"):
            sent = np.array(row[f"{network}_bytes"]) / 1e6
            cells += [sent.sum(), sent.max(), row["needed"][network] / 1e6]
        table.add_row(name, *(f"{cell:.0f}" for cell in cells))
    return table


def _phases_table(rows: Mapping[str, Any]) -> Table:
    names = list(rows[baseline_of(rows)]["phases"])
    title = "Seconds of an update by phase, mean of the ranks, waits included; phases may overlap"
    table = new_table(title, "contender", *(name.replace("_", " ") for name in names))
    for name, row in rows.items():
        table.add_row(name, *(f"{np.mean(row['phases'][phase]):.2f}" for phase in names))
    return table


def new_table(title: str, *columns: str) -> Table:
    """Return a table without rows, with the first column to the left and the others, numbers, to the right."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=not number)
    return table


def draw_speeds(path: Path, report: Mapping[str, Any]) -> None:
    """Draw measured beside modelled speed of every contender, with the range of the rounds.

    Args:
        path: the PNG file to write.
        report: the results of `experiments.miniature.updates`.
    """
    of = speeds(report["rows"])
    at = np.arange(len(of))[::-1]
    measured, least, most = (100 * np.array([each[part] for each in of.values()]) for part in range(3))
    modelled = [(y, 100 * each.modelled) for y, each in zip(at, of.values(), strict=True) if each.modelled]
    figure, axes = plt.subplots(figsize=(8, 0.35 * len(of) + 1.3), layout="constrained")
    axes.axvline(100, color=INK, linewidth=0.8, linestyle=":", label=f"{baseline_of(of)} run")
    axes.errorbar(
        measured,
        at,
        xerr=[measured - least, most - measured],
        fmt="o",
        color=SERIES[0],
        capsize=3,
        linewidth=1.2,
        label="measured: median and range of the rounds",
    )
    heights, shares = zip(*modelled, strict=True)
    axes.plot(
        shares,
        heights,
        "D",
        color=SERIES[1],
        markerfacecolor="none",
        label="modelled with the measured rates",
    )
    axes.set_yticks(at, list(of))
    axes.set_xlabel(f"speed of a whole update, {baseline_of(of)} = 100%")
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
    bare(axes, "x")
    save_figure(figure, path)


def describe_machine() -> dict[str, str]:
    """Return the machine, the date and the version of JAX, for a report."""
    return {
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), Linux {platform.release()}",
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
    }
