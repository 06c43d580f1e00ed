"""The losses of reinforcement learning: the clipped losses of policy and critic, over a whole batch.

With the ratio rho_t = exp(log p_t - log p_old_t), the advantage A_t and the weight w_t of every token t (PPO,
arXiv:1707.06347; clip-higher and token-level weights from DAPO, arXiv:2503.14476),

    policy = - sum_t w_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

    w_t    = 1 / tokens of the batch                                   token-level: every token counts the same
           = 1 / (responses of the batch * tokens of its response)     sample-level: every response counts the same

and with the value V_t, the one before the updates V_old_t and the return R_t,

    critic = 1/2 sum_t w_t max((V_t - R_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - R_t)^2)

Weights, advantages and returns are computed for the whole batch, before its samples are assigned to micro-batches and
ranks. The loss is then a sum over tokens, which does not depend on the assignment.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.contract.types import Array

LARGEST_LOG_RATIO: Final = 20.0
"""The bound of log-ratios before they are exponentiated: e^20 is 4.9e8, and larger ones overflow in gradients."""


class PolicyLoss(NamedTuple):
    """The share of one micro-batch in the policy loss and its statistics. The shares add up to those of the batch."""

    loss: Float[Array, ""]
    """The loss."""
    clipped: Float[Array, ""]
    """The total weight of the tokens whose ratio was clipped."""
    kl: Float[Array, ""]
    """The weighted sum of ``rho - 1 - log rho``, an estimate of KL(old, new) that is never negative."""


def token_weights(mask: Bool[Array, "B T"], *, token_level: bool) -> Float[jax.Array, "B T"]:
    """Compute the weight of every token in the loss.

    Args:
        mask: True on the tokens that are learned from.
        token_level: whether every token has the same weight (DAPO), and not every sample (GRPO).

    Returns:
        The weights, which add up to 1 over the batch, or to 0 if nothing is learned from.

    >>> token_weights(jnp.array([[1, 1], [0, 1]], bool), token_level=False).tolist()
    [[0.25, 0.25], [0.0, 0.5]]
    """
    weights = jnp.asarray(mask).astype(jnp.float32)
    if not token_level:
        weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1)
    return weights / jnp.maximum(weights.sum(), 1e-9)


def policy_loss(
    log_probs: Float[Array, "*samples T"],
    old_log_probs: Float[Array, "*samples T"],
    advantages: Float[Array, "*samples T"],
    weights: Float[Array, "*samples T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Compute the clipped policy loss; the formula is at the top of the file.

    Args:
        log_probs: the log-probabilities of the tokens under the current policy. Gradients flow through them.
        old_log_probs: the log-probabilities of the same tokens under the policy before the updates.
        advantages: the advantages of the tokens, from `experiments.rl.algorithms`.
        weights: the weights of the tokens, as `token_weights` returns them.
        clip_low: the distance below 1 at which the ratio is clipped.
        clip_high: the distance above 1 at which the ratio is clipped. In DAPO's clip-higher it exceeds ``clip_low``.

    Returns:
        The loss and its statistics.

    >>> log_probs, old_log_probs = jnp.array([[0.5]]), jnp.array([[0.0]])
    >>> advantages, weights = jnp.array([[2.0]]), jnp.array([[1.0]])
    >>> loss = policy_loss(log_probs, old_log_probs, advantages, weights, clip_low=0.2, clip_high=0.3)
    >>> round(float(loss.loss), 3), float(loss.clipped)
    (-2.6, 1.0)
    """
    used = weights > 0
    log_ratio = jnp.where(used, log_probs - jax.lax.stop_gradient(old_log_probs), 0)
    log_ratio = jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    unclipped = ratio * advantages
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    share = jnp.where(clipped < unclipped, weights, 0).sum()
    kl = (weights * (ratio - 1 - log_ratio)).sum()
    return PolicyLoss(-(weights * jnp.minimum(unclipped, clipped)).sum(), share, jax.lax.stop_gradient(kl))


def value_loss(
    values: Float[Array, "*samples T"],
    old_values: Float[Array, "*samples T"],
    returns: Float[Array, "*samples T"],
    weights: Float[Array, "*samples T"],
    *,
    clip: float,
) -> Float[jax.Array, ""]:
    """Compute the clipped loss of the critic; the formula is at the top of the file.

    Args:
        values: the current values of the tokens. Gradients flow through them.
        old_values: the values of the tokens before the updates.
        returns: the returns, which the critic learns.
        weights: the weights of the critic's tokens, as `token_weights` returns them.
        clip: the maximum change of a value from its old value.

    Returns:
        The loss.

    >>> values, old_values = jnp.array([[0.5]]), jnp.array([[0.0]])
    >>> returns, weights = jnp.array([[1.0]]), jnp.array([[1.0]])
    >>> float(value_loss(values, old_values, returns, weights, clip=0.25))
    0.28125
    """
    used = weights > 0
    values, old_values, returns = (jnp.where(used, each, 0) for each in (values, old_values, returns))
    clipped = old_values + jnp.clip(values - old_values, -clip, clip)
    error = jnp.maximum(jnp.square(values - returns), jnp.square(clipped - returns))
    return 0.5 * (weights * error).sum()


def supervised_loss(
    log_probs: Float[Array, "*samples T"], weights: Float[Array, "*samples T"]
) -> Float[jax.Array, ""]:
    """Compute the weighted cross-entropy of one micro-batch. The sum over micro-batches is that of the batch."""
    return -(jnp.asarray(weights) * log_probs).sum()
