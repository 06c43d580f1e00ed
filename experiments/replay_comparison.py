"""``python -m experiments.replay_comparison``: compare routing replay with what is done without it, seed by seed.

Rollouts compute in bfloat16 and training in float32, so tokens are sampled under other log-probabilities, and with
other experts, than those of the trained policy. Four ways to learn from them have the same prompts, seeds and steps:

    R3          recompute and updates replay the experts of the rollout (arXiv:2510.11370)
    R2          the recompute routes live, and the updates replay its experts
    live, TIS   recompute and updates route live; advantages are weighted by truncated importance ratios
    live, GSPO  recompute and updates route live; one ratio for a response, with the paper's clip (arXiv:2507.18071)

The same command resumes a stopped comparison. It writes a folder of runs for every variant, ``replay_comparison.json``
and ``replay_comparison.png`` to ``--out``. Times are measured on the devices of this host, or modelled for the tiny
policy on the cluster that a run names; all else is determined by the seeds.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.compared_runs import command_of, mean_and_error, run_variants
from experiments.program import run_program
from experiments.rl.configs import Train
from experiments.rl.correction import Correction
from experiments.rl.losses import Clip
from experiments.rl.metrics import EVALUATE, LEARN
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, SERIES
from relibra_jax.evaluation import Ranks
from relibra_jax.support.atomic_write import write_json

SHARED: Final = Train(
    task="numbers",
    rollout_dtype="bfloat16",
    ranks=Ranks(nodes=2, ranks_per_node=2),
    pack_sequences=False,
    prompts=16,
    responses_per_prompt=8,
    prompt_tokens=12,
    response_tokens=32,
    micro_batches=2,
    updates=2,
    epochs=2,
    learning_rate=5e-4,
    warmup_steps=64,
    steps=24,
    evaluation_batches=2,
    evaluate_every=8,
)
"""The settings that all runs share. Padded sequences have one shape for batches of any number of tokens."""
COMPARED: Final[dict[str, dict[str, Any]]] = {
    "R3": {},
    "R2": {"routing": "recompute"},
    "live, TIS": {"replay": False, "correction": Correction(kind="truncate")},
    "live, GSPO": {
        "replay": False,
        "loss": "gspo",
        "token_weights": "responses",
        "clip": Clip(low=3e-4, high=4e-4),
    },
}
"""The compared variants, with the settings in which they differ from `SHARED`."""
STYLES: Final = dict(zip(COMPARED, zip(SERIES[:4], "os^D", strict=True), strict=True))
"""The colour and marker of each variant."""
ROWS: Final = (
    ("start", "reward_start", "{:.3f}"),
    ("end", "reward_end", "{:.3f}"),
    ("mismatch", "mismatch", "{:.4f}"),
    ("mismatch, 99%", "mismatch_99", "{:.3f}"),
    ("largest", "mismatch_largest", "{:.2f}"),
    ("changed", "routing_changed", "{:.1%}"),
    ("clipped", "clipped", "{:.1%}"),
    ("recompute", "imbalance_recompute", "{:.3f}"),
    ("updates", "imbalance", "{:.3f}"),
    ("static", "imbalance_static", "{:.3f}"),
    ("modelled, ms", "modelled_milliseconds", "{:.3f}"),
    ("step, s", "step_seconds", "{:.2f}"),
)
"""The rows of the table: head, key of `summarise`, and format."""
ROWS_EXPLAINED: Final = (
    "means over learning steps, with the standard error over seeds; start, end: mean reward on the evaluation prompts,"
    " after the warm-up and at the end; mismatch: |log p - log q| of sampled tokens between recompute and rollout, its"
    " mean, its 99% quantile and its largest; changed: expert choices in which the live router of the last epoch"
    " differs from the record, which is the rollout's, and for R2 the recompute's; clipped: weight of tokens whose"
    " ratio was clipped; recompute, updates: max / mean of rank load as they ran; static: the same batches with experts"
    " where they started; modelled: the updates of one epoch, for R3 with the recompute, at the tiny policy's sizes on"
    " the cluster that the runs name: for R3 and R2 under the plan, for the others at the homes of the batch before,"
    " without replicas; step: median of the measured time on this host."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayComparison:
    """Compare learning with and without routing replay, from rollouts in lower precision."""

    out: Path = Path("out/replay_comparison")
    """The folder for runs and results."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds; every variant runs once with each."""
    warmup_steps: int = SHARED.warmup_steps
    """The number of supervised updates before the first rollout."""
    steps: int = SHARED.steps
    """The number of batches of responses to learn from."""


def variant_config(variant: str, config: ReplayComparison) -> Train:
    """Return the settings of a variant's runs.

    Args:
        variant: the name of the variant, a key of `COMPARED`.
        config: the settings of the comparison.
    """
    return dataclasses.replace(
        SHARED,
        **COMPARED[variant],
        seeds=config.seeds,
        warmup_steps=config.warmup_steps,
        steps=config.steps,
        out=_folder(variant, config),
    )


def main(config: ReplayComparison) -> None:
    """Start or resume the runs that are not complete, and report the results.

    Args:
        config: the settings of the comparison.

    Raises:
        ValueError: if the folder contains runs with other settings.
    """
    console = Console()
    settings = {variant: variant_config(variant, config) for variant in COMPARED}
    lines = run_variants(settings, console)
    if lines is None:
        return
    by_seed = {
        variant: [summarise(run, settings[variant]) for run in runs] for variant, runs in lines.items()
    }
    means = {variant: average(runs) for variant, runs in by_seed.items()}
    numbers = {variant: {"average": means[variant], "by_seed": runs} for variant, runs in by_seed.items()}
    write_json(
        config.out / "replay_comparison.json",
        {"command": command_of("experiments.replay_comparison", config), "variants": numbers},
    )
    draw(config.out / "replay_comparison.png", lines)
    console.print(_table(means, config.seeds))
    console.print(ROWS_EXPLAINED, style="dim")


