"""What learns: the policy, and beside it the critic of the algorithms that have one.

The critic is a value head on the policy's trunk. Its values come from the forward pass that log-probabilities come
from, so they follow the same replayed routing and the same plan, and cost one product of a vector with every token. A
critic that is a model of its own would have routers of its own: what they choose is recorded nowhere before they run,
so half of the training would run unplanned, beside a second set of experts and their optimizer state in memory.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from relibra_jax.models import LanguageModel
from relibra_jax.nnx.put_on_mesh import put_on_mesh
from relibra_jax.types import Array


class ValueHead(nnx.Module):
    """The value of a state, the tokens so far, as a linear function of the last token's hidden vector. New, it is 0;
    `experiments.rl.stages.start_critic` gives it its first bias.

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
        critic: the value head; None for algorithms without one.
    """

    def __init__(self, policy: LanguageModel, critic: ValueHead | None = None):
        self.policy, self.critic = policy, critic


def make_agent(policy: LanguageModel, mesh: Mesh, *, critic: bool) -> Agent:
    """An agent on the mesh of its policy, with a new value head if it has a critic.

    Args:
        policy: the language model, on ``mesh``.
        mesh: the device mesh.
        critic: whether the algorithm has a critic.
    """
    if not critic:
        return Agent(policy)
    head = ValueHead(policy.config.width)
    put_on_mesh(head, None, mesh)
    return Agent(policy, head)


def token_values(
    critic: ValueHead, hidden: Float[Array, "B T D"], used: Bool[Array, "B T"] | None = None
) -> Float[jax.Array, "B T"]:
    """The value of the state in which each token was chosen: of the tokens before it.

    Args:
        critic: the value head.
        hidden: the hidden vectors of `relibra_jax.models.ModelOutput`.
        used: the tokens whose values are used. The others have a value of 0, and no gradient, not even where the
            critic returns NaN; None for all tokens.

    Returns:
        float32; entry t is of token t, so it comes from the hidden vector of token t - 1. 0 for the first token of a
        row; in rows of several samples, the entry of a sample's first token means nothing.
    """
    before = hidden[:, :-1]
    if used is None:
        values = critic(before)
    else:
        # Both selections are needed: a weight that is NaN makes NaN of a gradient of 0.
        counts = jnp.asarray(used)[:, 1:]
        values = jnp.where(counts, critic(jnp.where(counts[..., None], before, 0)), 0)
    return jnp.pad(values, [(0, 0), (1, 0)])
