"""``python -m experiments.bench_exposed``: by how much planning delays the steps of a run, measured.

Runs take turns, step by step, that differ in two things. Rewards take no time, or every response is judged by a Python
program that is started for it, or by a service elsewhere that answers after some milliseconds. And homes are searched
behind the rollout, or from responses that have ended while others are still generated. What is exposed is what
`experiments.rl.step_clock.exposed_seconds` says.

A new policy responds on host devices. 16 of the 256 bytes end a response, so that lengths are as uneven as chance makes
them; nothing is known of planning speed on a cluster, whose host has cores of its own for it.
"""

import dataclasses
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from experiments.rl.configs import Train
from experiments.rl.devices import compile_quickly
from experiments.rl.step_clock import PLANNING
from experiments.rl.tasks import TASKS, Example, Task, exact
from experiments.rl.tokens import BYTES
from experiments.rl.trainer import Trainer
from relibra_jax.cli.parsing import run_program
from relibra_jax.limits import check_integer, check_not_negative

JUDGE = "import sys; sys.exit(sys.argv[1].strip() != sys.argv[2])"
COLUMNS = {
    "beside rollout": "time/plan_ahead_seconds",
    "rollout": "time/generate_seconds",
    **{name: f"time/{name}_seconds" for name in PLANNING},
    "recompute": "time/recompute_seconds",
    "score": "time/score_seconds",
    **{f"exposed {name}": f"time/exposed_{name}_seconds" for name in PLANNING},
    "step": "time/step_seconds",
}


@dataclass(frozen=True, kw_only=True)
class BenchExposed:
    """Time steps."""

    policy: str = "small"
    prompts: int = 32
    response_tokens: int = 64
    answer_ms: float = 20.0
    """What the service takes for an answer."""
    repeats: int = 5


def by_program(completion: str, example: Example) -> float:
    """A judge as code tasks have them: a process for every response."""
    # What the policy makes up may hold NUL, which no argument can.
    text = completion.replace("\0", "")
    return float(
        subprocess.run([sys.executable, "-I", "-S", "-c", JUDGE, text, example.answer]).returncode == 0
    )


def main(config: BenchExposed) -> None:
    """Print the table."""

    def by_service(completion: str, example: Example) -> float:
        time.sleep(config.answer_ms / 1e3)
        return exact(completion, example)

    check_integer("repeats", config.repeats, least=1)
    check_not_negative("answer_ms", config.answer_ms)
    compile_quickly()
    judges = {"at once": exact, "a program": by_program, f"{config.answer_ms:g} ms away": by_service}
    tokenizer = dataclasses.replace(BYTES, ends=(*BYTES.ends, *range(16)))
    trainers = {}
    for judge, score in judges.items():
        task = Task(name="judged", draw=TASKS["copy"].draw, score=score)
        for ahead in (1.0, 0.75):
            settings = Train(
                policy=config.policy,
                warmup_steps=0,
                prompts=config.prompts,
                response_tokens=config.response_tokens,
                epochs=1,
                plan_ahead=ahead,
            )
            trainers[judge, ahead] = Trainer(settings, 0, task=task, tokenizer=tokenizer)
    lines: dict[tuple[str, float], list[dict[str, Any]]] = {name: [] for name in trainers}
    for round_ in range(config.repeats + 2):
        for name, trainer in trainers.items():
            line = trainer.learn()
            if round_ > 1:  # buffers have their sizes, and programs are compiled
                lines[name].append(line)
    samples = config.prompts * Train.responses_per_prompt
    table = Table(
        title=f"{config.policy}: {samples} responses of at most {config.response_tokens} tokens, 2 x 4 host devices,"
        f" {platform.machine()}, jax {jax.__version__}; ms, medians of {config.repeats} steps",
        title_justify="left",
    )
    table.add_column("rewards")
    table.add_column("homes searched")
    for column in (*COLUMNS, "imbalance"):
        table.add_column(column, justify="right")
    for (judge, ahead), steps in lines.items():
        cells = [
            f"{1e3 * statistics.median(step[metric] or 0.0 for step in steps):.0f}"
            for metric in COLUMNS.values()
        ]
        imbalance = statistics.median(step["balance/imbalance"] for step in steps)
        where = "behind the rollout" if ahead == 1 else f"at {ahead:.0%} ended"
        table.add_row(judge, where, *cells, f"{imbalance:.3f}")
    Console(width=200).print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, BenchExposed, description=__doc__))
