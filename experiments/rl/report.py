"""The report of a run: a table, a figure and a summary, all computed from the metrics of its seeds."""

from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.rl.configs import Train
from experiments.rl.metrics import EVALUATE, LEARN, METRICS
from experiments.rl.metrics_log import read_seed
from experiments.rl.step_clock import PLANNING
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, LINE_STYLES, SERIES, planner_style
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.counted import counted

SMOOTH: Final = 7
"""The number of steps over which rewards are averaged, because a step's mean reward depends much on its prompts."""
PHASE_STYLES: Final = {"plan": (SERIES[5], "-"), "migrate": (SERIES[3], "--"), "size": (SERIES[0], "-.")}
"""The colour and the line style of each phase of planning."""
PANELS: Final = (
    f"reward, mean of {SMOOTH} steps",
    "imbalance of each micro-batch",
    "ms per step",
    "tokens/s, generation to update",
)
"""The labels of the panels in the figure."""
COLUMNS: Final = (
    ("start", "reward_warm_up", "{:.3f}"),
    ("end", "reward_end", "{:.3f}"),
    ("imbalance", "imbalance", "{:.4f}"),
    ("bound", "imbalance_bound", "{:.4f}"),
    ("static", "imbalance_static", "{:.3f}"),
    ("live", "imbalance_live", "{:.3f}"),
    ("plan", "plan_ms", "{:.0f}ms"),
    ("share", "plan_and_migrate_share", "{:.1%}"),
    ("tok/s", "tokens_per_second", "{:.0f}"),
    ("fail", "failed_rewards", "{:.0f}"),
    ("changed", "routing_changed_share", "{:.2%}"),
)
"""The columns of the table: head, name of the number in `summarise`, and format."""
COLUMNS_EXPLAINED: Final = (
    "start, end: mean reward on evaluation prompts after the warm-up and at the end; imbalance: max / mean of rank load"
    " in updates, and in a recompute that follows their plans, over all learning steps; bound: the lower bound of any"
    " replication with the same homes; static: the same batches under static placement; live: updates that route live,"
    " without replicas; plan: median ms in a step; share: planning and migration as a share of the step's time; tok/s:"
    " tokens of the batch per second of the step; fail: rewards that raised, were not finite,"
    " took too long or ended their process; changed: expert choices in which the live router differs from the record,"
    " in the last epoch."
)
"""The explanation printed below the table."""

SPEEDS: Final = {
    "response_tokens_per_second": "sampled in generation",
    "update_tokens_per_second": "run in updates, prompts among them",
}
"""The metrics ``speed/...`` in the report, and the text printed after each number."""


SUMMARY_FILE: Final = "summary.json"
"""The file in the folder of a run whose seeds are complete."""


def write_report(config: Train, folder: Path, console: Console, name: str) -> None:
    """Print the table, write ``summary.json`` and ``training.png``, and print their paths.

    Args:
        config: the settings of the run.
        folder: the folder of the run, with ``seed-*/metrics.jsonl``.
        console: the console to print to.
        name: the name of the run.
    """
    metrics = {seed: read_seed(folder, seed) for seed in config.seeds}
    summary = {seed: summarise(lines) for seed, lines in metrics.items()}
    copies = config.data * config.fsdp
    setting = (
        f"{name}: {config.task_name}, {config.model_name}, {config.samples} samples per batch, {config.planner} on"
        f" {'' if copies == 1 else f'{copies} groups of '}{counted(config.ranks.nodes, 'node')} x"
        f" {counted(config.ranks.ranks_per_node, 'rank')}"
    )
    figure, numbers = folder / "training.png", folder / SUMMARY_FILE
    write_json(numbers, {"setting": setting, "seeds": summary})
    console.print(_table(summary, setting))
    console.print(COLUMNS_EXPLAINED, style="dim")
    for seed, seed_summary in summary.items():
        by_layer = " ".join(f"{share:.2%}" for share in seed_summary.get("routing_changed_share", ()))
        console.print(f"changed, seed {seed}, by layer: {by_layer}", highlight=False)
        if note := recompute_note(config, seed_summary):
            console.print(f"recompute, seed {seed}: {note}", highlight=False, soft_wrap=True)
        speeds = [f"{seed_summary[name]:.0f} {text}" for name, text in SPEEDS.items() if name in seed_summary]
        if speeds:
            console.print(f"tokens/s, seed {seed}: {', '.join(speeds)}", highlight=False)
    training_figure(figure, metrics, setting, planner=config.planner)
    paths = f"figure: {figure}\nnumbers: {numbers}\nmetrics and checkpoints: {folder}/seed-*"
    console.print(paths, highlight=False, soft_wrap=True)


