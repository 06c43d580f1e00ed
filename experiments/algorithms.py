"""``python -m experiments.algorithms``: compare GRPO, PPO and T-PPO, with and without windows, at equal tokens.

Answers are mostly short and sometimes long. Rollouts of whole responses wait for the longest one, which windows avoid.
With a window, GRPO and PPO learn from a response in the batch in which it ends (*credit at the end*), and T-PPO from
the new tokens of every batch, as published. The same command resumes a stopped comparison. It writes a folder of runs
for every variant, ``algorithms.json`` and ``algorithms.png`` to ``--out``. All numbers except times are determined by
the seeds. Runs are on one device: what is learned does not depend on the plan.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.compared_runs import command_of, mean_and_error, run_variants
from experiments.learning_curves import (
    Curve,
    decoding_steps_to,
    mean_curve,
    over_decoding_steps,
    read_curve,
)
from experiments.program import run_program
from experiments.rl.configs import Train
from experiments.rl.correction import Correction
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, SERIES
from relibra_jax.evaluation import Ranks
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.suggestions import suggest_names


class Variant(NamedTuple):
    """An algorithm with or without windows."""

    name: str
    """The name in the table and the figure."""
    algorithm: str
    """The name of the algorithm."""
    windows: bool
    """Whether rollouts sample windows."""
    batches: float
    """The number of batches for each one of GRPO, which run at least as many tokens."""
    colour: str
    marker: str


VARIANTS: Final[Mapping[str, Variant]] = MappingProxyType(
    {
        "grpo": Variant("GRPO", "grpo", False, 1.0, SERIES[0], "o"),
        "grpo-windows": Variant("GRPO in windows", "grpo", True, 1.7, SERIES[1], "^"),
        "ppo": Variant("PPO", "ppo", False, 1.0, SERIES[2], "s"),
        "ppo-windows": Variant("T-PPO, credit at the end", "ppo", True, 1.6, SERIES[3], "v"),
        "tppo": Variant("T-PPO as published", "tppo", True, 1.3, SERIES[4], "D"),
    }
)
"""The compared variants by the name of their folder."""
RUN: Final = Train(
    ranks=Ranks(nodes=1, ranks_per_node=1),
    planner="static",
    anneal_steps=0,
    pack_sequences=False,
    prompts=16,
    responses_per_prompt=8,
    micro_batches=2,
    epochs=2,
    learning_rate=5e-4,
    evaluation_batches=2,
    evaluate_every=6,
)
"""The settings that all runs share. Padded sequences have one shape for batches of any number of tokens."""


class Answers(NamedTuple):
    """The sizes of a task."""

    prompt_tokens: int
    response_tokens: int
    window: int


ANSWERS: Final[Mapping[str, Answers]] = MappingProxyType(
    {"numbers": Answers(12, 96, 24), "spell_backward": Answers(64, 12, 4)}
)
"""The tasks: a built-in one and one of reasoning-gym, which needs the extra ``rl``."""
TRUNCATED: Final = Correction(kind="truncate")
"""The correction for tokens that an older policy sampled, in windows whose responses are learned from at their end."""
EXPLAINED: Final = (
    "Mean and standard error over seeds. All but start and end are at the tokens that every run has run, in rollouts,"
    " recomputes and updates (tokens); decoding steps: of all rollouts until then; to GRPO's: decoding steps until the"
    " mean reward is GRPO's at these tokens, as a share of those of GRPO; slots: share of samples x decoding"
    " steps in which a token was sampled; explained: the critic's explained variance in the second half."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithms:
    """Compare reinforcement-learning algorithms.

    Raises:
        ValueError: if a task or variant is unknown.
    """

    out: Path = Path("out/algorithms")
    """The folder for runs and results."""
    task: str = "numbers"
    """The task: numbers, or spell_backward of reasoning-gym."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """The variants. GRPO is compared with all others."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """The seeds; every variant runs once with each."""
    warmup_steps: int = 64
    """The number of supervised updates before the first rollout."""
    steps: int = 30
    """The number of batches that GRPO learns from. The others learn from about as many tokens."""

    def __post_init__(self) -> None:
        for name, values, table in (("task", (self.task,), ANSWERS), ("variants", self.variants, VARIANTS)):
            for value in values:
                if value not in table:
                    raise ValueError(
                        f"{name} {value!r} must be one of {', '.join(table)}{suggest_names(value, table)}"
                    )
        if "grpo" not in self.variants:
            raise ValueError(
                f"variants {' '.join(self.variants)} must contain grpo, with which others are compared"
            )


def variant_config(variant: str, config: Algorithms) -> Train:
    """Return the settings of a variant's runs.

    Args:
        variant: the name of the variant.
        config: the settings of the comparison.
    """
    entry, answers = VARIANTS[variant], ANSWERS[config.task]
    settings: dict[str, Any] = {"algorithm": entry.algorithm}
    if entry.windows:
        settings["window"] = answers.window
        if entry.algorithm != "tppo":
            settings["correction"] = TRUNCATED
    return dataclasses.replace(
        RUN,
        task=config.task,
        prompt_tokens=answers.prompt_tokens,
        response_tokens=answers.response_tokens,
        seeds=config.seeds,
        warmup_steps=config.warmup_steps,
        steps=max(round(config.steps * entry.batches), 1),
        out=config.out / variant,
        **settings,
    )


def main(config: Algorithms) -> None:
    """Start or resume the runs that are not complete, and report the results.

    Args:
        config: the settings of the comparison.

    Raises:
        ValueError: if the folder contains runs with other settings.
    """
    console = Console()
    lines = run_variants({variant: variant_config(variant, config) for variant in config.variants}, console)
    if lines is None:
        return
    curves = {variant: [read_curve(run) for run in runs] for variant, runs in lines.items()}
    summary = summarise(curves)
    runs = {variant: [curve._asdict() for curve in of_seeds] for variant, of_seeds in curves.items()}
    write_json(
        config.out / "algorithms.json",
        {"command": command_of("experiments.algorithms", config), "summary": summary, "runs": runs},
    )
    draw(config.out / "algorithms.png", curves, config.task)
    console.print(_table(summary, config))
    console.print(EXPLAINED, style="dim")


def summarise(curves: Mapping[str, Sequence[Curve]]) -> dict[str, dict[str, Any]]:
    """Compare the variants at the tokens that every run has run.

    Args:
        curves: the curves of every variant, one for each seed.

    Returns:
        For every variant, its numbers by name: pairs of mean and standard error over the seeds.
    """
    budget = min(curve.tokens[-1] for of_seeds in curves.values() for curve in of_seeds)
    goal = np.mean([_at(curve.tokens, curve.reward, budget) for curve in curves["grpo"]])
    # Both ends of the share are read from mean curves over decoding steps, so GRPO's own is 1.
    _, rewards, _ = over_decoding_steps(curves["grpo"])
    goal = min(goal, rewards.max())
    baseline = decoding_steps_to(curves["grpo"], float(goal))
    assert baseline is not None
    summary = {}
    for variant, of_seeds in curves.items():
        reached = decoding_steps_to(of_seeds, float(goal))
        explained = [curve.explained_variance for curve in of_seeds if curve.explained_variance is not None]
        summary[variant] = {
            "tokens": int(budget),
            "reward_start": _mean([curve.reward[0] for curve in of_seeds]),
            "reward": _mean([_at(curve.tokens, curve.reward, budget) for curve in of_seeds]),
            "reward_end": _mean([curve.reward[-1] for curve in of_seeds]),
            "decoding_steps": _mean([_at(curve.tokens, curve.decoding_steps, budget) for curve in of_seeds]),
            "decoding_steps_to_grpo": None if reached is None else float(reached / baseline),
            "slots_used_share": _mean([curve.slots_used_share for curve in of_seeds]),
            "explained_variance": _mean(explained) if explained else None,
        }
    return summary


def _at(positions: Sequence[int], values: Sequence[int] | Sequence[float], place: int) -> float:
    return float(np.interp(place, positions, values))


def _mean(values: Sequence[float]) -> list[float | None]:
    """Return the mean and its standard error, which is None for one value."""
    mean, error = mean_and_error(np.asarray(values, np.float64))
    return [float(mean), None if error is None else float(error)]


def draw(path: Path, curves: Mapping[str, Sequence[Curve]], task: str) -> None:
    """Draw the mean reward over tokens and over decoding steps, with bands of one standard error.

    Args:
        path: the PNG file to write.
        curves: the curves of every variant, one for each seed.
        task: the name of the task.
    """
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    columns = (("tokens", 1e3, "tokens run, thousands"), ("decoding_steps", 1.0, "decoding steps"))
    for axes, (column, unit, label) in zip(panels, columns, strict=True):
        for variant, of_seeds in curves.items():
            entry = VARIANTS[variant]
            places, mean, error = mean_curve(
                [getattr(curve, column) for curve in of_seeds], [curve.reward for curve in of_seeds]
            )
            axes.plot(
                places / unit, mean, color=entry.colour, marker=entry.marker, markersize=4, label=entry.name
            )
            if error is None:
                continue
            axes.fill_between(
                places / unit, mean - error, mean + error, color=entry.colour, alpha=0.15, linewidth=0
            )
        axes.set(xlabel=label)
        bare(axes, "y")
    panels[0].set(ylabel="reward on evaluation prompts")
    panels[0].legend(frameon=False)
    seeds = len(next(iter(curves.values())))
    figure.suptitle(f"The task {task}: mean of {seeds} seeds", color=INK, fontsize=11, x=0.01, ha="left")
    save_figure(figure, path)


def _table(summary: Mapping[str, dict[str, Any]], config: Algorithms) -> Table:
    tokens = next(iter(summary.values()))["tokens"]
    table = Table(
        title=f"The task {config.task}, {len(config.seeds)} seeds, at {tokens:,} tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("variant", no_wrap=True)
    for head in ("start", "reward", "end", "decoding steps", "to GRPO's", "slots", "explained"):
        table.add_column(head, justify="right", no_wrap=True)
    for variant, numbers in summary.items():
        share = numbers["decoding_steps_to_grpo"]
        table.add_row(
            VARIANTS[variant].name,
            *(_with_error(numbers[name], 3) for name in ("reward_start", "reward", "reward_end")),
            _with_error(numbers["decoding_steps"], 0),
            "not reached" if share is None else f"{share:.2f}",
            _with_error(numbers["slots_used_share"], 2),
            "" if numbers["explained_variance"] is None else _with_error(numbers["explained_variance"], 2),
        )
    return table


def _with_error(value: Sequence[float | None], digits: int) -> str:
    return " ± ".join(f"{number:,.{digits}f}" for number in value if number is not None)


if __name__ == "__main__":
    sys.exit(run_program(main, Algorithms, description=__doc__))
