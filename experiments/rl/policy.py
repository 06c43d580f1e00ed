"""The policies that learn: language models of Qwen3-MoE's architecture (arXiv:2505.09388)."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from flax import nnx

from experiments.rl.tokens import VOCABULARY
from relibra_jax.execution.gating import GATINGS
from relibra_jax.models import LanguageModel, ModelConfig

TINY: Final = ModelConfig(
    width=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_width=16,
    num_experts=16,
    gating=dataclasses.replace(GATINGS["qwen3-moe"], top_k=2),
    expert_width=64,
    vocabulary=VOCABULARY,
)

POLICIES: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "tiny": TINY,
        "small": dataclasses.replace(
            TINY,
            width=128,
            layers=6,
            heads=8,
            kv_heads=4,
            num_experts=32,
            gating=dataclasses.replace(TINY.gating, top_k=4),
            expert_width=96,
        ),
    }
)
"""The named policies, small enough for CPUs."""


class Agent(nnx.Module):
    """The model that a run trains: the policy, under the name that its arrays have in checkpoints.

    Args:
        policy: the language model.
    """

    def __init__(self, policy: LanguageModel):
        self.policy = policy
