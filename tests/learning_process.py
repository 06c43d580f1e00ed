"""Run by test_rl_processes.py: ``python -m experiments.run`` with the smallest policy, as one process of a run."""

import dataclasses
import sys
from pathlib import Path

from experiments import run
from experiments.rl import configs, state
from experiments.rl.configs import Train
from experiments.rl.policy import POLICIES, TINY
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
state.FIRST_CAPACITIES = SIZES
small = Train(
    task="copy",
    policy="smallest",
    warmup_steps=1,
    steps=3,
    prompts=8,
    responses_per_prompt=4,
    prompt_tokens=14,
    response_tokens=7,
    evaluation_batches=1,
    anneal_steps=20,
    micro_batches=2,
    epochs=2,
    learning_rate=3e-3,
    checkpoint_every=1,
)
run.CONFIGS = {"small": small}
run.SUMMARIES = {"small": "a run of a few seconds"}
sys.exit(run.main(sys.argv[1:]))
