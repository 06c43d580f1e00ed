"""The figure of a group: its two pools over one period, with the time in which they wait."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from relibra_jax.atomic_write import write_atomically
from relibra_jax.cli.palette import INK
from relibra_jax.cli.palette import SERIES as COLOURS
from relibra_jax.sharing.groups import Group
from relibra_jax.sharing.simulation import ROLLOUT, TRAINING, conservative_durations, simulate

WARM_UP = 30
"""Rounds that are not drawn: from an empty start a group takes a few to find its rhythm."""
IDLE = "#eeeeee"


def draw_group(path: Path, group: Group, title: str) -> None:
    """Draw one period of a group, executed with its conservative durations.

    Args:
        path: the PNG file to write.
        group: the group.
        title: what was planned.
    """
    timeline = simulate(conservative_durations(group, steps=WARM_UP + 4))
    start, end = (times - timeline.start[WARM_UP, 0, ROLLOUT] for times in timeline)
    start, end = start.clip(0, group.period), end.clip(0, group.period)
    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    figure.suptitle(title, color=INK, fontsize=9, parse_math=False)
    axes.barh([ROLLOUT, TRAINING], group.period, color=IDLE, height=0.7)
    colours = [COLOURS[-1 - job % len(COLOURS)] for job in range(len(group.jobs))]
    for step, job, pool in zip(*np.nonzero(end > start), strict=True):
        left, length = start[step, job, pool], end[step, job, pool] - start[step, job, pool]
        axes.barh(pool, length, left=left, color=colours[job], height=0.7, edgecolor="white")
    pools = (
        ("rollout", group.rollout_nodes, group.rollouts),
        ("training", group.training_nodes, group.trainings),
    )
    names = [
        f"{name} pool, {nodes} nodes\n{sum(times) / group.period:.0%} busy" for name, nodes, times in pools
    ]
    axes.set_yticks([ROLLOUT, TRAINING], names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, group.period)
    axes.set_xlabel("seconds of one period, by conservative durations")
    keys = [Patch(color=colour, label=job.name) for colour, job in zip(colours, group.jobs, strict=True)]
    keys.append(Patch(color=IDLE, label="idle"))
    legend = axes.legend(
        handles=keys, ncols=4, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1)
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    with write_atomically(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)
