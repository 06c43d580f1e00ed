"""The comparison of runs with several settings, over seeds: a table, a figure and ``sweep.json``."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.learning_curves import (
    Curve,
    decoding_steps_to,
    mean_and_error,
    mean_curve,
    over_decoding_steps,
    read_curve,
)
from experiments.rl.metrics import LEARN
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, SERIES
from relibra_jax.support.atomic_write import write_json

type Lines = Sequence[Mapping[str, Any]]
"""The metrics of a run, one mapping for each step."""
RESULTS: Final = "sweep.json"
"""The file of the results."""
MARKERS: Final = "os^Dv*"
LARGEST: Final = 3
"""The position of the largest value among the quantiles of a metric, after 50, 90 and 99%."""


def imbalance(line: Mapping[str, Any]) -> float | None:
    """Return the imbalance of a step's updates as they ran: by the plan, or live without replay."""
    live = line.get("balance/imbalance_live")
    return line.get("balance/imbalance") if live is None else live


def _modelled(line: Mapping[str, Any]) -> float | None:
    planned = "plan" if line.get("balance/imbalance_live") is None else "staying"
    seconds = line.get(f"time/modelled_{planned}_seconds")
    return None if seconds is None else 1e3 * seconds


def _imbalance_recompute(line: Mapping[str, Any]) -> float | None:
    # A recompute without a number of its own ran under the plans of the updates.
    own = line.get("balance/imbalance_recompute")
    return imbalance(line) if own is None else own


def _quantile(position: int) -> Callable[[Mapping[str, Any]], float | None]:
    def read(line: Mapping[str, Any]) -> float | None:
        quantiles = line.get("mismatch/log_prob_quantiles")
        return None if quantiles is None else quantiles[position]

    return read


class Row(NamedTuple):
    """A row of the table: one number for each step, and how the steps of a run are summed up."""

    head: str
    form: str
    read: Callable[[Mapping[str, Any]], float | None]
    sum_up: Callable[..., Any] = np.mean


ROWS: Final[Mapping[str, Row]] = {
    "mismatch": Row("mismatch", "{:.4f}", lambda line: line.get("mismatch/log_prob")),
    "mismatch_99": Row("mismatch, 99%", "{:.3f}", _quantile(2)),
    "mismatch_largest": Row("mismatch, largest", "{:.2f}", _quantile(LARGEST), np.max),
    "routing_changed": Row("routing changed", "{:.1%}", lambda line: line.get("routing/changed_share")),
    "clipped": Row("clipped", "{:.1%}", lambda line: line.get("policy/clipped_share")),
    "kl": Row("KL of the updates", "{:.4f}", lambda line: line.get("policy/kl")),
    "skipped": Row("skipped updates", "{:.0f}", lambda line: line.get("policy/skipped"), np.sum),
    "imbalance_recompute": Row("imbalance, recompute", "{:.3f}", _imbalance_recompute),
    "imbalance": Row("imbalance, updates", "{:.3f}", imbalance),
    "imbalance_static": Row("imbalance, static", "{:.3f}", lambda line: line.get("balance/imbalance_static")),
    "modelled_milliseconds": Row("modelled updates, ms", "{:.3f}", _modelled),
    "step_seconds": Row("step, s", "{:.2f}", lambda line: line.get("time/step_seconds"), np.median),
}
"""The rows that are made of the metrics of learning steps. Runs of earlier versions lack some."""
DRAWN: Final = ("mismatch", "routing_changed", "imbalance")
"""The rows that the figure shows over steps, if they vary."""
CURVE_ROWS: Final = {
    "reward_start": ("reward at the start", "{:.3f}"),
    "reward": ("at equal tokens", "{:.3f}"),
    "reward_end": ("at the end", "{:.3f}"),
    "decoding_steps": ("decoding steps", "{:,.0f}"),
    "decoding_steps_to_first": ("to the first's reward", "{:.2f}"),
    "slots_used_share": ("slots used", "{:.2f}"),
    "explained_variance": ("explained variance", "{:.2f}"),
}
"""Head and format of the rows that are made of learning curves."""
EXPLAINED: Final = (
    "Means, with standard errors over seeds. Rewards are those of evaluations: after the warm-up, at the tokens that"
    " every run has run in rollouts, recomputes and updates, and at the end. Decoding steps: of all rollouts until"
    " those tokens; to the first's reward: until the mean reward is that of the first variant at those tokens, over"
    " the first's own. Slots used: share of samples x decoding steps in which a token was sampled. Explained variance:"
    " of the critic, in the second half. All other rows are means over learning steps, of docs/guides/metrics.md, but"
    " for the largest mismatch, the sum of skipped updates and the median time of a step, which is measured on this"
    " machine. Imbalance of recompute and updates is max / mean of rank load as they ran, and static that of the"
    " same batches with experts where they started. Modelled: the updates of one epoch on the cluster that the run"
    " names, under the plan; without replay at the homes of the batch before, without replicas."
)


