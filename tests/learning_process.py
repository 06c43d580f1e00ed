"""One process of a run in test_rl_processes.py: ``python -m experiments.run`` with the smallest policy.

The variable ``TROUBLE`` has the index of a process, a step, and what happens to the process in this step: ``fail`` or
``stop``. For every scored sample, the index of the scoring process is appended to the file that ``SCORED`` names. With
the variable ``SHARED_PROGRAMS``, the first process compiles for all.
"""

import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path

import jax
from support.runs import HASTY, SIZES, SMALL, SMALLEST

from experiments import run
from experiments.miniature.sharing import shared_programs
from experiments.rl import configs, state, tasks, train
from experiments.rl.config_file import ConfigFile
from experiments.rl.configs import Train
from experiments.rl.policy import POLICIES
from experiments.rl.settings import flat, plain_settings
from experiments.rl.trainer import Trainer

configs.POLICIES = {**POLICIES, "smallest": SMALLEST}


class Troubled(Trainer):
    """A trainer that fails, or gets SIGTERM, as ``TROUBLE`` says. Its responses end early, so it plans ahead."""

    def __init__(self, config, seed, *, task):
        super().__init__(config, seed, task=task, tokenizer=HASTY)

    def learn(self):
        number, step, event = os.environ.get("TROUBLE", "-1 -1 -").split()
        if (int(number), int(step)) == (jax.process_index(), self.state.step):
            if event == "fail":
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
SETTINGS = plain_settings(Train(**SMALL, checkpoint_every=1, plan_ahead=0.5, watch_every=1))
run.read_config = lambda name: ConfigFile(name, "a run of seconds", "", flat(SETTINGS), {})
with shared_programs() if "SHARED_PROGRAMS" in os.environ else contextlib.nullcontext():
    sys.exit(run.main(sys.argv[1:]))
