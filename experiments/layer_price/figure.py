"""The figure of a layer: a bar for each pass, stacked by operation."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from experiments.layer_price.report import in_layer
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, PHASES, SERIES
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.layer_operations import Operation

GROUPS = {
    "attention": PHASES["attention"],
    "expert products": PHASES["home"],
    "exchange between nodes": PHASES["crossing"],
    "exchange inside nodes": PHASES["inside"],
    "pack": PHASES["gather"],
    "pick": "#9fbf8f",
    "sum": "#3f5f4f",
    "gates": SERIES[3],
    "choice": SERIES[2],
    "other": SERIES[4],
}
"""The colours of groups of operations, in the order in which they are stacked."""


def group_of(operation: Operation) -> str:
    """Return the group of `GROUPS` to which an operation belongs.

    >>> group_of(Operation("pack back inside nodes", "forward", "rows"))
    'pack'
    """
    if operation.part == "links":
        return "exchange between nodes" if operation.across else "exchange inside nodes"
    first = operation.name.split()[0]
    return operation.name if operation.name in GROUPS else first if first in GROUPS else "other"


def draw_layer(path: Path, operations: Sequence[Operation], cluster: Cluster, title: str) -> None:
    """Draw the milliseconds of both passes.

    Args:
        path: the PNG file to write.
        operations: the operations of the layer.
        cluster: the cluster whose rates apply.
        title: what the layer is.
    """
    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    figure.suptitle(title, color=INK, fontsize=10, x=0.01, ha="left", parse_math=False)
    layer = in_layer(operations)
    for line, during in enumerate(("backward", "forward")):
        left = 0.0
        for group, colour in GROUPS.items():
            chosen = (each for each in layer if each.during == during and group_of(each) == group)
            width = 1e3 * sum(each.seconds(cluster) for each in chosen)
            label = group if during == "forward" and width else None
            axes.barh(
                line,
                width,
                left=left,
                height=0.6,
                color=colour,
                edgecolor="white",
                linewidth=0.5,
                label=label,
            )
            left += width
        axes.text(left, line, f" {left:.2f}", va="center", fontsize=8, color=INK)
    axes.set_yticks([0, 1], ["backward", "forward"])
    axes.set_xlabel("modelled ms of a micro-batch", fontsize=8)
    figure.legend(fontsize=7, frameon=False, ncols=5, loc="outside lower center")
    bare(axes, "x")
    save_figure(figure, path)