def _folder(variant: str, config: ReplayComparison) -> Path:
    return config.out / variant.lower().replace(", ", "-")


def summarise(lines: Sequence[dict[str, Any]], config: Train) -> dict[str, Any]:
    """Summarise one run over all its learning steps.

    Args:
        lines: the metrics of the run, one dictionary for each step.
        config: the settings of the run.

    Returns:
        Rewards, means and medians by name, as `ROWS_EXPLAINED` says.
    """
    learn_lines = [line for line in lines if line["kind"] == LEARN]
    rewards = [line["evaluation/reward"] for line in lines if line["kind"] == EVALUATE]

    def mean(name: str) -> float:
        values = [line[name] for line in learn_lines if line[name] is not None]
        return float(np.mean(values)) if values else float("nan")

    quantiles = np.array([line["mismatch/log_prob_quantiles"] for line in learn_lines])
    planned = "plan" if config.replay else "staying"
    # A recompute without a number of its own ran under the plans of the updates.
    imbalance = mean("balance/imbalance" if config.replay else "balance/imbalance_live")
    own = mean("balance/imbalance_recompute") if config.recomputes_live else imbalance
    return {
        "reward_start": rewards[0],
        "reward_end": rewards[-1],
        "reward_by_evaluation": rewards,
        "mismatch": mean("mismatch/log_prob"),
        "mismatch_median": float(quantiles[:, 0].mean()),
        "mismatch_99": float(quantiles[:, 2].mean()),
        "mismatch_largest": float(quantiles[:, 3].max()),
        "routing_changed": mean("routing/changed_share"),
        "clipped": mean("policy/clipped_share"),
        "kl": mean("policy/kl"),
        "skipped": int(sum(line["policy/skipped"] for line in learn_lines)),
        "imbalance_recompute": own,
        "imbalance": imbalance,
        "imbalance_static": mean("balance/imbalance_static"),
        "modelled_milliseconds": 1e3 * mean(f"time/modelled_{planned}_seconds"),
        "step_seconds": float(np.median([line["time/step_seconds"] for line in learn_lines])),
    }


def average(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Average the summaries of several seeds.

    Args:
        runs: the summary of each seed.

    Returns:
        The mean of every number, and its standard error, the deviation of a sample over the root of the number of
        seeds: None for a single seed. Lists are averaged entry by entry.

    >>> average([{"reward_end": 0.5}, {"reward_end": 0.75}])
    {'reward_end': {'mean': 0.625, 'error': 0.125}}
    """
    result = {}
    for name in runs[0]:
        mean, error = mean_and_error(np.array([run[name] for run in runs], float))
        result[name] = {"mean": mean.tolist(), "error": None if error is None else error.tolist()}
    return result


def draw(path: Path, lines: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Draw reward, mismatch, changed routes and imbalance over the steps: means over seeds, rewards with errors.

    Args:
        path: the PNG file to write.
        lines: the metrics of every run of every variant.
    """
    figure, panels = plt.subplots(1, 4, figsize=(16, 4), layout="constrained")
    reward, *others = panels
    for variant, runs in lines.items():
        colour, marker = STYLES[variant]
        evaluated = [[line for line in run if line["kind"] == EVALUATE] for run in runs]
        rewards = np.array([[line["evaluation/reward"] for line in run] for run in evaluated])
        steps = [line["step"] for line in evaluated[0]]
        mean, error = mean_and_error(rewards)
        reward.errorbar(
            steps, mean, error, color=colour, marker=marker, markersize=5, capsize=3, label=variant
        )
        learned = [[line for line in run if line["kind"] == LEARN] for run in runs]
        imbalance = "balance/imbalance"
        if learned[0][0]["balance/imbalance_live"] is not None:
            imbalance = "balance/imbalance_live"
        for axes, name in zip(others, ("mismatch/log_prob", "routing/changed_share", imbalance), strict=True):
            values = np.array([[line[name] for line in run] for run in learned]).mean(0)
            axes.plot([line["step"] for line in learned[0]], values, color=colour, linewidth=1.4)
    reward.set(ylabel="reward on evaluation prompts")
    for axes, label in zip(
        others, ("mean |log p - log q|", "expert choices changed", "imbalance of updates"), strict=True
    ):
        axes.set(ylabel=label)
    others[0].set(yscale="log")
    for axes in panels:
        axes.set(xlabel="step")
        bare(axes, "y")
    reward.legend(frameon=False)
    title = "Replay and none, from rollouts in bfloat16: means over seeds, bars are standard errors"
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left")
    save_figure(figure, path)


def _table(means: dict[str, dict[str, dict[str, Any]]], seeds: Sequence[int]) -> Table:
    """Make a table with a column for every variant: means and, for several seeds, their standard errors."""
    title = f"Replay and none, rollouts in {SHARED.rollout_dtype}, seeds {', '.join(map(str, seeds))}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for head in ("", *means):
        table.add_column(head, justify="right", no_wrap=True)
    for head, name, form in ROWS:
        shown = [
            [form.format(value) for value in numbers[name].values() if value is not None]
            for numbers in means.values()
        ]
        table.add_row(head, *map(" ± ".join, shown))
    return table


if __name__ == "__main__":
    sys.exit(run_program(main, ReplayComparison, description=__doc__))
