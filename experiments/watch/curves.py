"""The curves of a page: what each seed learns over its steps."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from experiments.rl.metrics import EVALUATE, LEARN, LENGTH_LEVELS, MISMATCH_LEVELS, WARM_UP
from experiments.rl.report import SMOOTH, smooth
from experiments.watch.charts import Band, Key, Series, line_figure
from experiments.watch.run_data import Number, Points, RunData, SeedData, list_of, values_of
from relibra_jax.cli.palette import SERIES


class Figure(NamedTuple):
    """A figure of the page."""

    title: str
    note: str
    """What is drawn, with its unit."""
    drawing: Markup
    keys: list[Key]
    """The legend: colour, label, and the last value."""


def learning_figures(run: RunData) -> list[Figure]:
    """Draw the metrics of learning over steps, a line for each seed."""
    reward = []
    for number, seed in enumerate(run.seeds):
        colour, rewards = _colour(number), values_of(seed.of_kind(LEARN), "reward/mean")
        reward += [
            Series(f"seed {seed.seed}, each step", rewards, colour, "faint"),
            Series(f"seed {seed.seed}", _smoothed(rewards), colour),
            Series(
                f"seed {seed.seed}, evaluation",
                values_of(seed.of_kind(EVALUATE), "evaluation/reward"),
                colour,
                "dots",
            ),
        ]
    note = f"mean of {SMOOTH} steps, each step pale; dots: evaluation"
    return [
        Figure("Reward", note, line_figure(reward), keys_of(reward[1::3])),
        _of_seeds(run, "Policy loss", "policy/loss", "loss"),
        _lengths(run),
        _solved(run),
        _of_seeds(run, "Gradient norm", "policy/gradient_norm", "before clipping", least=0),
        _mismatch(run),
        _of_seeds(run, "Speed", "speed/tokens_per_second", "tokens/s of whole steps", least=0),
        _of_seeds(
            run,
            "Device memory",
            "memory/device_bytes",
            "GB in use on the fullest device",
            least=0,
            scale=1e-9,
        ),
        _of_seeds(run, "Warm-up loss", "warmup/loss", "nats a token", kind=WARM_UP),
    ]


def _of_seeds(
    run: RunData,
    title: str,
    name: str,
    note: str,
    *,
    kind: str = LEARN,
    least: Number | None = None,
    scale: Number = 1,
) -> Figure:
    """Draw a metric, a line for each seed."""
    series = _series(run, name, kind, scale)
    return Figure(title, note, line_figure(series, least=least), keys_of(series))


def _series(run: RunData, name: str, kind: str = LEARN, scale: Number = 1) -> list[Series]:
    """Return a line of a metric for each seed."""
    points = [values_of(seed.of_kind(kind), name) for seed in run.seeds]
    return [
        Series(f"seed {seed.seed}", [(step, scale * value) for step, value in each], _colour(number))
        for number, (seed, each) in enumerate(zip(run.seeds, points, strict=True))
    ]


def _lengths(run: RunData) -> Figure:
    """Draw mean lengths, with the range from the tenth to the ninetieth percentile of the seed that wrote last."""
    figure = _of_seeds(run, "Response length", "response/tokens", "tokens", least=0)
    if run.latest is None:
        return figure
    low, _, high, longest = _quantiles(run.latest, "response/tokens_quantiles", len(LENGTH_LEVELS))
    if not low:
        return figure
    colour = _colour(run.seeds.index(run.latest))
    series = [*_series(run, "response/tokens"), Series("longest", longest, colour, "dashed")]
    drawing = line_figure(series, [Band(low, high, colour)], least=0)
    note = f"mean tokens; shaded: 10 to 90% of seed {run.latest.seed}; dashed: its longest"
    return figure._replace(note=note, drawing=drawing)


def _solved(run: RunData) -> Figure:
    """Draw the shares of prompts that all and that none of their responses solve, of the seed that wrote last."""
    lines = [] if run.latest is None else run.latest.of_kind(LEARN)
    series = [
        Series("by all responses", values_of(lines, "reward/solved_by_all"), SERIES[0]),
        Series("by none", values_of(lines, "reward/solved_by_none"), SERIES[1]),
    ]
    seed = "" if run.latest is None else f", seed {run.latest.seed}"
    return Figure("Prompts solved", f"share of prompts{seed}", line_figure(series, least=0), keys_of(series))


def _mismatch(run: RunData) -> Figure:
    """Draw the mean mismatch, and name that of the 99th percentile of tokens."""
    figure = _of_seeds(
        run, "Mismatch", "mismatch/log_prob", "nats a token between rollout and recompute, mean", least=0
    )
    if run.latest is None:
        return figure
    *_, high, _ = _quantiles(run.latest, "mismatch/log_prob_quantiles", len(MISMATCH_LEVELS))
    if not high:
        return figure
    return figure._replace(keys=[*figure.keys, ("transparent", "99% of tokens below", _last(high))])


def _quantiles(seed: SeedData, name: str, count: int) -> list[Points]:
    """Return the points of each quantile of a metric."""
    rows = [
        (line["step"], values) for line in seed.of_kind(LEARN) if len(values := list_of(line, name)) == count
    ]
    return [[(step, values[number]) for step, values in rows] for number in range(count)]


def _smoothed(points: Points) -> Points:
    return list(zip([step for step, _ in points], smooth([float(value) for _, value in points]), strict=True))


def keys_of(series: Sequence[Series]) -> list[Key]:
    """Return the legend of lines, without those that have no points."""
    return [(each.colour, each.label, _last(each.points)) for each in series if each.points]


def _last(points: Points) -> str:
    return short(points[-1][1]) if points else ""


def short(value: Number) -> str:
    """Format a number with three significant digits.

    >>> [short(value) for value in (0.51234, 12345.6, -0.000012)]
    ['0.512', '12,346', '-1.2e-05']
    """
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.{3 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def _colour(number: int) -> str:
    return SERIES[number % len(SERIES)]
