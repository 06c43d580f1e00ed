"""The figure of a deployment: what micro-batches in flight are worth, and where either side waits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from relibra_jax.atomic_write import write_atomically
from relibra_jax.cli.deploy.rows import InFlight, Row
from relibra_jax.cli.palette import GRID, INK
from relibra_jax.cli.palette import SERIES as COLOURS

BLUE, RED = "#1f6fb2", "#b5541c"
LAYERS_SHOWN: Final = 4


def draw_deployment(path: Path, points: Sequence[InFlight], row: Row, title: str) -> None:
    """Draw throughput for its price over micro-batches in flight, and the first layers of a simulated step.

    Args:
        path: the PNG file to write.
        points: what each number of micro-batches is worth.
        row: the deployment whose step is drawn.
        title: what is deployed on what.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[1, 1.6], layout="constrained")
    figure.suptitle(title, color=INK, fontsize=9)
    numbers = [point.micro_batches for point in points]
    for name, label, colour in (
        ("best", "best deployment of each", BLUE),
        ("same", "the best of all, only m changed (may not fit)", RED),
    ):
        values = np.array([getattr(point, name) for point in points], float)  # NaN where none fits
        left.plot(numbers, values, "o-", color=colour, label=label)
        for at, before, after in zip(numbers[1:], values[:-1], values[1:], strict=True):
            if np.isnan(before) or np.isnan(after):
                continue
            text = f"x{after / before:.2f}"
            below = name == "same"
            left.annotate(
                text, (at, after), (0, -13 if below else 6), textcoords="offset points", color=colour, ha="center",
                fontsize=8,
            )  # fmt: skip
    left.set_ylim(0, 1.15 * np.nanmax(np.array([[point.best, point.same] for point in points], float)))
    left.set_xticks(numbers)
    left.set_xlabel("micro-batches in flight m\n(published: 1 to 2 x1.90, 2 to 3 x1.10 to x1.38)", fontsize=8)
    left.set_ylabel("modelled tokens a second for each unit of price", fontsize=8)
    left.legend(fontsize=7, frameon=False, loc="lower right")
    left.grid(axis="y", color=GRID, linewidth=0.7)
    _draw_step(right, row)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    with write_atomically(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)


def _draw_step(axes: plt.Axes, row: Row) -> None:
    """Both sides in the first layers of the simulated step, a colour for each micro-batch."""
    step = row.simulated
    for line, starts, lengths in (
        (1, step.schedule.attention_start, step.attention),
        (0, step.schedule.expert_start, step.experts),
    ):
        starts, lengths = (1e6 * np.asarray(each)[:LAYERS_SHOWN] for each in (starts, lengths))
        for micro_batch in range(starts.shape[1]):
            axes.barh(
                np.full(len(starts), line),
                lengths[:, micro_batch],
                left=starts[:, micro_batch],
                height=0.5,
                color=COLOURS[(micro_batch + 1) % len(COLOURS)],
                edgecolor="white",
                label=f"micro-batch {micro_batch}" if line else None,
            )
    axes.set_yticks(
        [0, 1], [f"experts\nidle {step.expert_idle:.0%}", f"attention\nidle {step.attention_idle:.0%}"]
    )
    axes.set_ylim(-0.5, 1.9)
    axes.set_xlabel(f"modelled us, first {LAYERS_SHOWN} layers of a step (gaps: waiting)", fontsize=8)
    axes.legend(fontsize=7, frameon=False, ncols=4, loc="upper left")
