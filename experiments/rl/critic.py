"""The critic: a small network of its own that learns from recorded hidden vectors of the policy.

Its input is the policy's last hidden vector after a token, which a recompute records; its output is the value of the
state before the next token. No gradient reaches the policy: policy and value are optimised independently, as in T-PPO
(arXiv:2506.15050). A second model would have routers of its own, whose choices nothing records before they run, and a
second set of experts. This critic runs neither experts nor attention, so its updates need no routes and no plan, and
passes over the batch are cheap.

With the hidden vector h, the value is

    V(h) = w . h + v . gelu(W h + u) + b

A new critic has w = v = 0 and b = 0, and so returns exactly 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, PRNGKeyArray, Shaped

from experiments.rl.algorithms import Critic
from experiments.rl.losses import value_loss
from experiments.rl.optimizer import AdamW
from relibra_jax.contract.types import Array
from relibra_jax.execution.memory import take
from relibra_jax.nnx.put_on_mesh import put_on_mesh


class ValueNetwork(nnx.Module):
    """The value of a state (the tokens so far), from the hidden vector of its last token.

    A new network returns 0. `experiments.rl.targets.initialise_critic` gives it its first bias.

    Args:
        inputs: the model width D.
        width: the number of hidden units. 0 leaves a linear function.
        rngs: the random keys of the first weights.
    """

    def __init__(self, inputs: int, width: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(inputs, width, rngs=rngs)
        self.linear = nnx.Param(jnp.zeros(inputs, jnp.float32))
        self.weight = nnx.Param(jnp.zeros(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((), jnp.float32))

    def __call__(self, hidden: Float[Array, "*tokens D"]) -> Float[jax.Array, "*tokens"]:
        hidden = jnp.asarray(hidden, jnp.float32)
        units = jax.nn.gelu(self.hidden(hidden))
        return hidden @ self.linear[...] + units @ self.weight[...] + self.bias[...]


def make_critic(
    inputs: int, critic: Critic, adamw: AdamW, mesh: Mesh, key: PRNGKeyArray
) -> tuple[ValueNetwork, nnx.Optimizer]:
    """Make a new critic and its optimizer, on every device of a mesh.

    Args:
        inputs: the model width D.
        critic: the settings of the critic.
        adamw: the settings of AdamW. The learning rate is the critic's, and constant.
        mesh: the device mesh.
        key: the random key, consumed.

    Returns:
        The critic and its optimizer.
    """
    network = ValueNetwork(inputs, critic.width, rngs=nnx.Rngs(key))
    options = {name: getattr(adamw, name) for name in ("b1", "b2", "eps", "weight_decay")}
    tx = optax.chain(
        optax.clip_by_global_norm(adamw.largest_gradient), optax.adamw(critic.learning_rate, **options)
    )
    put_on_mesh(network, None, mesh)
    optimizer = nnx.Optimizer(network, tx, wrt=nnx.Param)
    put_on_mesh(network, optimizer, mesh)
    return network, optimizer


class CriticTargets(NamedTuple):
    """What the critic learns, at the hidden vectors of its states (`of_states`)."""

    weights: Float[Array, "*M B T"]
    """The weight of every state, from `experiments.rl.losses.token_weights`. 0 for states without a return."""
    returns: Float[Array, "*M B T"]
    """The returns, which the critic learns."""
    old_values: Float[Array, "*M B T"]
    """The values before the updates."""


def of_states(entries: Shaped[Array, "B T"]) -> Shaped[np.ndarray, "B T"]:
    """Move the entry of every token to the state before it, which is that of the token before.

    >>> of_states(np.array([[0, 1, 2]])).tolist()
    [[1, 2, 0]]
    """
    return np.pad(np.asarray(entries)[:, 1:], [(0, 0), (0, 1)])


def of_tokens(values: Shaped[Array, "B T"]) -> Shaped[np.ndarray, "B T"]:
    """Move the value of every state to the token after it. The first token of a sample gets 0.

    >>> of_tokens(np.array([[1.0, 2.0, 3.0]])).tolist()
    [[0.0, 1.0, 2.0]]
    """
    return np.pad(np.asarray(values)[:, :-1], [(0, 0), (1, 0)])


@nnx.jit(graph_updates=False)
def state_values(critic: ValueNetwork, hidden: Float[Array, "M B T D"]) -> Float[jax.Array, "M B T"]:
    """Compute the value of the state after every token, one micro-batch at a time.

    Args:
        critic: the critic.
        hidden: the hidden vectors of a recompute, on the ranks, in the memory of host or devices.

    Returns:
        The values, float32.
    """
    graph, state = nnx.split(critic)

    def run_micro_batch(_, number):
        return None, nnx.merge(graph, state)(take(hidden, number))

    return jax.lax.scan(run_micro_batch, None, jnp.arange(len(hidden)))[1]


@nnx.jit(static_argnames="clip", donate_argnames=("critic", "optimizer"))
def update_critic(
    critic: ValueNetwork,
    optimizer: nnx.Optimizer,
    hidden: Float[Array, "M B T D"],
    targets: CriticTargets,
    *,
    clip: float,
) -> tuple[Float[jax.Array, ""], Float[jax.Array, ""]]:
    """Take one optimizer step of the critic on the gradient of all micro-batches, in place.

    The arrays of the critic and its optimizer are donated. If the loss or the norm is not finite, their values and the
    number of the step stay as they are.

    Args:
        critic: the critic.
        optimizer: its optimizer.
        hidden: the hidden vectors of a recompute, on the ranks, in the memory of host or devices.
        targets: what the critic learns, on the ranks.
        clip: the maximum change of a value from its old value (`experiments.rl.losses.value_loss`).

    Returns:
        The loss before the step, and the norm of its gradient before clipping.
    """
    graph, params, *rest = nnx.split(critic, nnx.Param, ...)

    def loss_of(params, hidden, targets):
        used = targets.weights > 0
        # What the critic says of other states has no gradient, even if it is NaN.
        values = nnx.merge(graph, params, *rest)(jnp.where(used[..., None], hidden, 0))
        return value_loss(values, targets.old_values, targets.returns, targets.weights, clip=clip)

    def add_micro_batch(total, number):
        hidden_vectors, learned = take((hidden, targets), number)
        one = jax.value_and_grad(loss_of)(params, hidden_vectors, learned)
        return jax.tree.map(jnp.add, total, one), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (loss, gradients), _ = jax.lax.scan(add_micro_batch, nothing, jnp.arange(len(hidden)))
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    modules = (critic, optimizer)
    before = nnx.to_pure_dict(nnx.state(modules))
    optimizer.update(critic, gradients)
    after = nnx.to_pure_dict(nnx.state(modules))
    nnx.update(modules, jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before))
    return loss, norm
