"""Advantages: how much better each sampled token was than expected.

GRPO (arXiv:2402.03300) compares several responses to the same prompt by their rewards r. All tokens of response i have
the advantage

    A_i = (r_i - mean over the prompt) / (standard deviation over the prompt + 1e-6)

Dr. GRPO (arXiv:2503.20783) does not divide. RLOO (arXiv:2402.14740) does not either, and takes the mean over the other
responses. Some trainers divide by the deviation of a sample, with n - 1 in place of n.

Generalized advantage estimation (arXiv:1506.02438) uses a critic, with the value V_t of the state before token t. A
response of l tokens has one reward R, at its end; gamma is the discount and lambda the decay:

    delta_t = r_t + gamma V_{t+1} - V_t          r_t = R at t = l - 1, else 0
    A_t     = delta_t + gamma lambda A_{t+1}     A_l = 0

Only tokens that the policy sampled count: after the last token of a turn comes the first of its next turn, whose value
is that of the state after the reply between them.

After a finished response no reward can follow, so V_l = 0. An unfinished response, which a window cut off, has no known
reward yet. T-PPO's extended generalized advantage estimation (arXiv:2506.15050) assumes that its value does not change
at the cut: V_l = V_{l-1}.
"""

import dataclasses
import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.contract.types import Array
from relibra_jax.support.suggestions import suggest_names

BASELINES: Final = ("all", "others")
DEVIATIONS: Final = ("population", "sample", "none")
SMALLEST_DEVIATION: Final = 1e-6
"""The number that is added to a standard deviation before dividing by it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """How responses to the same prompt are compared.

    Raises:
        ValueError: if a name is unknown.
    """

    baseline: str = "all"
    """The responses whose mean is subtracted: all, or the others (RLOO)."""
    deviation: str = "population"
    """The standard deviation that divides: population (GRPO), sample (n - 1), or none (Dr. GRPO, RLOO)."""

    def __post_init__(self) -> None:
        for name, names in (("baseline", BASELINES), ("deviation", DEVIATIONS)):
            value = getattr(self, name)
            if value not in names:
                raise ValueError(
                    f"group.{name} {value!r} must be one of {', '.join(names)}{suggest_names(value, names)}"
                )


def relative_advantages(
    rewards: Float[Array, " B"],
    scored: Bool[Array, " B"],
    group: Group = Group(),
    *,
    responses_per_prompt: int,
) -> Float[jax.Array, " B"]:
    """Compute how much better each response is than the other responses to its prompt.

    Args:
        rewards: the reward of every sample. Responses to one prompt are next to each other.
        scored: False for responses without a reward, which are left out of their prompt's mean and deviation.
        group: how the responses to a prompt are compared.
        responses_per_prompt: the number of responses to each prompt, a divisor of B.

    Returns:
        The advantages, float32. 0 for responses without a reward, and if all responses to a prompt have the same one.

    >>> rewards = jnp.array([1.0, 0.0, 1.0, 1.0])
    >>> relative_advantages(rewards, jnp.ones(4, bool), responses_per_prompt=2).round(3).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    rewards = jnp.asarray(rewards, jnp.float32).reshape(-1, responses_per_prompt)
    scored = jnp.asarray(scored).reshape(rewards.shape)
    count = jnp.maximum(scored.sum(1, keepdims=True), 1)
    mean = jnp.where(scored, rewards, 0).sum(1, keepdims=True) / count
    centred = jnp.where(scored, rewards - mean, 0)
    if group.baseline == "others":
        # r_i - mean of the others is (r_i - mean of all) * n / (n - 1).
        centred = centred * count / jnp.maximum(count - 1, 1)
    if group.deviation != "none":
        freedom = count if group.deviation == "population" else jnp.maximum(count - 1, 1)
        squares = jnp.where(scored, jnp.square(rewards - mean), 0).sum(1, keepdims=True)
        centred = centred / (jnp.sqrt(squares / freedom) + SMALLEST_DEVIATION)
    # The mean of equal rewards may be rounded; dividing this error by its own deviation would make it an advantage.
    highest = jnp.where(scored, rewards, -jnp.inf).max(1, keepdims=True)
    differ = highest > jnp.where(scored, rewards, jnp.inf).min(1, keepdims=True)
    return jnp.where(differ, centred, 0).reshape(-1)


