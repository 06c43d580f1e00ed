"""``python -m experiments.bench_exposed``: measure how much planning delays the steps of a training run.

Several runs alternate, step by step, and differ in two options. The first is how rewards are computed: in no time, by a
Python program that is started for every response, or by a remote service that answers after some milliseconds. The
second is when homes are searched: after the rollout, or during it from the responses that have already ended. The
exposed time is that of `experiments.rl.step_clock.exposed_seconds`.

A newly initialised policy responds on host devices. 16 of the 256 bytes end a response, so lengths vary at random. The
result says nothing about planning on a cluster, where the host has cores of its own for it.
"""

import dataclasses
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import jax
from rich.console import Console
from rich.table import Table

from experiments.interleaving import alternating
from experiments.program import run_program
from experiments.rl.configs import Train
from experiments.rl.devices import compile_quickly
from experiments.rl.step_clock import PLANNING
from experiments.rl.tasks import TASKS, Example, Task, exact
from experiments.rl.tokens import BYTES
from experiments.rl.trainer import Trainer
from relibra_jax.support.limits import check_integer, check_not_negative

JUDGE = "import sys; sys.exit(sys.argv[1].strip() != sys.argv[2])"
COLUMNS = {
    "during rollout": "time/plan_ahead_seconds",
    "rollout": "time/generate_seconds",
    **{name: f"time/{name}_seconds" for name in PLANNING},
    "recompute": "time/recompute_seconds",
    "score": "time/score_seconds",
    **{f"exposed {name}": f"time/exposed_{name}_seconds" for name in PLANNING},
    "step": "time/step_seconds",
}


@dataclass(frozen=True, kw_only=True)
class BenchExposed:
    """Measure the exposed planning time of training steps."""

    policy: str = "small"
    """The size of the policy, as of ``python -m experiments.run learn``."""
    prompts: int = 32
    """The number of prompts of a batch."""
    response_tokens: int = 64
    """The largest number of tokens of a response."""
    answer_ms: float = 20.0
    """The milliseconds that the remote service takes to answer."""
    repeats: int = 5
    """The number of timed steps of each run; the table shows medians."""


def by_program(completion: str, example: Example) -> float:
    """Score a response in a process of its own, as code tasks do."""
    # A response may contain NUL, which a command-line argument cannot.
    text = completion.replace("\0", "")
    return float(
        subprocess.run([sys.executable, "-I", "-S", "-c", JUDGE, text, example.answer]).returncode == 0
    )


def main(config: BenchExposed) -> None:
    """Run the training steps and print the table.

    Args:
        config: the settings.
    """

    def by_service(completion: str, example: Example) -> float:
        time.sleep(config.answer_ms / 1e3)
        return exact(completion, example)

    check_integer("repeats", config.repeats, least=1)
    check_not_negative("answer_ms", config.answer_ms)
    compile_quickly()
    judges = {"immediate": exact, "program": by_program, f"service, {config.answer_ms:g} ms": by_service}
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
    # The first two steps set the buffer sizes and compile the programs.
    runs = {name: trainer.learn for name, trainer in trainers.items()}
    lines = alternating(runs, repeats=config.repeats, warm_up=2)
    samples = config.prompts * Train.responses_per_prompt
    table = Table(
        title=f"{config.policy}: {samples} responses of at most {config.response_tokens} tokens, 2 x 4 host devices,"
        f" {platform.machine()}, jax {jax.__version__}; ms, medians of {config.repeats} steps",
        title_justify="left",
    )
    table.add_column("rewards")
    table.add_column("home search")
    for column in (*COLUMNS, "imbalance"):
        table.add_column(column, justify="right")
    for (judge, ahead), steps in lines.items():
        cells = [
            f"{1e3 * statistics.median(step[metric] or 0.0 for step in steps):.0f}"
            for metric in COLUMNS.values()
        ]
        imbalance = statistics.median(step["balance/imbalance"] for step in steps)
        search = "after rollout" if ahead == 1 else f"when {ahead:.0%} ended"
        table.add_row(judge, search, *cells, f"{imbalance:.3f}")
    Console(width=200).print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, BenchExposed, description=__doc__))
