"""The figure of a deployment: throughput by micro-batches in flight, and where each side waits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib.pyplot as plt
import numpy as np

from experiments.deploy.best_deployments import BestDeployment, InFlight
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, SERIES

LAYERS_SHOWN: Final = 4


def draw_deployment(path: Path, points: Sequence[InFlight], planned: BestDeployment, title: str) -> None:
    """Draw throughput per unit of price by micro-batches in flight, and the first layers of a simulated step.

    Args:
        path: the PNG file to write.
        points: the throughput with each number of micro-batches in flight.
        planned: the deployment whose step is drawn.
        title: the model and the clusters of the deployment.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[1, 1.6], layout="constrained")
    figure.suptitle(title, color=INK, fontsize=10, x=0.01, ha="left", parse_math=False)
    numbers = [point.micro_batches for point in points]
    for name, label, colour, marker in (
        ("best", "best deployment for each m", SERIES[0], "o"),
        ("same", "best deployment of all, with m changed (may not fit)", SERIES[1], "s"),
    ):
        values = np.array([getattr(point, name) for point in points], float)  # NaN where none fits
        left.plot(numbers, values, marker=marker, color=colour, label=label)
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
    left.set_ylabel("modelled tokens/s per unit of price", fontsize=8)
    left.legend(fontsize=8, frameon=False, loc="lower right")
    bare(left, "y")
    _draw_step(right, planned)
    bare(right)
    save_figure(figure, path)


def _draw_step(axes: plt.Axes, planned: BestDeployment) -> None:
    """Draw both sides in the first layers of the simulated step, with a colour for each micro-batch."""
    step = planned.simulated
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
                color=SERIES[micro_batch % len(SERIES)],
                edgecolor="white",
                label=f"micro-batch {micro_batch}" if line else None,
            )
            for middle in starts[:, micro_batch] + lengths[:, micro_batch] / 2:
                axes.text(middle, line + 0.27, str(micro_batch), ha="center", fontsize=7, color=INK)
    axes.set_yticks(
        [0, 1], [f"experts\nidle {step.expert_idle:.0%}", f"attention\nidle {step.attention_idle:.0%}"]
    )
    axes.set_ylim(-0.5, 1.9)
    axes.set_xlabel(
        f"modelled microseconds, first {LAYERS_SHOWN} layers of a step (gaps: waiting)", fontsize=8
    )
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper left")