def write_report(lines: Mapping[str, Sequence[Lines]], out: Path, console: Console, *, command: str) -> None:
    """Compare variants: print the table, and write ``sweep.json`` and ``sweep.png``.

    Args:
        lines: the metrics of every variant, for each seed.
        out: the folder for the files.
        console: the console.
        command: the command that made the runs, for the file.
    """
    numbers = summarise(lines)
    curves = {variant: [read_curve(run)._asdict() for run in runs] for variant, runs in lines.items()}
    write_json(out / RESULTS, {"command": command, "summary": numbers, "curves": curves})
    draw(out / "sweep.png", lines)
    console.print(make_table(numbers))
    console.print(EXPLAINED, style="dim")
    console.print(
        f"numbers: {out / 'sweep.json'}\nfigure: {out / 'sweep.png'}", highlight=False, soft_wrap=True
    )


def summarise(lines: Mapping[str, Sequence[Lines]]) -> dict[str, dict[str, Any]]:
    """Compare the runs of several variants.

    Args:
        lines: the metrics of every variant, for each seed. Others are compared with the first variant.

    Returns:
        For every variant its numbers by name, each with mean, standard error over the seeds (None for one seed) and
        the values by seed, or None where the runs have no such number; and ``tokens``, at which the variants are
        compared.
    """
    curves = {variant: [read_curve(run) for run in runs] for variant, runs in lines.items()}
    first = next(iter(curves.values()))
    evaluated = all(curve.tokens for of_seeds in curves.values() for curve in of_seeds)
    tokens = (
        min(curve.tokens[-1] for of_seeds in curves.values() for curve in of_seeds) if evaluated else None
    )
    summary = {}
    for variant, runs in lines.items():
        values = dict.fromkeys(CURVE_ROWS) | _compare(curves[variant], first, tokens)
        values |= {name: [_sum_up(row, run) for run in runs] for name, row in ROWS.items()}
        summary[variant] = {"tokens": tokens, **{name: _with_error(value) for name, value in values.items()}}
    return summary


def _compare(curves: Sequence[Curve], first: Sequence[Curve], tokens: int | None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "slots_used_share": [curve.slots_used_share for curve in curves],
        "explained_variance": [curve.explained_variance for curve in curves],
    }
    if tokens is None:
        return values
    # Both ends of the share are read from mean curves over decoding steps, so that of the first is 1.
    goal = min(
        np.mean([_at(curve, "reward", tokens) for curve in first]), over_decoding_steps(first).mean.max()
    )
    reached, baseline = (decoding_steps_to(each, float(goal)) for each in (curves, first))
    return {
        **values,
        "reward_start": [curve.reward[0] for curve in curves],
        "reward": [_at(curve, "reward", tokens) for curve in curves],
        "reward_end": [curve.reward[-1] for curve in curves],
        "decoding_steps": [_at(curve, "decoding_steps", tokens) for curve in curves],
        "decoding_steps_to_first": [reached / baseline] if reached and baseline else None,
    }


def _at(curve: Curve, name: str, tokens: int) -> float:
    return float(np.interp(tokens, curve.tokens, getattr(curve, name)))


def _sum_up(row: Row, run: Lines) -> float | None:
    values = [value for line in run if line["kind"] == LEARN and (value := row.read(line)) is not None]
    return float(row.sum_up(values)) if values else None


