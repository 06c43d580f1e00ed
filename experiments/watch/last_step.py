"""The last step of a run: its measured phases, and the modelled time or the counted work of every rank."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from markupsafe import Markup

from experiments.rl.progress import format_seconds
from experiments.watch.charts import Bar, Key, stacked_bars
from experiments.watch.run_data import Line, is_number, list_of
from relibra_jax.cli.palette import GRID, IDLE, PHASES, SERIES
from relibra_jax.cost.batch_time import PARTS

MOST_RANKS: Final = 32
"""The largest number of ranks in the figure of the last step: the busiest and the idlest."""
COLOURS: Final = {
    "attention": PHASES["attention"],
    "compute": PHASES["home"],
    "wait": IDLE,
    "exchange": PHASES["crossing"],
    "gather": PHASES["gather"],
    "exposed": PHASES["transfer"],
    "push": PHASES["resident"],
    "reorder": PHASES["inside"],
    "rest": PHASES["rest"],
}
"""The colours of the parts of the modelled time of a rank, in the order of the bars."""
MODELLED: Final = {
    name: (colour, PARTS.get(name, "waiting for the busiest rank")) for name, colour in COLOURS.items()
}
"""The parts of the modelled time of a rank: colour and label, in the order of the bars."""
MEASURED: Final = {
    "generate": (SERIES[0], "generation"),
    "plan": (SERIES[5], "planning"),
    "size": (SERIES[4], "sizes of buffers"),
    "migrate": (SERIES[3], "migration"),
    "recompute": (SERIES[2], "recompute"),
    "score_wait": (IDLE, "waiting for rewards"),
    "update": (SERIES[1], "updates"),
}
"""The measured phases of a step: colour and label, in their order."""


class BarFigure(NamedTuple):
    """A figure of stacked bars."""

    drawing: Markup
    keys: list[Key]
    modelled: bool = False
    """Whether its lengths are modelled seconds."""
    left_out: int = 0
    """The number of ranks that are not drawn."""


def rank_bars(line: Line) -> BarFigure | None:
    """Draw the modelled time of every rank in a step, or its counted share of work if the run models no time.

    Args:
        line: the metrics of the step.

    Returns:
        The figure. None if the line has no loads of ranks.
    """
    busy, load = list_of(line, "balance/busy_by_rank"), list_of(line, "balance/load_by_rank")
    if not busy or len(load) != len(busy):
        return None
    parts = _seconds(line, {name: f"modelled_plan_{name}" for name in MODELLED})
    modelled = "compute" in parts
    seconds = parts if modelled else {"compute": 1.0}
    order = np.argsort(busy, kind="stable").tolist()
    shown = order if len(order) <= MOST_RANKS else order[: MOST_RANKS // 2] + order[-MOST_RANKS // 2 :]
    rows = []
    for rank in sorted(shown):
        work = seconds["compute"] * busy[rank]
        lengths = {**seconds, "compute": work, "wait": seconds["compute"] - work}
        rows.append((f"rank {rank}", _bars(lengths, MODELLED), f"{load[rank]:,.0f} copies, {busy[rank]:.1%}"))
    drawn = [name for name in MODELLED if seconds.get(name) or name == "wait"]
    keys = [(css_colour(MODELLED[name][0]), MODELLED[name][1], "") for name in drawn]
    return BarFigure(stacked_bars(rows), keys, modelled, len(busy) - len(rows))


def phase_bar(line: Line) -> BarFigure | None:
    """Draw the measured phases of a step. None if the line has no times."""
    times, step = _seconds(line, {name: name for name in MEASURED}), line.get("time/step_seconds")
    if not times or not is_number(step):
        return None
    times["other"] = max(step - sum(times.values()), 0.0)
    table = {**MEASURED, "other": (GRID, "everything else")}
    keys = [
        (css_colour(table[name][0]), table[name][1], format_seconds(seconds))
        for name, seconds in times.items()
    ]
    row = ("all ranks", _bars(times, table), format_seconds(step))
    return BarFigure(stacked_bars([row], height=22), keys)


def css_colour(colour: str) -> str:
    """Return a colour as the page has it, which changes some in the dark."""
    return {IDLE: "var(--idle)", GRID: "var(--line)", PHASES["rest"]: "var(--rest)"}.get(colour, colour)


def _seconds(line: Line, names: Mapping[str, str]) -> dict[str, float]:
    """Return the metrics ``time/NAME_seconds`` that a line has, under keys of their own."""
    found = {key: line.get(f"time/{name}_seconds") for key, name in names.items()}
    return {key: float(value) for key, value in found.items() if value is not None and is_number(value)}


def _bars(lengths: Mapping[str, float], table: Mapping[str, tuple[str, str]]) -> list[Bar]:
    """Return the bars of a row, in the order of the table of colours and labels."""
    return [
        Bar(label, lengths[name], css_colour(colour))
        for name, (colour, label) in table.items()
        if lengths.get(name)
    ]
