"""What reinforcement learning minimises: the clipped losses of policy and critic, over a whole batch.

With the ratio rho_t = exp(log p_t - log p_old_t), the advantage A_t and the weight w_t of every token t (PPO,
arXiv:1707.06347; clip-higher and token-level weights from DAPO, arXiv:2503.14476),

    policy = - sum_t w_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

    w_t    = 1 / tokens of the batch                                   token-level: every token counts the same
           = 1 / (responses of the batch * tokens of its response)     sample-level: every response counts the same

and with the value V_t, the one before the updates V_old_t and the target R_t,

    critic = 1/2 sum_t w_t max((V_t - R_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - R_t)^2)

Weights, advantages and targets are made for the whole batch, before its samples are assigned. What remains is a sum
over tokens: neither micro-batches nor the ranks that hold the samples enter it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.types import Array


class PolicyLoss(NamedTuple):
    """One micro-batch's share of the loss and of what reports show; shares of a batch are summed."""

    loss: Float[Array, ""]
    """The loss itself."""
    clipped: Float[Array, ""]
    """The weight of the tokens whose ratio the clip cut off."""
    kl: Float[Array, ""]
    """Weighted mean of ``rho - 1 - log rho``, an estimate of KL(old, new) that is never negative."""


def token_weights(counted: Bool[Array, "B T"], *, token_level: bool) -> Float[jax.Array, "B T"]:
    """The weight of every token in the loss; over the batch they sum to 1, or to 0 if no token counts.

    Args:
        counted: True on the tokens that are learned from.
        token_level: whether every token counts the same (DAPO), rather than every sample (GRPO).

    >>> token_weights(jnp.array([[1, 1], [0, 1]], bool), token_level=False).tolist()
    [[0.25, 0.25], [0.0, 0.5]]
    """
    weight = jnp.asarray(counted).astype(jnp.float32)
    if not token_level:
        weight = weight / jnp.maximum(weight.sum(1, keepdims=True), 1)
    return weight / jnp.maximum(weight.sum(), 1e-9)


def policy_loss(
    log_prob: Float[Array, "*samples T"],
    old_log_prob: Float[Array, "*samples T"],
    advantage: Float[Array, "*samples T"],
    weight: Float[Array, "*samples T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped policy loss; the mathematics stands at the top of the file.

    Args:
        log_prob: log-probabilities of the tokens under the policy that learns; differentiable.
        old_log_prob: log-probabilities of the same tokens under the policy as it was.
        advantage: the advantages of the tokens, from `experiments.rl.algorithms`.
        weight: what `token_weights` returned.
        clip_low: how far below 1 a ratio may help.
        clip_high: how far above 1; more than ``clip_low`` is DAPO's clip-higher.

    >>> loss = policy_loss(*(jnp.array(x) for x in ([[0.5]], [[0.0]], [[2.0]], [[1.0]])), clip_low=0.2, clip_high=0.3)
    >>> round(float(loss.loss), 3), float(loss.clipped)
    (-2.6, 1.0)
    """
    used = weight > 0
    log_ratio = jnp.where(used, log_prob - jax.lax.stop_gradient(old_log_prob), 0)
    ratio = jnp.exp(log_ratio)
    free = ratio * advantage
    held = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage
    share = jnp.where(held < free, weight, 0).sum()
    kl = (weight * (ratio - 1 - log_ratio)).sum()
    return PolicyLoss(-(weight * jnp.minimum(free, held)).sum(), share, jax.lax.stop_gradient(kl))


def value_loss(
    value: Float[Array, "*samples T"],
    old_value: Float[Array, "*samples T"],
    target: Float[Array, "*samples T"],
    weight: Float[Array, "*samples T"],
    *,
    clip: float,
) -> Float[jax.Array, ""]:
    """The clipped loss of the critic; the mathematics stands at the top of the file.

    Args:
        value: the values of the tokens; differentiable.
        old_value: their values before the updates.
        target: what the critic learns.
        weight: what `token_weights` returned of the critic's tokens.
        clip: how far from its old value a value may go.

    >>> float(value_loss(*(jnp.array([[x]]) for x in (0.5, 0.0, 1.0, 1.0)), clip=0.25))
    0.28125
    """
    used = weight > 0
    value, old_value, target = (jnp.where(used, each, 0) for each in (value, old_value, target))
    held = old_value + jnp.clip(value - old_value, -clip, clip)
    error = jnp.maximum(jnp.square(value - target), jnp.square(held - target))
    return 0.5 * (weight * error).sum()


def supervised_loss(
    log_prob: Float[Array, "*samples T"], weight: Float[Array, "*samples T"]
) -> Float[jax.Array, ""]:
    """Cross-entropy of the tokens that have a weight; a share of the batch's, to be summed."""
    return -(jnp.asarray(weight) * log_prob).sum()