def _with_error(values: Sequence[float | None] | None) -> dict[str, Any] | None:
    known = [value for value in values or () if value is not None]
    if not known:
        return None
    mean, error = mean_and_error(np.array(known, np.float64))
    return {"mean": float(mean), "error": None if error is None else float(error), "by_seed": values}


def make_table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """Make a table with a column for every variant.

    Args:
        summary: the numbers of every variant, as `summarise` returns them.
    """
    tokens = next(iter(summary.values()))["tokens"]
    title = "Means over seeds" + ("" if tokens is None else f"; equal tokens: {tokens:,}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for variant in summary:
        table.add_column(variant, justify="right", no_wrap=True)
    rows = CURVE_ROWS | {name: (row.head, row.form) for name, row in ROWS.items()}
    for name, (head, form) in rows.items():
        cells = [numbers[name] for numbers in summary.values()]
        if any(cell is not None for cell in cells):
            table.add_row(head, *(_cell(cell, form) for cell in cells))
    return table


def _cell(cell: Mapping[str, Any] | None, form: str) -> str:
    shown = () if cell is None else (cell["mean"], cell["error"])
    return " ± ".join(form.format(value) for value in shown if value is not None)


def draw(path: Path, lines: Mapping[str, Sequence[Lines]]) -> None:
    """Draw rewards, with bands of one standard error, and measurements of steps: mismatch, changed routes, imbalance.

    Args:
        path: the PNG file to write.
        lines: the metrics of every run of every variant.
    """
    styles = {
        variant: (SERIES[at % len(SERIES)], MARKERS[at % len(MARKERS)]) for at, variant in enumerate(lines)
    }
    steps = {name: values for name in DRAWN if not _is_constant(values := _means(lines, ROWS[name]))}
    columns = 2 + len(steps)
    figure, panels = plt.subplots(1, columns, figsize=(3.8 * columns, 4), layout="constrained")
    against = (("tokens", 1e3, "tokens run, thousands"), ("decoding_steps", 1.0, "decoding steps"))
    for axes, (column, unit, label) in zip(panels, against, strict=False):
        for variant, runs in lines.items():
            curves = [read_curve(run) for run in runs]
            if not curves[0].tokens:
                continue
            colour, marker = styles[variant]
            places, mean, error = mean_curve(
                [getattr(curve, column) for curve in curves], [curve.reward for curve in curves]
            )
            axes.plot(places / unit, mean, color=colour, marker=marker, markersize=4, label=variant)
            if error is not None:
                axes.fill_between(
                    places / unit, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0
                )
        axes.set(xlabel=label, ylabel="reward on evaluation prompts")
    for axes, (name, values) in zip(panels[2:], steps.items(), strict=True):
        for variant, (at, mean) in values.items():
            axes.plot(at, mean, color=styles[variant][0], linewidth=1.4, label=variant)
        axes.set(xlabel="step", ylabel=ROWS[name].head)
    for axes in panels:
        bare(axes, "y")
    panels[0].legend(frameon=False)
    seeds = len(next(iter(lines.values())))
    title = f"Means of {seeds} seeds, with bands of one standard error" if seeds > 1 else "One seed"
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left")
    save_figure(figure, path)


def _means(lines: Mapping[str, Sequence[Lines]], row: Row) -> dict[str, tuple[list[int], np.ndarray]]:
    """Return the learning steps of every variant, and the mean of a row over its runs at each of them."""
    result: dict[str, tuple[list[int], np.ndarray]] = {}
    for variant, runs in lines.items():
        learned = [[line for line in run if line["kind"] == LEARN] for run in runs]
        shortest = min(map(len, learned))
        values = np.array([[row.read(line) for line in run[:shortest]] for run in learned], np.float64)
        result[variant] = [line["step"] for line in learned[0][:shortest]], values.mean(0)
    return result


def _is_constant(values: Mapping[str, tuple[list[int], np.ndarray]]) -> bool:
    known = np.concatenate([mean[np.isfinite(mean)] for _, mean in values.values()])
    return known.size == 0 or bool(np.ptp(known) == 0)
