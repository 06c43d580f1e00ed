"""``python -m experiments.algorithms``: compare GRPO, PPO and T-PPO on long answers, for the same seeds and steps.

Each algorithm trains on the built-in task ``numbers``, whose answers are mostly short and sometimes long. A rollout
therefore waits for its longest response, which the windows of T-PPO avoid. The same command resumes a stopped
comparison. It writes a folder of runs for every algorithm, ``algorithms.json`` and ``algorithms.png`` to ``--out``. All
numbers are measured on the devices of this host; all except times are determined by the seeds.
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

from experiments.program import run_program
from experiments.rl.algorithms import ALGORITHMS, Critic
from experiments.rl.configs import Train
from experiments.rl.metrics import EVALUATE, LEARN
from experiments.rl.metrics_log import read_metrics
from experiments.rl.run_folder import saved_config
from experiments.rl.train import run_train
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, SERIES
from relibra_jax.support.atomic_write import write_json

COMPARED: Final = {"grpo": (SERIES[0], "o"), "ppo": (SERIES[2], "s"), "tppo": (SERIES[1], "^")}
"""The compared algorithms, with their colours and markers."""
LONG_ANSWERS: Final = Train(
    task="numbers",
    prompts=16,
    responses_per_prompt=8,
    prompt_tokens=12,
    response_tokens=96,
    micro_batches=2,
    epochs=2,
    learning_rate=5e-4,
    warmup_steps=64,
    steps=40,
    evaluation_batches=2,
    evaluate_every=10,
)
"""The settings that all runs share."""
WINDOW: Final = 24
"""The window of T-PPO in tokens, a quarter of the longest response."""
CRITIC: Final = Critic(rate=3.0)
FINISHED: Final = "summary.json"
"""The file that `experiments.rl.train.run_train` writes when the runs of all seeds are complete."""
COLUMNS: Final = (
    ("start", "reward_start", "{:.3f}"),
    ("end", "reward_end", "{:.3f}"),
    ("tokens run", "tokens_run", "{:,.0f}"),
    ("decoding steps", "decoding_steps", "{:,.0f}"),
    ("slots used", "slots_used_share", "{:.1%}"),
    ("generation", "generate_seconds", "{:.0f}s"),
    ("imbalance", "imbalance", "{:.4f}"),
    ("static", "imbalance_static", "{:.3f}"),
)
"""The columns of the table: head, key of `summarise`, and format."""
COLUMNS_EXPLAINED: Final = (
    "start, end: mean reward on the evaluation prompts, after the warm-up and at the end; tokens run: tokens that the"
    " model ran in rollouts, recomputes and updates; decoding steps: total of all rollouts; slots used: share of"
    " samples times decoding steps in which a token was sampled; generation: seconds in rollouts; imbalance:"
    " max / mean of rank load in recompute and update; static: the same for the same batches under static placement."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithms:
    """Compare reinforcement-learning algorithms."""

    out: Path = Path("out/algorithms")
    """The folder for runs and results."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds; every algorithm runs once with each."""
    warmup_steps: int = LONG_ANSWERS.warmup_steps
    """The number of supervised updates before the first rollout."""
    steps: int = LONG_ANSWERS.steps
    """The number of batches of responses to learn from."""


def algorithm_config(algorithm: str, config: Algorithms) -> Train:
    """Return the settings of an algorithm's runs.

    Args:
        algorithm: the name of the algorithm.
        config: the settings of the comparison.
    """
    entry = ALGORITHMS[algorithm]
    return dataclasses.replace(
        LONG_ANSWERS,
        algorithm=algorithm,
        window=WINDOW if entry.windows else None,
        critic=CRITIC if entry.critic else Critic(),
        seeds=config.seeds,
        warmup_steps=config.warmup_steps,
        steps=config.steps,
        out=config.out / algorithm,
    )


def main(config: Algorithms) -> None:
    """Start or resume the runs that are not complete, and report the results.

    Args:
        config: the settings of the comparison.

    Raises:
        ValueError: if the folder contains runs with other settings.
    """
    console = Console()
    settings = {algorithm: _settings(algorithm, config) for algorithm in COMPARED}
    lines = {}
    for algorithm in COMPARED:
        folder = config.out / algorithm
        if not (folder / FINISHED).exists():
            run_train(settings[algorithm], console, name=algorithm)
        if not (folder / FINISHED).exists():
            console.print("the run has stopped and is saved; run the same command to resume it")
            return
        lines[algorithm] = [read_metrics(folder / f"seed-{seed}" / "metrics.jsonl") for seed in config.seeds]
    summary = {algorithm: [summarise(run) for run in runs] for algorithm, runs in lines.items()}
    write_json(config.out / "algorithms.json", {"command": _command(config), "algorithms": summary})
    draw(config.out / "algorithms.png", lines)
    console.print(_table(summary, config.seeds))
    console.print(COLUMNS_EXPLAINED, style="dim")


