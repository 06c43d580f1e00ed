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
LEAST_LABELLED: Final = 0.014
"""The shortest bar whose number is drawn, as a share of the axis: a digit is narrower."""


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
    best, same = (
        np.array(each, float) for each in zip(*((point.best, point.same) for point in points), strict=True)
    )
    for values, other, label, colour, marker in (  # NaN where none fits
        (best, same, "best deployment for each m", SERIES[0], "o"),
        (same, best, "best deployment of all, with m changed (may not fit)", SERIES[1], "s"),
    ):
        left.plot(numbers, values, marker=marker, color=colour, label=label)
        # The gains of the lower line stand below it, so that they never meet those of the other.
        below = (values < other) | ((values == other) & (values is same))
        for at, before, after, under in zip(numbers[1:], values[:-1], values[1:], below[1:], strict=True):
            if np.isnan(before) or np.isnan(after):
                continue
            left.annotate(
                f"x{after / before:.2f}",
                (at, after),
                (0, -15 if under else 8),
                textcoords="offset points",
                color=colour,
                ha="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
    left.set_ylim(0, 1.15 * np.nanmax([best, same]))
    left.set_xticks(numbers)
    left.set_xlabel("micro-batches in flight m\n(published: 1 to 2 x1.90, 2 to 3 x1.10 to x1.38)", fontsize=8)
    left.set_ylabel("modelled tokens/s per unit of price", fontsize=8)
    left.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    bare(left, "y")
    _draw_step(right, planned)
    bare(right)
    save_figure(figure, path)


def _draw_step(axes: plt.Axes, planned: BestDeployment) -> None:
    """Draw both sides in the first layers of the simulated step, with a colour for each micro-batch."""
    step = planned.simulated
    ends = (step.schedule.expert_start + step.experts)[:LAYERS_SHOWN]
    span = 1e6 * float(np.max(ends))
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
            for start, length in zip(starts[:, micro_batch], lengths[:, micro_batch], strict=True):
                if length > LEAST_LABELLED * span:
                    middle = start + length / 2
                    axes.text(middle, line + 0.27, str(micro_batch), ha="center", fontsize=7, color=INK)
    axes.set_yticks(
        [0, 1], [f"experts\nidle {step.expert_idle:.0%}", f"attention\nidle {step.attention_idle:.0%}"]
    )
    axes.set_xlim(0, span)
    axes.set_ylim(-0.5, 1.5)
    axes.set_xlabel(
        f"modelled microseconds, first {LAYERS_SHOWN} layers of a step (gaps: waiting)", fontsize=8
    )
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
