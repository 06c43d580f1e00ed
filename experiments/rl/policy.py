"""The named policies, and the log-probabilities of tokens under a policy.

A policy is a `relibra_jax.models.LanguageModel`. The named ones have Qwen3-MoE's architecture (arXiv:2505.09388).
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from experiments.rl.tokens import VOCABULARY
from relibra_jax.contract.types import Array
from relibra_jax.execution.gating import GATINGS
from relibra_jax.models import ModelConfig
from relibra_jax.nnx import RowPacking

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


def token_log_probs(
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    packing: RowPacking | None = None,
) -> Float[jax.Array, "B T"]:
    """Compute the log-probability of every token given the tokens before it.

    Args:
        logits: the logits of `relibra_jax.models.ModelOutput`.
        tokens: the tokens that the model ran on.
        temperature: the temperature, which divides the logits, above 0.
        packing: the samples of each row, if rows hold several samples. None for one sample in each row.

    Returns:
        The log-probabilities, float32. Entry t belongs to token t and comes from the logits of token t - 1. It is 0 for
        the first token of a sample.
    """
    log_probs = jax.nn.log_softmax(logits[:, :-1] / temperature)
    of_next = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    of_tokens = jnp.pad(of_next, [(0, 0), (1, 0)])
    return of_tokens if packing is None else jnp.where(jnp.asarray(packing.positions) == 0, 0, of_tokens)
