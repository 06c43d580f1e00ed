"""The page of a run: curves, balance by layer, the last step by rank, and sample texts, in one HTML file."""

import datetime
import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from experiments.rl.configs import Train
from experiments.rl.metrics import EVALUATE, LEARN
from experiments.rl.progress import format_seconds, ran_seconds
from experiments.rl.report import SMOOTH, smooth
from experiments.rl.settings import unchecked_settings
from experiments.watch.balance import balance_figures, layer_maps
from experiments.watch.curves import learning_figures, short
from experiments.watch.last_step import phase_bar, rank_bars
from experiments.watch.run_data import Line, RunData, SeedData, is_number, values_of
from relibra_jax.cli.pages import page_template
from relibra_jax.support.counted import counted

TEMPLATE: Final = Path(__file__).with_name("page.html.jinja")
STEPS_OF_SAMPLES: Final = 3
"""The number of last steps whose sample texts are shown."""


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""


def run_page(run: RunData, *, reload_seconds: int | None = None) -> str:
    """Return the page of a run as HTML.

    Args:
        run: what the run has written.
        reload_seconds: the seconds after which the page reloads itself, unless the run is finished. None for a page
            that does not.
    """
    seed, planner = run.latest, str(run.settings.get("planner", "relibra"))
    return page_template(TEMPLATE.read_text(encoding="utf-8")).render(
        name=run.folder.resolve().name,
        lead=_lead(run),
        state=_state(run),
        reload=None if run.finished else reload_seconds,
        tiles=[] if seed is None else _tiles(run, seed),
        figures=[figure for figure in learning_figures(run) if figure.drawing],
        latest=seed,
        balance=[]
        if seed is None
        else [figure for figure in balance_figures(seed, planner) if figure.drawing],
        heat=None if seed is None else layer_maps(seed),
        ranks=None if seed is None or seed.last is None else rank_bars(seed.last),
        phases=None if seed is None or seed.last is None else phase_bar(seed.last),
        last=None if seed is None else seed.last,
        samples=[] if seed is None else seed.samples[: -STEPS_OF_SAMPLES - 1 : -1],
        settings={name: json.dumps(value) for name, value in run.settings.items()},
    )


def _lead(run: RunData) -> str:
    settings = run.settings
    # Without checks: the other settings may be those of an earlier version.
    of_names: dict[str, Any] = {
        name: settings[name] for name in ("task", "prompts_file", "model", "policy") if name in settings
    }
    named = unchecked_settings(Train, of_names)
    parts = [named.task_name, settings.get("algorithm"), named.model_name, settings.get("planner")]
    ranks = settings.get("ranks")
    if isinstance(ranks, dict) and "nodes" in ranks and "ranks_per_node" in ranks:
        parts.append(f"{counted(ranks['nodes'], 'node')} of {counted(ranks['ranks_per_node'], 'rank')}")
    return " · ".join(str(part) for part in parts if part)


def _state(run: RunData) -> str:
    if run.latest is None:
        return "no step yet"
    at = datetime.datetime.fromtimestamp(run.latest.written, datetime.UTC)
    written = f"last line {at:%Y-%m-%d %H:%M:%S} UTC"
    return f"finished, {written}" if run.finished else f"not finished, {written}"


def _tiles(run: RunData, seed: SeedData) -> list[Tile]:
    steps = [line for line in seed.lines if line["kind"] != EVALUATE]
    total = run.total_steps
    done = int(steps[-1]["step"]) + 1 if steps else 0
    seeds = f"seed {seed.seed}" if len(run.seeds) == 1 else f"seed {seed.seed}, {len(run.seeds)} begun"
    tiles = [Tile("steps", f"{done}" + (f" / {total}" if total else ""), seeds)]
    evaluated = values_of(seed.of_kind(EVALUATE), "evaluation/reward")
    if evaluated:
        tiles.append(
            Tile("evaluation reward", short(evaluated[-1][1]), f"{short(evaluated[0][1])} at the first")
        )
    line = seed.last
    if line is None:
        return tiles
    rewards = values_of(seed.of_kind(LEARN), "reward/mean")
    if rewards:
        tiles.append(
            Tile(
                "reward", short(smooth([float(value) for _, value in rewards])[-1]), f"mean of {SMOOTH} steps"
            )
        )
    both = _text(line, "balance/imbalance_static", "{} static")
    for label, name, form, note in (
        ("imbalance", "balance/imbalance", "{:.3f}", both),
        ("response", "response/tokens", "{:.1f}", _text(line, "response/longest", "tokens, longest {}")),
        ("speed", "speed/tokens_per_second", "{:,.0f}", "tokens/s"),
        ("step", "time/step_seconds", "{:.2f}", "seconds"),
    ):
        if is_number(line.get(name)):
            tiles.append(Tile(label, form.format(line[name]), note))
    modelled = line.get("time/modelled_plan_seconds")
    if is_number(modelled):
        ran = format_seconds(ran_seconds(line))
        tiles.append(Tile("plan, modelled", format_seconds(modelled), f"ran {ran}, one epoch"))
    if is_number(line.get("memory/device_peak_bytes")):
        tiles.append(Tile("device memory", f"{line['memory/device_peak_bytes'] / 1e9:.1f}", "GB at most"))
    return tiles


def _text(line: Line, name: str, form: str) -> str:
    value = line.get(name)
    return form.format(short(value) if isinstance(value, float) else value) if is_number(value) else ""
