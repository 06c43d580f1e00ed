"""The colours of every figure: a planner has the same colour, marker and line style wherever it is drawn.

A planner takes the colour of its system, so that the variants of EPLB look related. The colours stay apart for readers
with deuteranopia or protanopia, and so do their lightness or their markers in a grey print (``tests/test_palette.py``).
"""

import re
import zlib
from typing import Final, NamedTuple

INK: Final = "#222222"
"""Text, axes and reference lines."""
GRID: Final = "#dddddd"
IDLE: Final = "#f0f0f0"
"""Time in which a rank or a pool waits."""


class System(NamedTuple):
    """A system of the literature, and how its planners are drawn."""

    label: str
    """The name of the system as its authors write it."""
    colour: str
    marker: str


SYSTEMS: Final = {
    "static": System("Megatron-LM, static", "#8d9299", "o"),
    "eplb": System("EPLB", "#e38e58", "s"),
    "lplb": System("LPLB", "#862705", "^"),
    "ultraep": System("UltraEP", "#e2c10e", "v"),
    "llep": System("LLEP", "#489161", "<"),
    "moonep": System("MoonEP", "#7a4d8e", ">"),
    "laer": System("LAER-MoE", "#3ab6c0", "p"),
    "foremoe": System("ForeMoE", "#f188c1", "h"),
    "feplb": System("FEPLB", "#a08f11", "X"),
    "popfetcher": System("PopFetcher", "#684d49", "P"),
    "relibra": System("ReLibra", "#1f5fae", "D"),
}
"""Systems by the first word of their planners' names in `relibra_jax.planning.planners.PLANNERS`."""
OUTSIDE: Final = ("#be0968", "#173336", "#bd9eea")
"""The colours of planners from outside the table, chosen by their names."""
PARTS: Final = "parts"
"""The name under which `system_of` groups ReLibra's ablations, whose names begin with no system."""
LINE_STYLES: Final = ("-", "--", "-.", ":")

SERIES: Final = ("#0f7f74", "#d55e00", "#7d6bc4", "#e0a526", "#4c4c4c", "#c77fa8")
"""The colours of lines and bars that are not planners, such as seeds, jobs and micro-batches in flight."""
PHASES: Final = {
    "attention": "#a3aebb",
    "home": "#453781",
    "resident": "#8f7fd0",
    "replica": "#d3c2f7",
    "transfer": "#e3b23c",
    "inside": "#f0a58f",
    "crossing": "#a8321c",
    "gather": "#6b8e6b",
    "rest": "#2b2f36",
}
"""The phases of a layer: attention, the experts in each kind of slot, the transfer of replicas, the exchange of tokens
inside a node and across nodes, and the buffers of the exchange. The last is the rest of a batch."""


class Style(NamedTuple):
    """How one planner is drawn."""

    colour: str
    marker: str
    line: str
    """The line style."""


def system_of(name: str) -> str:
    """Return the system to which a planner belongs.

    Args:
        name: the name of a planner or of a row of a report, for example ``eplb_history`` or ``relibra + assign``.

    Returns:
        A key of `SYSTEMS`; ``name`` itself for a planner from outside, ``module:attribute``; `PARTS` for all others,
        which are ablations of ReLibra.

    >>> system_of("eplb_history"), system_of("relibra, residents"), system_of("+ reorder"), system_of("mine:planner")
    ('eplb', 'relibra', 'parts', 'mine:planner')
    """
    if ":" in name:
        return name
    first = re.match("[a-z]*", name)
    return first[0] if first is not None and first[0] in SYSTEMS else PARTS


def planner_style(name: str) -> Style:
    """Return the style of a planner, which depends on its name alone.

    Args:
        name: the name of a planner or of a row of a report, as in `system_of`.

    >>> planner_style("eplb")
    Style(colour='#e38e58', marker='s', line='-')
    """
    system, number = system_of(name), zlib.crc32(name.encode())
    if system == name and ":" in name:
        return Style(OUTSIDE[number % 3], "*dH"[number // 3 % 3], LINE_STYLES[number // 9 % 4])
    if system == PARTS:
        return Style(SERIES[number % 6], "osv^<>"[number // 6 % 6], LINE_STYLES[number // 36 % 4])
    _, colour, marker = SYSTEMS[system]
    if name == system:
        return Style(colour, marker, "-")
    return Style(_tint(colour, 0.35), marker, LINE_STYLES[1 + number % 3])


def _tint(colour: str, share: float) -> str:
    """Return a colour with this share of white mixed in."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)
