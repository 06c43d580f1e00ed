"""``python -m experiments.algorithms``: GRPO, PPO and T-PPO on long answers, with the same seeds and numbers of steps.

Each algorithm trains on the built-in task ``numbers``, most of whose answers are short and a few long, so that a
rollout waits for its longest response: that is what T-PPO's windows save. A run that was stopped is gone on with.
Written to ``--out``: a folder of every algorithm's runs, ``algorithms.json`` and ``algorithms.png``. Everything is
measured, on the devices of this host; numbers but those of time follow from the seeds.
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

from experiments.rl.algorithms import ALGORITHMS, Critic
from experiments.rl.configs import Train
from experiments.rl.metrics import EVALUATE, LEARN
from experiments.rl.metrics_log import read_metrics
from experiments.rl.saved_config import saved_config
from experiments.rl.train import run_train
from relibra_jax.atomic_write import write_json
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, SERIES
from relibra_jax.cli.parsing import run_program

COMPARED: Final = {"grpo": (SERIES[0], "o"), "ppo": (SERIES[2], "s"), "tppo": (SERIES[1], "^")}
"""The algorithms with their colours and markers."""
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
"""What all runs have in common."""
WINDOW: Final = 24
"""The window of T-PPO, a quarter of the room for a response."""
CRITIC: Final = Critic(rate=3.0)
FINISHED: Final = "summary.json"
"""What `experiments.rl.train.run_train` leaves when all seeds have come to their end."""
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
"""Head, number of `summarise` and format."""
COLUMNS_EXPLAINED: Final = (
    "start, end: mean reward on prompts for evaluation, after the warm-up and at the end; tokens run: through the model"
    " in rollouts, recomputes and updates; decoding steps: of all rollouts; slots used: of samples times decoding"
    " steps, those that sampled a token; generation: seconds in rollouts; imbalance: max / mean of rank load in"
    " recompute and update, and of the same batches under static placement."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithms:
    """Compare algorithms."""

    out: Path = Path("out/algorithms")
    """The folder of runs and results."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds; one run each of every algorithm."""
    warmup_steps: int = LONG_ANSWERS.warmup_steps
    """The supervised updates before the first rollout."""
    steps: int = LONG_ANSWERS.steps
    """The batches of responses that are learned from."""


def algorithm_config(algorithm: str, config: Algorithms) -> Train:
    """The settings of an algorithm's runs."""
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
    """Run what has not run, and report.

    Raises:
        ValueError: if the folder holds runs of other settings.
    """
    console = Console()
    settings = {algorithm: _settings(algorithm, config) for algorithm in COMPARED}
    lines = {}
    for algorithm in COMPARED:
        folder = config.out / algorithm
        if not (folder / FINISHED).exists():
            run_train(settings[algorithm], console, name=algorithm)
        if not (folder / FINISHED).exists():
            console.print("stopped and saved; the same command goes on")
            return
        lines[algorithm] = [read_metrics(folder / f"seed-{seed}" / "metrics.jsonl") for seed in config.seeds]
    summary = {algorithm: [summarise(run) for run in runs] for algorithm, runs in lines.items()}
    write_json(config.out / "algorithms.json", {"command": _command(config), "algorithms": summary})
    draw(config.out / "algorithms.png", lines)
    console.print(_table(summary, config.seeds))
    console.print(COLUMNS_EXPLAINED, style="dim")


def _settings(algorithm: str, config: Algorithms) -> Train:
    """The settings of an algorithm's runs, in a new folder or in the one that they have left."""
    new, folder = algorithm_config(algorithm, config), config.out / algorithm
    if not (folder / "config.json").exists():
        return new
    saved = saved_config(folder)
    if dataclasses.replace(saved, out=new.out) != new:
        raise ValueError(f"{folder} holds runs of other settings: choose another --out")
    return dataclasses.replace(saved, resume=folder)


def summarise(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of one run, over all its learning steps.

    Args:
        lines: the metrics of the run.
    """
    learned = [line for line in lines if line["kind"] == LEARN]
    evaluated = [line["evaluation/reward"] for line in lines if line["kind"] == EVALUATE]

    def total(name: str) -> float:
        return float(sum(line[name] for line in learned))

    def mean(name: str) -> float:
        return float(np.mean([line[name] for line in learned]))

    decoding = np.array([line["response/decoding_steps"] for line in learned])
    used = np.array([line["response/slots_used_share"] for line in learned])
    tokens, _ = reward_over_tokens(lines)
    return {
        "reward_start": evaluated[0],
        "reward_end": evaluated[-1],
        "reward_by_evaluation": evaluated,
        "tokens_run_by_evaluation": tokens,
        "tokens_run": total("batch/tokens_run"),
        "decoding_steps": int(decoding.sum()),
        "slots_used_share": float((used * decoding).sum() / decoding.sum()),
        "generate_seconds": total("time/generate_seconds"),
        "step_seconds": total("time/step_seconds"),
        "imbalance": mean("balance/imbalance"),
        "imbalance_static": mean("balance/imbalance_static"),
        "imbalance_worst_step": max(line["balance/imbalance"] for line in learned),
    }


def reward_over_tokens(lines: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """The reward of every evaluation, and the tokens that learning had run by then."""
    tokens, so_far, rewards = [], 0, []
    for line in lines:
        so_far += line["batch/tokens_run"] if line["kind"] == LEARN else 0
        if line["kind"] == EVALUATE:
            tokens.append(so_far)
            rewards.append(line["evaluation/reward"])
    return tokens, rewards


def draw(path: Path, lines: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Draw reward over tokens, the use of decoding slots, and balance.

    Args:
        path: the PNG file to write.
        lines: the metrics of every run of every algorithm.
    """
    figure, (reward, slots, balance) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for algorithm, runs in lines.items():
        colour, marker = COMPARED[algorithm]
        for number, run in enumerate(runs):
            learned = [line for line in run if line["kind"] == LEARN]
            step = np.arange(len(learned))
            tokens, rewards = reward_over_tokens(run)
            name = algorithm if number == 0 else None
            reward.plot(
                np.array(tokens) / 1e3, rewards, color=colour, marker=marker, markersize=5, label=name
            )
            slots.plot(step, [line["response/slots_used_share"] for line in learned], color=colour)
            for metric, style in (("imbalance", "-"), ("imbalance_static", ":")):
                values = [line[f"balance/{metric}"] for line in learned]
                balance.plot(step, values, style, color=colour, linewidth=1)
    reward.set(xlabel="thousand tokens run", ylabel="reward on prompts for evaluation")
    slots.set(xlabel="step", ylabel="decoding slots used", ylim=(0, 1))
    balance.set(xlabel="step", ylabel="imbalance; dotted: static placement")
    reward.legend(frameon=False)
    for axes in (reward, slots, balance):
        bare(axes, "y")
    figure.suptitle(
        "The task numbers: reward, use of decoding slots, balance; a line for every seed",
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
        title="GRPO, PPO and T-PPO on numbers", title_justify="left", box=box.SIMPLE_HEAD, padding=0
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
