"""The losses of reinforcement learning: the losses of policy and critic, over a whole batch.

With the ratio rho_t = exp(log p_t - log p_old_t), the advantage A_t and the weight w_t of every token t (PPO,
arXiv:1707.06347; clip-higher and token-level weights from DAPO, arXiv:2503.14476),

    clip     - sum_t w_t min(rho_t A_t, clip(rho_t, 1 - low, 1 + high) A_t)
    gspo     the same with the ratio of the whole response, exp(mean over its tokens of log rho) (arXiv:2507.18071)
    cispo    - sum_t w_t stop_gradient(clip(rho_t, 1 - low, 1 + high)) A_t log p_t (arXiv:2506.13585)

The dual clip (arXiv:1912.09729) bounds the first two for negative advantages: at least ``dual`` A_t counts in place of
the minimum. The weights are, over what is learned from,

    tokens       1 / tokens of the batch
    responses    1 / (responses of the batch * tokens of its response)
    length       1 / (responses of the batch * largest length of a response) (Dr. GRPO, arXiv:2503.20783)

and with the value V_t, the one before the updates V_old_t and the return R_t,

    critic = 1/2 sum_t w_t max((V_t - R_t)^2, (clip(V_t, V_old_t - clip, V_old_t + clip) - R_t)^2)

Weights, advantages and returns are computed for the whole batch, before its samples are assigned to micro-batches and
ranks. The loss is then a sum over tokens, which does not depend on the assignment.
"""

import dataclasses
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from relibra_jax.contract.types import Array

LOSSES: Final = ("clip", "gspo", "cispo")
WEIGHTS: Final = ("tokens", "responses", "length")
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


class TokenResponses(NamedTuple):
    """The responses to which the tokens of a micro-batch belong."""

    number: Int[Array, "*samples #T"]
    """The number of the response of each token; any for tokens without a weight."""
    total: int
    """The number of responses, above all numbers."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """The clip of the ratio of new to old probability in the policy loss. The defaults are DAPO's clip-higher.

    Raises:
        ValueError: if ``low`` is not in 0..1, ``high`` is negative, or ``dual`` is not above 1.
    """

    low: float = 0.2
    """The distance below 1 at which the ratio is clipped."""
    high: float = 0.28
    """The distance above 1 at which the ratio is clipped. GRPO uses 0.2."""
    dual: float | None = None
    """The largest factor of negative advantages, such as 3. None for no bound."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ValueError(f"clip.low={self.low} must be at least 0 and at most 1")
        if not self.high >= 0:
            raise ValueError(f"clip.high={self.high} must be at least 0")
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"clip.dual={self.dual} must be above 1")


def token_weights(
    mask: Bool[Array, "B T"], kind: str = "tokens", *, length: int | None = None
) -> Float[jax.Array, "B T"]:
    """Compute the weight of every token in the loss; the formulas are at the top of the file.

    Args:
        mask: True on the tokens that are learned from.
        kind: one of `WEIGHTS`.
        length: the largest length of a response, for ``length``.

    Returns:
        The weights. For ``tokens`` and ``responses`` they add up to 1 over the batch; all are 0 if nothing is learned
        from.

    >>> mask = jnp.array([[1, 1], [0, 1]], bool)
    >>> token_weights(mask, "responses").tolist(), token_weights(mask, "length", length=4).tolist()
    ([[0.25, 0.25], [0.0, 0.5]], [[0.125, 0.125], [0.0, 0.125]])
    """
    weights = jnp.asarray(mask).astype(jnp.float32)
    if kind == "length":
        assert length is not None
        return weights / (length * jnp.maximum(mask.any(1).sum(), 1))
    if kind == "responses":
        weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1)
    return weights / jnp.maximum(weights.sum(), 1e-9)


def policy_loss(
    log_probs: Float[Array, "*samples T"],
    old_log_probs: Float[Array, "*samples T"],
    advantages: Float[Array, "*samples T"],
    weights: Float[Array, "*samples T"],
    *,
    clip: Clip,
    kind: str = "clip",
    responses: TokenResponses | None = None,
) -> PolicyLoss:
    """Compute the policy loss; the formulas are at the top of the file.

    Args:
        log_probs: the log-probabilities of the tokens under the current policy. Gradients flow through them.
        old_log_probs: the log-probabilities of the same tokens under the policy before the updates.
        advantages: the advantages of the tokens, from `experiments.rl.algorithms`.
        weights: the weights of the tokens, as `token_weights` returns them.
        clip: the bounds of the ratio.
        kind: one of `LOSSES`.
        responses: the response of each token, for ``gspo``.

    Returns:
        The loss and its statistics.

    >>> log_probs, old_log_probs = jnp.array([[0.5]]), jnp.array([[0.0]])
    >>> advantages, weights = jnp.array([[2.0]]), jnp.array([[1.0]])
    >>> loss = policy_loss(log_probs, old_log_probs, advantages, weights, clip=Clip(high=0.3))
    >>> round(float(loss.loss), 3), float(loss.clipped)
    (-2.6, 1.0)
    """
    used = weights > 0
    log_prob = jnp.where(used, log_probs, 0)
    log_ratio = jnp.where(used, log_probs - jax.lax.stop_gradient(old_log_probs), 0)
    kl = _kl(jax.lax.stop_gradient(bound_log_ratio(log_ratio)), weights)
    if kind == "gspo":
        assert responses is not None, "gspo needs the responses of tokens"
        log_ratio = _mean_by_response(log_ratio, used, responses)
    ratio = jnp.exp(bound_log_ratio(log_ratio))
    bounded = jnp.clip(ratio, 1 - clip.low, 1 + clip.high)
    if kind == "cispo":
        outside = jnp.where(bounded == ratio, 0, weights).sum()
        factor = jax.lax.stop_gradient(bounded) * advantages
        return PolicyLoss(-(weights * factor * log_prob).sum(), jax.lax.stop_gradient(outside), kl)
    unclipped, clipped = ratio * advantages, bounded * advantages
    gain = jnp.minimum(unclipped, clipped)
    if clip.dual is not None:
        gain = jnp.where(advantages < 0, jnp.maximum(gain, clip.dual * advantages), gain)
    share = jnp.where(gain != unclipped, weights, 0)
    return PolicyLoss(-(weights * gain).sum(), jax.lax.stop_gradient(share.sum()), kl)


def bound_log_ratio(log_ratio: Float[Array, "..."]) -> Float[jax.Array, "..."]:
    """Bound log-ratios by `LARGEST_LOG_RATIO` on both sides. Beyond the bound they have no gradient."""
    return jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _kl(log_ratio: Float[Array, "..."], weights: Float[Array, "..."]) -> Float[jax.Array, ""]:
    return (weights * (jnp.exp(log_ratio) - 1 - log_ratio)).sum()


def _mean_by_response(
    values: Float[Array, "*samples T"], used: Bool[Array, "*samples T"], responses: TokenResponses
) -> Float[jax.Array, "*samples T"]:
    """Return for every token the mean over the used tokens of its response, wherever in the batch they are."""
    number = jnp.broadcast_to(jnp.where(used, responses.number, responses.total), values.shape)
    sums = jnp.zeros(responses.total + 1).at[number].add(jnp.where(used, values, 0))
    tokens = jnp.zeros(responses.total + 1).at[number].add(jnp.where(used, 1.0, 0.0))
    return (sums / jnp.maximum(tokens, 1))[number]


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
