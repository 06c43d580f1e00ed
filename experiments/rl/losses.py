"""The losses of reinforcement learning: the clipped losses of policy and critic, over a whole batch.

With the ratio rho_t = exp(log p_t - log p_old_t), the advantage A_t and the weight w_t of every token t (PPO,
arXiv:1707.06347; clip-higher and token-level weights from DAPO, arXiv:2503.14476),

    policy = - sum_t w_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

    w_t    = 1 / tokens of the batch                                   token-level: every token counts the same
           = 1 / (responses of the batch * tokens of its response)     sample-level: every response counts the same

and with the value V_t, the one before the updates V_old_t and the target R_t,

    critic = 1/2 sum_t w_t max((V_t - R_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - R_t)^2)

Weights, advantages and targets are computed for the whole batch, before its samples are assigned to micro-batches and
ranks. The loss is then a sum over tokens, which does not depend on the assignment.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.contract.types import Array


class PolicyLoss(NamedTuple):
    """The share of one micro-batch in the policy loss and its statistics. The shares add up to those of the batch."""

    loss: Float[Array, ""]
    """The loss."""
    clipped: Float[Array, ""]
    """The total weight of the tokens whose ratio was clipped."""
    kl: Float[Array, ""]
    """The weighted sum of ``rho - 1 - log rho``, an estimate of KL(old, new) that is never negative."""


def token_weights(counted: Bool[Array, "B T"], *, token_level: bool) -> Float[jax.Array, "B T"]:
    """Compute the weight of every token in the loss.

    Args:
        counted: True on the tokens that are learned from.
        token_level: whether every token has the same weight (DAPO), and not every sample (GRPO).

    Returns:
        The weights, which add up to 1 over the batch, or to 0 if nothing is learned from.

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
    """Compute the clipped policy loss; the formula is at the top of the file.

    Args:
        log_prob: the log-probabilities of the tokens under the current policy. Gradients flow through them.
        old_log_prob: the log-probabilities of the same tokens under the policy before the updates.
        advantage: the advantages of the tokens, from `experiments.rl.algorithms`.
        weight: the weights of the tokens, as `token_weights` returns them.
        clip_low: the distance below 1 at which the ratio is clipped.
        clip_high: the distance above 1 at which the ratio is clipped. In DAPO's clip-higher it exceeds ``clip_low``.

    Returns:
        The loss and its statistics.

    >>> loss = policy_loss(*(jnp.array(x) for x in ([[0.5]], [[0.0]], [[2.0]], [[1.0]])), clip_low=0.2, clip_high=0.3)
    >>> round(float(loss.loss), 3), float(loss.clipped)
    (-2.6, 1.0)
    """
    used = weight > 0
    log_ratio = jnp.where(used, log_prob - jax.lax.stop_gradient(old_log_prob), 0)
    ratio = jnp.exp(log_ratio)
    unclipped = ratio * advantage
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage
    share = jnp.where(clipped < unclipped, weight, 0).sum()
    kl = (weight * (ratio - 1 - log_ratio)).sum()
    return PolicyLoss(-(weight * jnp.minimum(unclipped, clipped)).sum(), share, jax.lax.stop_gradient(kl))


def value_loss(
    value: Float[Array, "*samples T"],
    old_value: Float[Array, "*samples T"],
    target: Float[Array, "*samples T"],
    weight: Float[Array, "*samples T"],
    *,
    clip: float,
) -> Float[jax.Array, ""]:
    """Compute the clipped loss of the critic; the formula is at the top of the file.

    Args:
        value: the current values of the tokens. Gradients flow through them.
        old_value: the values of the tokens before the updates.
        target: the values that the critic learns.
        weight: the weights of the critic's tokens, as `token_weights` returns them.
        clip: the maximum change of a value from its old value.

    Returns:
        The loss.

    >>> float(value_loss(*(jnp.array([[x]]) for x in (0.5, 0.0, 1.0, 1.0)), clip=0.25))
    0.28125
    """
    used = weight > 0
    value, old_value, target = (jnp.where(used, each, 0) for each in (value, old_value, target))
    clipped = old_value + jnp.clip(value - old_value, -clip, clip)
    error = jnp.maximum(jnp.square(value - target), jnp.square(clipped - target))
    return 0.5 * (weight * error).sum()


def supervised_loss(
    log_prob: Float[Array, "*samples T"], weight: Float[Array, "*samples T"]
) -> Float[jax.Array, ""]:
    """Compute the weighted cross-entropy of one micro-batch. The sum over micro-batches is that of the batch."""
    return -(jnp.asarray(weight) * log_prob).sum()
