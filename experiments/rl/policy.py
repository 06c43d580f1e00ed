"""The agent that learns: the policy, the critic of the algorithms that have one, and what both say of tokens.

A policy is a `relibra_jax.models.LanguageModel`. The named ones have Qwen3-MoE's architecture (arXiv:2505.09388).

The critic is a value head on the policy's trunk. Its values come from the same forward pass as the log-probabilities.
So they follow the same replayed routing and the same plan, and cost one product of a vector with every token. A critic
that is a separate model would have its own routers, whose choices are not recorded before they run. Half of the
training would then run without a plan, and memory would hold a second set of experts with their optimizer state.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from experiments.rl.tokens import VOCABULARY
from relibra_jax.contract.types import Array
from relibra_jax.execution.gating import GATINGS
from relibra_jax.execution.node_streams import shift_tokens
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.models import LanguageModel, ModelConfig
from relibra_jax.nnx.put_on_mesh import put_on_mesh

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


class ValueHead(nnx.Module):
    """The value of a state (the tokens so far), as a linear function of the last token's hidden vector.

    A new head returns 0. `experiments.rl.targets.initialize_critic` gives it its first bias.

    Args:
        width: the model width D.
    """

    def __init__(self, width: int):
        self.weight = nnx.Param(jnp.zeros(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((), jnp.float32))

    def __call__(self, hidden: Float[Array, "*tokens D"]) -> Float[jax.Array, "*tokens"]:
        return jnp.asarray(hidden, jnp.float32) @ self.weight[...] + self.bias[...]


class Agent(nnx.Module):
    """The policy and its critic.

    Args:
        policy: the language model.
        critic: the value head. None for algorithms without a critic.
    """

    def __init__(self, policy: LanguageModel, critic: ValueHead | None = None):
        self.policy, self.critic = policy, critic


def make_agent(policy: LanguageModel, mesh: Mesh, *, critic: bool) -> Agent:
    """Make an agent on the mesh of its policy, with a new value head if the algorithm has a critic.

    Args:
        policy: the language model, on ``mesh``.
        mesh: the device mesh.
        critic: whether the algorithm has a critic.

    Returns:
        The agent.
    """
    if not critic:
        return Agent(policy)
    head = ValueHead(policy.config.width)
    put_on_mesh(head, None, mesh)
    return Agent(policy, head)


def token_values(
    critic: ValueHead,
    hidden: Float[Array, "B T D"],
    used: Bool[Array, "B T"] | None = None,
    *,
    parallel: ExpertParallel,
) -> Float[jax.Array, "B T"]:
    """Compute the value of the state before each token.

    Args:
        critic: the value head.
        hidden: the hidden vectors of `relibra_jax.models.ModelOutput`.
        used: True on the tokens whose values are needed. All others get the value 0 and no gradient, even if the critic
            returns NaN for them. None needs all tokens.
        parallel: the mesh over whose ranks the sequences are sharded.

    Returns:
        The values, float32. Entry t belongs to token t and comes from the hidden vector of token t - 1. It is 0 for the
        first token of a sequence. In packed sequences, the entry of a sample's first token is meaningless.
    """
    if used is None:
        values = critic(hidden)
    else:
        # Both selections are needed: NaN times a gradient of 0 is NaN.
        selected = shift_tokens(used, -1, parallel=parallel)
        values = jnp.where(selected, critic(jnp.where(selected[..., None], hidden, 0)), 0)
    return shift_tokens(values, 1, parallel=parallel)
