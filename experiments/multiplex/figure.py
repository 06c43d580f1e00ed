"""The figure of a group of jobs: its two pools over one period, and the time in which they are idle."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from experiments.multiplex.groups import Group
from experiments.multiplex.simulation import ROLLOUT, TRAINING, conservative_durations, simulate
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import IDLE, INK, SERIES
from relibra_jax.support.counted import counted

WARM_UP = 30
"""Rounds that are not drawn: a group that starts empty needs a few of them until its schedule repeats."""
CHARACTER = 0.009
"""The width of a character of a label, as a share of the axes."""


def draw_group(path: Path, group: Group, title: str) -> None:
    """Draw one period of a group, executed with its conservative durations.

    Args:
        path: the PNG file to write.
        group: the group.
        title: the jobs that were planned.
    """
    timeline = simulate(conservative_durations(group, steps=WARM_UP + 4))
    start, end = (times - timeline.start[WARM_UP, 0, ROLLOUT] for times in timeline)
    start, end = start.clip(0, group.period), end.clip(0, group.period)
    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left", parse_math=False)
    axes.barh([ROLLOUT, TRAINING], group.period, color=IDLE, height=0.7)
    colours = [SERIES[job % len(SERIES)] for job in range(len(group.jobs))]
    for step, job, pool in zip(*np.nonzero(end > start), strict=True):
        left, length = start[step, job, pool], end[step, job, pool] - start[step, job, pool]
        axes.barh(pool, length, left=left, color=colours[job], height=0.7, edgecolor="white")
        name = group.jobs[job].name
        if length > CHARACTER * (len(name) + 2) * group.period:
            box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none"}
            middle = left + length / 2
            axes.text(middle, pool, name, ha="center", va="center", fontsize=8, bbox=box, parse_math=False)
    pools = (
        ("rollout", group.rollout_nodes, group.rollouts),
        ("training", group.training_nodes, group.trainings),
    )
    names = [
        f"{name} pool, {counted(nodes, 'node')}\n{sum(times) / group.period:.0%} busy"
        for name, nodes, times in pools
    ]
    axes.set_yticks([ROLLOUT, TRAINING], names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, group.period)
    axes.set_xlabel("modelled seconds of one period, every job taking its conservative duration", fontsize=9)
    keys = [Patch(color=colour, label=job.name) for colour, job in zip(colours, group.jobs, strict=True)]
    keys.append(Patch(color=IDLE, label="idle"))
    legend = axes.legend(
        handles=keys, ncols=4, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1)
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    bare(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    save_figure(figure, path)
