"""The agent that learns: the policy, and the critic of the algorithms that have one.

The critic is a value head on the policy's trunk. Its values come from the same forward pass as the log-probabilities.
So they follow the same replayed routing and the same plan, and cost one product of a vector with every token. A critic
that is a separate model would have its own routers, whose choices are not recorded before they run. Half of the
training would then run without a plan, and memory would hold a second set of experts with their optimizer state.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from relibra_jax.contract.types import Array
from relibra_jax.models import LanguageModel
from relibra_jax.nnx.put_on_mesh import put_on_mesh


class ValueHead(nnx.Module):
    """The value of a state (the tokens so far), as a linear function of the last token's hidden vector.

    A new head returns 0. `experiments.rl.stages.start_critic` gives it its first bias.

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
    critic: ValueHead, hidden: Float[Array, "B T D"], used: Bool[Array, "B T"] | None = None
) -> Float[jax.Array, "B T"]:
    """Compute the value of the state before each token.

    Args:
        critic: the value head.
        hidden: the hidden vectors of `relibra_jax.models.ModelOutput`.
        used: True on the tokens whose values are needed. All others get the value 0 and no gradient, even if the critic
            returns NaN for them. None needs all tokens.

    Returns:
        The values, float32. Entry t belongs to token t and comes from the hidden vector of token t - 1. It is 0 for the
        first token of a row. In rows of several samples, the entry of a sample's first token is meaningless.
    """
    before = hidden[:, :-1]
    if used is None:
        values = critic(before)
    else:
        # Both selections are needed: NaN times a gradient of 0 is NaN.
        selected = jnp.asarray(used)[:, 1:]
        values = jnp.where(selected, critic(jnp.where(selected[..., None], before, 0)), 0)
    return jnp.pad(values, [(0, 0), (1, 0)])
