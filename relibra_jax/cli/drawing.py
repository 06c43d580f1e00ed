"""Functions that all figures share: axes without decoration, and PNG files that are written atomically."""

from pathlib import Path
from typing import Final, Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from relibra_jax.cli.palette import GRID
from relibra_jax.support.atomic_write import write_atomically

DPI: Final = 150


def bare(axes: Axes, grid: Literal["x", "y", "both"] | None = None) -> None:
    """Remove the frame of some axes, and draw a pale grid behind their content.

    Args:
        axes: the axes.
        grid: the axis on which values are read; None for no grid.
    """
    axes.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, and close it.

    Args:
        figure: the figure.
        path: the file to write.
    """
    with write_atomically(path) as part:
        figure.savefig(part, dpi=DPI, pil_kwargs={"optimize": True})
    plt.close(figure)
