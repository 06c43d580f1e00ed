"""Small figures as inline SVG: lines over steps, a heatmap, and stacked bars. They follow the colours of their page.

All are strings that a page contains as they are; every text in them is escaped.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float
from markupsafe import Markup, escape

from experiments.watch.run_data import Number, Points

WIDTH, HEIGHT = 420, 190
"""The size of a figure of lines, in its own units."""
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 22
"""The margins of a figure of lines, for its axes."""
MOST_POINTS: Final = 300
"""The largest number of points of a line; means of successive steps beyond that."""
MOST_COLUMNS: Final = 120
"""The largest number of columns of a heatmap; means of successive steps beyond that."""
SHADES: Final = 24
"""The number of colours of a heatmap."""


type Key = tuple[str, str, str]
"""An entry of a legend: colour, label, and the last value, which may be empty."""


class Series(NamedTuple):
    """A line of a figure."""

    label: str
    points: Points
    colour: str
    style: str = "line"
    """One of ``line``, ``faint``, ``dashed`` and ``dots``."""


class Band(NamedTuple):
    """A shaded range of a figure, behind its lines."""

    low: Points
    high: Points
    colour: str


class Bar(NamedTuple):
    """A part of a stacked bar."""

    label: str
    length: float
    colour: str


def line_figure(
    series: Sequence[Series], bands: Sequence[Band] = (), *, least: Number | None = None
) -> Markup:
    """Draw lines over steps.

    Args:
        series: the lines. Those without points are left out.
        bands: shaded ranges behind them.
        least: a value that the axis reaches at least down to. None fits it to the points.

    Returns:
        The figure; empty if no line has a point.
    """
    series = [each._replace(points=_thin(each.points)) for each in series if each.points]
    bands = [band._replace(low=_thin(band.low), high=_thin(band.high)) for band in bands if band.low]
    points = [point for each in series for point in each.points]
    points += [point for band in bands for point in (*band.low, *band.high)]
    if not points:
        return Markup("")
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    values = [y for _, y in points] + ([] if least is None else [least])
    ticks = _ticks(min(values), max(values))
    bottom, top = min(ticks[0], *values), max(ticks[-1], *values)

    def x_of(step: Number) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (0.5 if last == first else (step - first) / (last - first))

    def y_of(value: Number) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - value) / (top - bottom)

    parts = [_horizontal_axis(ticks, y_of), _steps_axis(first, last, x_of)]
    for band in bands:
        outline = [*band.low, *reversed(band.high)]
        parts.append(f'<polygon points="{_path(outline, x_of, y_of)}" fill="{band.colour}" opacity=".18"/>')
    parts += [_draw(each, x_of, y_of) for each in series]
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>')


def heatmap(
    values: Float[np.ndarray, "rows steps"], steps: Sequence[Number], *, low: float, high: float
) -> Markup:
    """Draw values by row and step, dark at ``low`` and bright at ``high``.

    Args:
        values: the values; the first row is at the top. NaN is left out.
        steps: the number of each step.
        low: the value of the first colour.
        high: the value of the last colour.
    """
    groups = np.array_split(np.arange(len(steps)), min(len(steps), MOST_COLUMNS))
    cells = np.stack([values[:, group].mean(1) for group in groups], 1)
    rows, columns = cells.shape
    shade = np.clip((cells - low) / max(high - low, 1e-9), 0, 1) * (SHADES - 1)
    colours = _colours()
    paths = []
    for number, colour in enumerate(colours):
        found = np.argwhere(np.round(shade) == number).tolist()
        outline = "".join(f"M{column} {row}h1v1h-1z" for row, column in found)
        if outline:
            paths.append(f'<path fill="{colour}" d="{outline}"/>')
    return Markup(
        f'<svg class="heat" viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" role="img"'
        f' shape-rendering="crispEdges">{"".join(paths)}</svg>'
    )


def colour_scale() -> Markup:
    """Return the CSS gradient of the colours of a heatmap."""
    return Markup(f"linear-gradient(90deg,{','.join(_colours())})")


def stacked_bars(rows: Sequence[tuple[str, Sequence[Bar], str]], *, height: int = 14) -> Markup:
    """Draw a stacked bar in each row, all in one scale.

    Args:
        rows: the label of each row, its bars from left to right, and a text behind them.
        height: the height of a row.
    """
    longest = max((sum(bar.length for bar in bars) for _, bars, _ in rows), default=0.0)
    if longest <= 0:
        return Markup("")
    left, right, width = 58, 130, 1200
    scale, parts = (width - left - right) / longest, []
    for number, (label, bars, text) in enumerate(rows):
        top, start = number * height, float(left)
        middle = top + height / 2 + 3.5
        parts.append(f'<text x="{left - 6}" y="{middle}" text-anchor="end">{escape(label)}</text>')
        for bar in bars:
            size = bar.length * scale
            parts.append(
                f'<rect x="{start:.2f}" y="{top + 1.5}" width="{size:.2f}" height="{height - 3}" fill="{bar.colour}">'
                f"<title>{escape(bar.label)}</title></rect>"
            )
            start += size
        parts.append(f'<text x="{start + 6:.2f}" y="{middle}">{escape(text)}</text>')
    return Markup(f'<svg viewBox="0 0 {width} {len(rows) * height}" role="img">{"".join(parts)}</svg>')


def _draw(series: Series, x_of: Callable[[Number], float], y_of: Callable[[Number], float]) -> str:
    title = f"<title>{escape(series.label)}</title>"
    if series.style == "dots" or len(series.points) == 1:
        dots = "".join(f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3"/>' for x, y in series.points)
        return f'<g fill="{series.colour}">{title}{dots}</g>'
    styles = {
        "line": 'stroke-width="1.8"',
        "faint": 'stroke-width="1" opacity=".35"',
        "dashed": 'stroke-width="1.4" stroke-dasharray="5 4"',
    }
    outline = _path(series.points, x_of, y_of)
    return (
        f'<polyline points="{outline}" fill="none" stroke="{series.colour}" stroke-linejoin="round"'
        f" {styles[series.style]}>{title}</polyline>"
    )


def _path(points: Points, x_of: Callable[[Number], float], y_of: Callable[[Number], float]) -> str:
    return " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)


def _horizontal_axis(ticks: Sequence[Number], y_of: Callable[[Number], float]) -> str:
    parts = []
    for tick, text in zip(ticks, _labels(ticks), strict=True):
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)


def _steps_axis(first: Number, last: Number, x_of: Callable[[Number], float]) -> str:
    ticks = [tick for tick in _ticks(first, last) if first <= tick <= last and tick == int(tick)]
    ticks = ticks if len(ticks) > 1 else sorted({first, last})
    return "".join(
        f'<text x="{x_of(tick):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{tick:.0f}</text>'
        for tick in ticks
    )


def _ticks(low: Number, high: Number) -> list[float]:
    """Return four to eight round numbers that enclose a range.

    >>> _ticks(0.13, 0.91)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    spread = high - low if high > low else max(abs(high) / 10, 1e-9)
    magnitude = 10.0 ** math.floor(math.log10(spread / 4))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= spread / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _labels(ticks: Sequence[Number]) -> list[str]:
    """Format the ticks of an axis with as many decimals as they need.

    >>> _labels([0.0, 0.05, 0.1]), _labels([0, 20000.0]), _labels([0, 2e-7])
    (['0.00', '0.05', '0.10'], ['0', '20k'], ['0', '2e-7'])
    """
    largest = max(map(abs, ticks))
    if largest < 1e-3:
        return [f"{tick:.2g}".replace("e-0", "e-") for tick in ticks]
    unit, suffix = next(
        (pair for pair in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 10 * pair[0]),
        (1.0, ""),
    )
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=largest or 1.0) / unit
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return [f"{tick / unit:.{decimals}f}{suffix if tick else ''}" for tick in ticks]


def _thin(points: Points) -> Points:
    """Replace successive points by their means, if there are too many."""
    if len(points) <= MOST_POINTS:
        return points
    groups = np.array_split(np.array(points, np.float64), MOST_POINTS)
    return [(float(x), float(y)) for x, y in (group.mean(0) for group in groups)]


def _colours() -> list[str]:
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 1, SHADES))
    return [matplotlib.colors.to_hex(shade) for shade in shades]
