"""Settings for training runs of a few seconds: the smallest policy, batches of 32 samples, and buffers for them."""

import dataclasses

import numpy as np

from experiments.rl.policy import TINY
from experiments.rl.rollout import Rollout
from experiments.rl.targets import compute_targets
from experiments.rl.tokens import BYTES
from experiments.rl.updates import update_policy
from relibra_jax.routing.resident_push import PushSizes
from relibra_jax.routing.sizes import Capacities, ExchangeSizes

SMALLEST = dataclasses.replace(TINY, width=16, layers=2, heads=2, kv_heads=1, head_width=8, expert_width=16)
"""The policy ``smallest`` of the fixture `smallest_policy`."""
SMALL = {
    "task": "copy",
    "policy": "smallest",
    "warmup_steps": 1,
    "steps": 3,
    "prompts": 8,
    "responses_per_prompt": 4,
    "prompt_tokens": 14,
    "response_tokens": 7,
    "evaluation_batches": 0,
    "anneal_steps": 20,
    "micro_batches": 2,
    "epochs": 2,
    "learning_rate": 3e-3,
    # Without these two, which `test_rl_metrics` runs with, programs are the same in all steps and in most runs.
    "pack_sequences": False,
    "price": "balance",
}
"""The settings of a small run, as fields of `experiments.rl.configs.Train`."""
HASTY = dataclasses.replace(BYTES, ends=(*BYTES.ends, *range(128)))
"""A tokenizer in which about half of the tokens end a response."""
SIZES = Capacities(
    rows=512,
    flat=ExchangeSizes(pair=128, own=128, send=256, receive=512),
    node=ExchangeSizes(pair=128, own=128, send=256, receive=256),
    local=ExchangeSizes(pair=256, own=256, send=256, receive=512),
    exports=2,
    export_copies=8,
    push=PushSizes(exports=0, pair=0, own=0),
)
"""Buffer sizes that are large enough for every batch of such runs, so that one program serves all."""


def update_from(trainer, stages, responses, rewards, recomputed):
    """Learn from whole responses, as if this step had sampled them, and return the metrics of the updates."""
    finished = np.ones(len(responses.tokens), bool)
    rollout = Rollout(
        responses,
        responses.response_mask,
        ~responses.response_mask,
        finished,
        lambda: rewards,
        None,
        0,
        {},
        responses.tokens,
    )
    targets, _ = compute_targets(trainer.config, rollout, rewards, recomputed)
    return update_policy(trainer.state, trainer.config, stages, targets, recomputed)
