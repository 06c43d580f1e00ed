"""Run by test_rl_processes.py: ``python -m experiments.run`` with the smallest policy, as one process of a run.

``TROUBLE`` holds the number of a process, a step and what happens to the process in it: ``fail`` or ``stop``. The
number of the process that scores goes to the file that ``SCORED`` names, once for every sample.
"""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import jax

from experiments import run
from experiments.rl import configs, state, tasks, train
from experiments.rl.configs import Train
from experiments.rl.policy import POLICIES, TINY
from experiments.rl.trainer import Trainer
from relibra_jax.capacity import Capacities, ExchangeSizes
from relibra_jax.resident_push import PushSizes

SMALLEST = dataclasses.replace(TINY, width=16, layers=2, heads=2, kv_heads=1, head_width=8, expert_width=16)
# Buffers that hold every batch here, so that one program is compiled.
SIZES = Capacities(
    rows=512,
    flat=ExchangeSizes(pair=128, own=128, send=256, receive=512),
    node=ExchangeSizes(pair=128, own=128, send=256, receive=256),
    local=ExchangeSizes(pair=256, own=256, send=256, receive=512),
    exports=2,
    export_copies=8,
    push=PushSizes(exports=0, pair=0, own=0),
)
configs.POLICIES = {**POLICIES, "smallest": SMALLEST}
SMALL = Train(
    task="copy",
    policy="smallest",
    warmup_steps=1,
    steps=3,
    prompts=8,
    responses_per_prompt=4,
    prompt_tokens=14,
    response_tokens=7,
    evaluation_batches=0,
    anneal_steps=20,
    micro_batches=2,
    epochs=2,
    learning_rate=3e-3,
    checkpoint_every=1,
)


class Troubled(Trainer):
    """Fails, or is asked to stop, where ``TROUBLE`` says."""

    def learn(self):
        number, step, what = os.environ.get("TROUBLE", "-1 -1 -").split()
        if (int(number), int(step)) == (jax.process_index(), self.state.step):
            if what == "fail":
                raise ValueError("no room\nfor this")
            os.kill(os.getpid(), signal.SIGTERM)
        return super().learn()


def score(completion, example):
    if path := os.environ.get("SCORED"):
        with Path(path).open("a") as file:
            file.write(f"{jax.process_index()}\n")
    return COPY.score(completion, example)


state.FIRST_CAPACITIES = SIZES
train.Trainer = Troubled
COPY = tasks.TASKS["copy"]
tasks.TASKS = {"copy": dataclasses.replace(COPY, score=score)}
run.CONFIGS, run.SUMMARIES = {"small": SMALL}, {"small": "a run of seconds"}
sys.exit(run.main(sys.argv[1:]))
