"""What reinforcement learning minimises: relative advantages and the clipped policy loss, over a whole batch.

With several responses to each prompt, rewards r and the ratio rho_t = exp(log p_t - log p_old_t) of every sampled token
t of response i (GRPO, arXiv:2402.03300; clip-higher and token-level loss from DAPO, arXiv:2503.14476),

    A_i  = (r_i - mean over the prompt) / (standard deviation over the prompt + 1e-6)
    loss = - sum_t w_t min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i)

    w_t  = 1 / tokens of the batch                                   token-level: every token counts the same
         = 1 / (responses of the batch * tokens of response i)       sample-level: every response counts the same

Weights and advantages are made for the whole batch, before its samples are assigned. What remains is a sum over
tokens: neither micro-batches nor the ranks that hold the samples enter it. A response without a reward (its reward
function failed) has no advantage and no weight, and is no part of its prompt's mean.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.types import Array

SMALLEST_DEVIATION: Final = 1e-6
"""What is added to a standard deviation before it divides."""


class PolicyLoss(NamedTuple):
    """One micro-batch's share of the loss and of what reports show; shares of a batch are summed."""

    loss: Float[Array, ""]
    """The loss itself."""
    clipped: Float[Array, ""]
    """The weight of the tokens whose ratio the clip cut off."""
    kl: Float[Array, ""]
    """Weighted mean of ``rho - 1 - log rho``, an estimate of KL(old, new) that is never negative."""


def relative_advantages(
    reward: Float[Array, " B"], scored: Bool[Array, " B"], *, responses_per_prompt: int
) -> Float[jax.Array, " B"]:
    """How much better each response is than the responses to the same prompt.

    Args:
        reward: the reward of every sample; responses to one prompt are neighbours.
        scored: False where there is no reward.
        responses_per_prompt: the responses to one prompt, a divisor of B.

    Returns:
        float32; 0 where there is no reward, and where all responses to a prompt have the same.

    >>> reward = jnp.array([1.0, 0.0, 1.0, 1.0])
    >>> relative_advantages(reward, jnp.ones(4, bool), responses_per_prompt=2).round(3).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    reward = jnp.asarray(reward, jnp.float32).reshape(-1, responses_per_prompt)
    scored = jnp.asarray(scored).reshape(reward.shape)
    count = jnp.maximum(scored.sum(1, keepdims=True), 1)
    mean = jnp.where(scored, reward, 0).sum(1, keepdims=True) / count
    centred = jnp.where(scored, reward - mean, 0)
    deviation = jnp.sqrt(jnp.square(centred).sum(1, keepdims=True) / count)
    # The mean of equal rewards is rounded, and the deviation would divide by that.
    highest = jnp.where(scored, reward, -jnp.inf).max(1, keepdims=True)
    differ = highest > jnp.where(scored, reward, jnp.inf).min(1, keepdims=True)
    return jnp.where(differ, centred / (deviation + SMALLEST_DEVIATION), 0).reshape(-1)


def token_weights(
    sampled: Bool[Array, "B T"], scored: Bool[Array, " B"], *, token_level: bool
) -> Float[jax.Array, "B T"]:
    """The weight of every token in the loss; over the batch they sum to 1.

    Args:
        sampled: True on tokens that the policy sampled, not on those of prompts.
        scored: False for samples that are left out.
        token_level: whether every token counts the same (DAPO), rather than every sample (GRPO).

    >>> token_weights(jnp.array([[1, 1], [0, 1]], bool), jnp.ones(2, bool), token_level=False).tolist()
    [[0.25, 0.25], [0.0, 0.5]]
    """
    counted = (jnp.asarray(sampled) & jnp.asarray(scored)[:, None]).astype(jnp.float32)
    if not token_level:
        counted = counted / jnp.maximum(counted.sum(1, keepdims=True), 1)
    return counted / jnp.maximum(counted.sum(), 1e-9)


def policy_loss(
    log_prob: Float[Array, "*samples T"],
    old_log_prob: Float[Array, "*samples T"],
    advantage: Float[Array, "*samples"],
    weight: Float[Array, "*samples T"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped policy loss; the mathematics stands at the top of the file.

    Args:
        log_prob: log-probabilities of the tokens under the policy that learns; differentiable.
        old_log_prob: log-probabilities of the same tokens under the policy as it was.
        advantage: what `relative_advantages` returned.
        weight: what `token_weights` returned.
        clip_low: how far below 1 a ratio may help.
        clip_high: how far above 1; more than ``clip_low`` is DAPO's clip-higher.

    >>> loss = policy_loss(*(jnp.array(x) for x in ([[0.5]], [[0.0]], [2.0], [[1.0]])), clip_low=0.2, clip_high=0.3)
    >>> round(float(loss.loss), 3), float(loss.clipped)
    (-2.6, 1.0)
    """
    used = weight > 0
    log_ratio = jnp.where(used, log_prob - jax.lax.stop_gradient(old_log_prob), 0)
    ratio, advantage = jnp.exp(log_ratio), advantage[..., None]
    free = ratio * advantage
    held = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage
    share = jnp.where(held < free, weight, 0).sum()
    kl = (weight * (ratio - 1 - log_ratio)).sum()
    return PolicyLoss(-(weight * jnp.minimum(free, held)).sum(), share, jax.lax.stop_gradient(kl))


def supervised_loss(
    log_prob: Float[Array, "*samples T"], weight: Float[Array, "*samples T"]
) -> Float[jax.Array, ""]:
    """Cross-entropy of the tokens that have a weight; a share of the batch's, to be summed."""
    return -(jnp.asarray(weight) * log_prob).sum()