@functools.partial(jax.jit, static_argnames="discount")
def generalized_advantages(
    values: Float[Array, "B T"],
    rewards: Float[Array, " B"],
    response_mask: Bool[Array, "B T"],
    finished: Bool[Array, " B"],
    *,
    discount: float,
    decay: float | Float[Array, ""] | Float[Array, " B"],
) -> Float[jax.Array, "B T"]:
    """Compute generalized advantages, extended for unfinished responses; the formulas are at the top of the file.

    Args:
        values: the value of the state before each token, finite on the tokens of responses.
        rewards: the reward of each response, given at its last token. The rewards of unfinished responses are not read.
        response_mask: True on the tokens of responses. Replies may lie between them.
        finished: False for unfinished responses.
        discount: gamma, the discount of a reward for every token that it comes later.
        decay: lambda, the decay of later temporal differences, for all responses or for each of them.

    Returns:
        The advantages, float32, 0 outside responses.

    >>> values, response_mask = jnp.array([[0.0, 0.5, 0.25]] * 2), jnp.array([[False, True, True]] * 2)
    >>> rewards, finished = jnp.array([1.0, 1.0]), jnp.array([True, False])
    >>> generalized_advantages(values, rewards, response_mask, finished, discount=1.0, decay=0.5).tolist()
    [[0.0, 0.125, 0.75], [0.0, -0.25, 0.0]]
    """
    values, rewards = jnp.asarray(values, jnp.float32), jnp.asarray(rewards, jnp.float32)
    finished = jnp.asarray(finished)

    def step(carry, inputs):
        advantage, next_value, has_next = carry
        value, in_response = inputs
        # After the last token comes the reward; or, in an unfinished response, the same value again.
        at_end = jnp.where(finished, rewards, discount * value)
        delta = jnp.where(has_next, discount * next_value, at_end) - value
        following = (delta + discount * decay * advantage, value, True)
        carry = tuple(jnp.where(in_response, *pair) for pair in zip(following, carry, strict=True))
        return carry, jnp.where(in_response, following[0], 0)

    zeros = jnp.zeros_like(rewards)
    carry = (zeros, zeros, jnp.zeros(finished.shape, bool))
    inputs = (values.T, jnp.asarray(response_mask).T)
    return jax.lax.scan(step, carry, inputs, reverse=True)[1].T


def discounted_returns(
    rewards: Float[Array, " B"], response_mask: Bool[Array, "B T"], *, discount: float
) -> Float[jax.Array, "B T"]:
    """Compute Monte-Carlo returns: the final reward of each response, discounted to each of its tokens.

    Args:
        rewards: the reward of each response, given at its last token.
        response_mask: True on the tokens of responses. Replies may lie between them.
        discount: gamma, the discount of a reward for every token that it comes later.

    Returns:
        The returns, float32, 0 outside responses.

    >>> discounted_returns(jnp.array([1.0]), jnp.array([[False, True, True]]), discount=0.5).tolist()
    [[0.0, 0.5, 1.0]]
    """
    response_mask = jnp.asarray(response_mask)
    distance = jnp.cumsum(response_mask[:, ::-1], axis=1)[:, ::-1] - 1
    factor = jnp.asarray(discount, jnp.float32) ** jnp.maximum(distance, 0)
    return jnp.where(response_mask, factor * jnp.asarray(rewards, jnp.float32)[:, None], 0)


def whiten(advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[jax.Array, "B T"]:
    """Shift and scale advantages to mean 0 and standard deviation 1 over the tokens of a mask.

    Args:
        advantages: the advantages of all tokens.
        mask: True on the tokens that are learned from.

    Returns:
        The whitened advantages, float32, 0 outside the mask.

    >>> whiten(jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])).round(3).tolist()
    [[-1.0, 1.0, 0.0]]
    """
    mask = jnp.asarray(mask)
    count = jnp.maximum(mask.sum(), 1)
    centred = jnp.where(mask, advantages - jnp.where(mask, advantages, 0).sum() / count, 0)
    deviation = jnp.sqrt(jnp.square(centred).sum() / count)
    return centred / (deviation + SMALLEST_DEVIATION)
