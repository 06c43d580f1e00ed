"""The balance of one seed over its steps: imbalance, times, and a map of the imbalance of every layer."""

from typing import Final, NamedTuple

import numpy as np
from markupsafe import Markup

from experiments.rl.metrics import LEARN
from experiments.watch.charts import Series, colour_scale, heatmap, line_figure
from experiments.watch.curves import Figure, keys_of
from experiments.watch.last_step import MEASURED
from experiments.watch.run_data import Line, Number, SeedData, list_of, values_of
from relibra_jax.cli.palette import IDLE, planner_style

STATIC: Final = planner_style("static").colour
MAPS: Final = {
    "under static placement": "balance/imbalance_static_by_layer",
    "under the plan": "balance/imbalance_by_layer",
}
"""The metrics of the maps of layers."""

UNUSUAL: Final = 5
"""The multiple of the median duration from which a step is left out of the phases, because it compiled programs."""


class LayerMap(NamedTuple):
    """The imbalance of every layer in every step."""

    name: str
    drawing: Markup
    layers: int
    steps: tuple[Number, Number]
    """The first and the last step."""
    range: tuple[float, float]
    """The smallest and the largest imbalance."""


class LayerMaps(NamedTuple):
    """Maps of layers in one scale, from an imbalance of 1."""

    maps: list[LayerMap]
    high: float
    """The imbalance of the last colour."""
    scale: Markup
    """The colours, as a gradient of CSS."""


def balance_figures(seed: SeedData, planner: str) -> list[Figure]:
    """Draw the imbalance, the measured phases and the modelled time over the steps of a seed.

    Args:
        seed: what the seed has written.
        planner: the name of the planner, which gives the colour of its plans.
    """
    lines, colour = seed.of_kind(LEARN), planner_style(planner).colour
    usual = _usual_steps(lines)
    imbalance = [
        Series("static placement", values_of(lines, "balance/imbalance_static"), STATIC),
        Series(f"under the plan of {planner}", values_of(lines, "balance/imbalance"), colour),
        Series("lower bound", values_of(lines, "balance/imbalance_bound"), "var(--text)", "dashed"),
    ]
    measured = [
        Series(label, values_of(usual, f"time/{name}_seconds"), "var(--muted)" if tint == IDLE else tint)
        for name, (tint, label) in MEASURED.items()
    ]
    modelled = [
        Series("staying put", values_of(lines, "time/modelled_staying_seconds"), STATIC),
        Series("the plan", values_of(lines, "time/modelled_plan_seconds"), colour),
        Series("balanced run", values_of(lines, "time/modelled_balanced_seconds"), "var(--text)", "dashed"),
    ]
    return [
        Figure(title, note, line_figure(series, least=least), keys_of(series))
        for title, note, series, least in (
            ("Imbalance", "max / mean of rank load, counted; 1 is perfect", imbalance, 1.0),
            (
                "Time by phase",
                f"seconds, measured; without steps of {UNUSUAL} times the median",
                measured,
                0.0,
            ),
            ("Modelled time", "seconds of recompute and updates of one epoch, modelled", modelled, None),
        )
    ]


def _usual_steps(lines: list[Line]) -> list[Line]:
    """Leave out the steps that took much longer than most."""
    steps = values_of(lines, "time/step_seconds")
    limit = UNUSUAL * float(np.median([seconds for _, seconds in steps])) if steps else 0.0
    return [
        line for line in lines if values_of([line], "time/step_seconds") and line["time/step_seconds"] < limit
    ]


def layer_maps(seed: SeedData) -> LayerMaps | None:
    """Draw the imbalance of every layer in every step. None if the metrics do not have it."""
    values = {}
    for name, metric in MAPS.items():
        rows = [(line["step"], each) for line in seed.of_kind(LEARN) if (each := list_of(line, metric))]
        if rows and len({len(each) for _, each in rows}) == 1:
            values[name] = [step for step, _ in rows], np.array([each for _, each in rows]).T
    if not values:
        return None
    high = max(float(np.quantile(each, 0.99)) for _, each in values.values())
    maps = [
        LayerMap(
            name,
            heatmap(each, steps, low=1.0, high=high),
            len(each),
            (steps[0], steps[-1]),
            (float(each.min()), float(each.max())),
        )
        for name, (steps, each) in values.items()
    ]
    return LayerMaps(maps, high, colour_scale())