def _settings(algorithm: str, config: Algorithms) -> Train:
    """Return the settings of an algorithm's runs, which resume the runs in the folder if there are any."""
    new, folder = algorithm_config(algorithm, config), config.out / algorithm
    if not (folder / "config.json").exists():
        return new
    saved = saved_config(folder)
    if dataclasses.replace(saved, out=new.out) != new:
        raise ValueError(f"{folder} contains runs with other settings; choose another --out")
    return dataclasses.replace(saved, resume=folder)


def summarise(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise one run over all its learning steps.

    Args:
        lines: the metrics of the run, one dictionary for each step.

    Returns:
        The totals, means and rewards, by name.
    """
    learn_lines = [line for line in lines if line["kind"] == LEARN]
    evaluation_rewards = [line["evaluation/reward"] for line in lines if line["kind"] == EVALUATE]

    def total(name: str) -> float:
        return float(sum(line[name] for line in learn_lines))

    def mean(name: str) -> float:
        return float(np.mean([line[name] for line in learn_lines]))

    decoding = np.array([line["response/decoding_steps"] for line in learn_lines])
    used_shares = np.array([line["response/slots_used_share"] for line in learn_lines])
    tokens, _ = reward_over_tokens(lines)
    return {
        "reward_start": evaluation_rewards[0],
        "reward_end": evaluation_rewards[-1],
        "reward_by_evaluation": evaluation_rewards,
        "tokens_run_by_evaluation": tokens,
        "tokens_run": total("batch/tokens_run"),
        "decoding_steps": int(decoding.sum()),
        "slots_used_share": float((used_shares * decoding).sum() / decoding.sum()),
        "generate_seconds": total("time/generate_seconds"),
        "step_seconds": total("time/step_seconds"),
        "imbalance": mean("balance/imbalance"),
        "imbalance_static": mean("balance/imbalance_static"),
        "imbalance_worst_step": max(line["balance/imbalance"] for line in learn_lines),
    }


def reward_over_tokens(lines: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Return the tokens that learning had run before each evaluation, and the rewards of the evaluations."""
    tokens, tokens_run, rewards = [], 0, []
    for line in lines:
        tokens_run += line["batch/tokens_run"] if line["kind"] == LEARN else 0
        if line["kind"] == EVALUATE:
            tokens.append(tokens_run)
            rewards.append(line["evaluation/reward"])
    return tokens, rewards


def draw(path: Path, lines: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Draw the reward over tokens, the share of decoding slots used, and the imbalance.

    Args:
        path: the PNG file to write.
        lines: the metrics of every run of every algorithm.
    """
    figure, (reward, slots, balance) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for algorithm, runs in lines.items():
        colour, marker = COMPARED[algorithm]
        for number, run in enumerate(runs):
            learn_lines = [line for line in run if line["kind"] == LEARN]
            step = np.arange(len(learn_lines))
            tokens, rewards = reward_over_tokens(run)
            name = algorithm if number == 0 else None
            reward.plot(
                np.array(tokens) / 1e3, rewards, color=colour, marker=marker, markersize=5, label=name
            )
            slots.plot(step, [line["response/slots_used_share"] for line in learn_lines], color=colour)
            for metric, style in (("imbalance", "-"), ("imbalance_static", ":")):
                values = [line[f"balance/{metric}"] for line in learn_lines]
                balance.plot(step, values, style, color=colour, linewidth=1)
    reward.set(xlabel="tokens run, thousands", ylabel="reward on evaluation prompts")
    slots.set(xlabel="step", ylabel="decoding slots used", ylim=(0, 1))
    balance.set(xlabel="step", ylabel="imbalance; dotted: static placement")
    reward.legend(frameon=False)
    for axes in (reward, slots, balance):
        bare(axes, "y")
    figure.suptitle(
        "The task numbers: reward, decoding slots used and imbalance; one line for every seed",
        color=INK,
        fontsize=11,
        x=0.01,
        ha="left",
    )
    save_figure(figure, path)


def _command(config: Algorithms) -> str:
    changed = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name != "out" and value != getattr(Algorithms, name)
    }
    options = [f"--{name.replace('_', '-')} {_text(value)}" for name, value in changed.items()]
    return " ".join(["python -m experiments.algorithms", *options])


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _table(summary: dict[str, list[dict[str, Any]]], seeds: Sequence[int]) -> Table:
    table = Table(
        title="GRPO, PPO and T-PPO on the task numbers", title_justify="left", box=box.SIMPLE_HEAD, padding=0
    )
    for head in ("algorithm", "seed", *(head for head, *_ in COLUMNS)):
        table.add_column(head, justify="right", no_wrap=True)
    for algorithm, runs in summary.items():
        for seed, numbers in zip(seeds, runs, strict=True):
            cells = [form.format(numbers[name]) for _, name, form in COLUMNS]
            table.add_row(algorithm, str(seed), *cells)
    return table


if __name__ == "__main__":
    sys.exit(run_program(main, Algorithms, description=__doc__))