def recompute_note(config: Train, numbers: dict[str, Any]) -> str | None:
    """Describe a recompute that did not follow the plans of the updates.

    Args:
        config: the settings of the run.
        numbers: the numbers of the run, as `summarise` returns them.

    Returns:
        One sentence. None if the recompute followed the updates' plans, or there was no learning step yet.
    """
    if "imbalance_recompute" not in numbers:
        return None
    recompute, updates = numbers["imbalance_recompute"], numbers["imbalance"]
    if config.routing == "recompute":
        return (
            f"it recorded its routing and so ran without a plan, at imbalance {recompute:.4f}; in the updates the same"
            f" routing ran under a plan, at imbalance {updates:.4f}"
        )
    if not config.replay:
        return f"it routed live, as the updates, and so ran without a plan, at imbalance {recompute:.4f}"
    if config.recompute_micro_batches is not None:
        return (
            f"planned in {config.recompute_micro_batches} micro-batches of its own, imbalance {recompute:.4f}"
        )
    return None


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the metrics of one seed. Times are medians, so that steps with compilations do not dominate.

    Args:
        lines: the lines of metrics of the seed.

    Returns:
        The numbers by name, as ``summary.json`` has them.
    """
    learn_lines = _of_kind(lines, LEARN)
    evaluations = [line["evaluation/reward"] for line in _of_kind(lines, EVALUATE)]
    evaluations = [reward for reward in evaluations if reward is not None]
    wall = sum(line.get("time/step_seconds", 0) for line in lines)
    numbers: dict[str, Any] = {"steps": len(learn_lines), "wall_seconds": wall}
    if evaluations:
        numbers |= {"reward_warm_up": evaluations[0], "reward_end": evaluations[-1]}
    if not learn_lines:
        return numbers
    for name in ("imbalance", "imbalance_bound", "imbalance_static", "imbalance_live", "imbalance_recompute"):
        values = [line[f"balance/{name}"] for line in learn_lines]
        if values := [value for value in values if value is not None]:
            numbers[name] = float(np.mean(values))
    for name in SPEEDS:
        values = [line[f"speed/{name}"] for line in learn_lines]
        if values := [value for value in values if value is not None]:
            numbers[name] = float(np.median(values))
    times = {name: _seconds(learn_lines, name) for name in METRICS if name.startswith("time/")}
    planning = sum(np.nan_to_num(times[f"time/{phase}_seconds"]) for phase in PLANNING)
    return numbers | {
        **{
            _milliseconds(name): 1e3 * float(np.nanmedian(seconds))
            for name, seconds in times.items()
            if not np.isnan(seconds).all()
        },
        "plan_and_migrate_share": float(np.median(planning / times["time/step_seconds"])),
        "tokens_per_second": float(np.median([line["speed/tokens_per_second"] for line in learn_lines])),
        "failed_rewards": sum(line["reward/failed"] for line in learn_lines)
        + sum(line["evaluation/failed"] for line in _of_kind(lines, EVALUATE)),
        "reward_by_step": [line["reward/mean"] for line in learn_lines],
        "routing_changed_share": np.mean(
            [line["routing/changed_share_by_layer"] for line in learn_lines], 0
        ).tolist(),
    }


def training_figure(
    path: Path, metrics: dict[int, list[dict[str, Any]]], title: str, *, planner: str = "relibra"
) -> None:
    """Draw reward, imbalance of every micro-batch, time of planning and tokens/s over the steps.

    Args:
        path: the PNG file to write.
        metrics: the metrics of each seed.
        title: the setting of the run.
        planner: the name of the planner, which gives the colour of its plans.
    """
    figure, panels = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained")
    (reward, balance), (planning, speed) = panels
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left", parse_math=False)
    for number, (seed, lines) in enumerate(metrics.items()):
        colour, style = SERIES[number % len(SERIES)], LINE_STYLES[number % len(LINE_STYLES)]
        learn_lines = _of_kind(lines, LEARN)
        steps = np.array([line["step"] for line in learn_lines])
        rewards = [np.nan if line["reward/mean"] is None else line["reward/mean"] for line in learn_lines]
        reward.plot(steps, rewards, color=colour, linewidth=0.8, alpha=0.3)
        reward.plot(steps, smooth(rewards), style, color=colour, linewidth=1.8, label=f"seed {seed}")
        evaluated = [(line["step"], line["evaluation/reward"]) for line in _of_kind(lines, EVALUATE)]
        if evaluated:
            points = zip(*evaluated, strict=True)
            reward.plot(*points, "o", color=colour, markersize=6, label="prompts for evaluation")
        for kind, of, label in (
            ("imbalance_static", "static", "static placement"),
            ("imbalance", planner, "under the plan"),
        ):
            each = [line[f"balance/{kind}_by_micro_batch"] for line in learn_lines]
            where = np.repeat(steps, [len(values) for values in each])
            values = [value for values in each for value in values]
            marker = planner_style(of)
            balance.plot(where, values, marker.marker, color=marker.colour, markersize=3, label=label)
        seconds = np.array([line["time/step_seconds"] for line in learn_lines])
        planning.plot(steps, 1e3 * seconds, color=INK, linewidth=1.2, label="whole step")
        for phase in PLANNING:
            spent = _seconds(learn_lines, f"time/{phase}_seconds")
            of_phase, line_style = PHASE_STYLES[phase]
            planning.plot(steps, 1e3 * spent, line_style, color=of_phase, linewidth=1.2, label=phase)
        tokens = [line["speed/tokens_per_second"] for line in learn_lines]
        speed.plot(steps, tokens, style, color=colour, linewidth=1.2, label=f"seed {seed}")
    planning.set_yscale("log")
    for axes, label in zip(panels.flat, PANELS, strict=True):
        axes.set(xlabel="step", ylabel=label)
        bare(axes, "y")
        # What all seeds share is named once.
        handles, labels = axes.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        if named:
            axes.legend(named.values(), named.keys(), fontsize=8, frameon=False)
    save_figure(figure, path)


def _table(summary: dict[int, dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    names = {name for numbers in summary.values() for name in numbers}
    columns = [column for column in COLUMNS if column[1] in names]
    table.add_column("seed", no_wrap=True)
    for head, *_ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for seed, numbers in summary.items():
        cells = [form.format(np.mean(numbers[name])) if name in numbers else "" for _, name, form in columns]
        table.add_row(str(seed), *cells)
    return table


def _seconds(lines: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return the values of a metric, NaN for lines without it, such as lines of earlier versions."""
    return np.array([line.get(name) for line in lines], np.float64)


def _milliseconds(name: str) -> str:
    """Convert the name of a time metric to its name in the summary, which is in milliseconds."""
    return name.removeprefix("time/").removesuffix("_seconds") + "_ms"


def _of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def smooth(values: list[float]) -> list[float]:
    """Average each value with those before it, over `SMOOTH` steps."""
    windows = [values[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(values))]
    return [float(np.nanmean(window)) if np.isfinite(window[-1]) else np.nan for window in windows]
