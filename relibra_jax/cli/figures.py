"""Figures of what planners do, drawn from the same outcomes as the table."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from relibra_jax.atomic_write import write_atomically
from relibra_jax.cli.modelled_time import CostModel
from relibra_jax.cli.outcomes import Outcome
from relibra_jax.cli.planner_runs import PlannedBatch
from relibra_jax.plan import rank_load
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.types import Topology

INK, GRID = "#222222", "#dddddd"
COLOURS = ["#9a9a9a", "#c7a27c", "#d98c3f", "#b5541c", "#e3b23c", "#7fb0d6", "#1f6fb2", "#2a9d5c", "#6b4ea0"]
GREY = "#c9c9c9"
BEST_KNOWN = ("static", "eplb", "lplb", "ultraep", "relibra", "relibra_across")


def compare_figure(path: Path, outcomes: list[Outcome], title: str) -> None:
    """Draw the imbalance of every planner over the whole batch, and of the first colours micro-batch by micro-batch.

    Args:
        path: the PNG file to write.
        outcomes: one outcome for each planner, drawn in this order.
        title: what was run.
    """
    names = [outcome.planner for outcome in outcomes][::-1]
    colour = dict.fromkeys(names, GREY) | dict(zip(_in_colour(names[::-1]), COLOURS, strict=False))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, max(4.2, 1.4 + 0.2 * len(names))), width_ratios=[1, 1.35], layout="constrained"
    )
    figure.suptitle(title, color=INK, fontsize=11)

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
        if colour[outcome.planner] == GREY:
            continue
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
    with write_atomically(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)


def _in_colour(names: list[str]) -> list[str]:
    """The planners that have a colour: all if there are few, else the best known ones and those from outside."""
    if len(names) <= len(COLOURS):
        return names
    return [name for name in names if name in BEST_KNOWN or name not in PLANNERS][: len(COLOURS)]


def timeline_figure(
    path: Path, before: Outcome, after: Outcome, topology: Topology, cost_model: CostModel
) -> None:
    """Draw where ranks wait in one layer of one micro-batch, forward, as the cost model sees it.

    White lines part the samples of a rank in its attention. The layer and the micro-batch are those of the last batch
    in which ``before`` is most uneven.

    Args:
        path: the PNG file to write.
        before: the outcome of one planner, for example static.
        after: the outcome of another planner, for example ReLibra.
        topology: the expert-parallel group.
        cost_model: the cost model, which gives the lengths of the phases.
    """
    load = np.asarray(rank_load(before.batches[-1].batch_plan.plan), float)
    place = np.unravel_index((load.max((2, 3)) - load.mean((2, 3))).argmax(), load.shape[:2])
    figure, rows = plt.subplots(2, 1, figsize=(9, 4.8), sharex=True, layout="constrained")
    phases = {
        "attention": "#7fb0d6",
        "replicas not hidden": "#b5541c",
        "dispatch": "#e3b23c",
        "experts": "#1f6fb2",
        "combine": "#d98c3f",
    }
    for axes, outcome in zip(rows, (before, after), strict=True):
        times = cost_model.rank_time(outcome.batches[-1], topology)
        attention, compute, exchange, push = (np.asarray(part)[place].ravel() * 1e3 for part in times)
        ranks, start = np.arange(attention.size), 0.0
        exposed = np.maximum(push - attention.max(), 0)
        lengths = (attention, exposed, exchange, compute, exchange)
        for (name, colour), length in zip(phases.items(), lengths, strict=True):
            axes.barh(ranks, length, left=start, color=colour, height=0.72, label=name)
            axes.barh(ranks, length.max() - length, left=start + length, color="#eeeeee", height=0.72)
            start += length.max()
        rank, share = _sample_ends(outcome.batches[-1], int(place[0]))
        axes.vlines(share * attention[rank], rank - 0.36, rank + 0.36, color="white", linewidth=0.8)
        axes.axvline(start, color=INK, linewidth=0.8)
        axes.annotate(f"{start:.1f} ms", (start, ranks[0]), (4, 0), textcoords="offset points", va="center")
        axes.set_title(outcome.planner, loc="left", fontsize=10, color=INK)
        axes.set_ylabel("rank")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    rows[0].set_xlim(right=1.12 * rows[0].get_xlim()[1])
    rows[0].legend(fontsize=8, frameon=False, ncols=5, loc="lower right", bbox_to_anchor=(1, 1))
    rows[1].set_xlabel(f"modelled ms, micro-batch {place[0]}, layer {place[1]}, forward (grey: waiting)")
    with write_atomically(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)


def _sample_ends(batch: PlannedBatch, micro_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Where one sample of a rank gives way to the next: the ranks, and the shares of their tokens up to there."""
    tokens = np.append(np.asarray(batch.replay.mask).sum(1), 0)  # EMPTY, the last, has none
    sample = np.asarray(batch.batch_plan.assignment.sample[micro_batch])
    ends = tokens[sample].reshape(-1, sample.shape[-1]).cumsum(1)
    inside = np.nonzero(ends < ends[:, -1:])
    return inside[0], (ends / np.maximum(ends[:, -1:], 1))[inside]
