"""How much better each sampled token was than what was to be expected.

By comparison, with several responses to each prompt and their rewards r (GRPO, arXiv:2402.03300): all tokens of
response i have the advantage

    A_i = (r_i - mean over the prompt) / (standard deviation over the prompt + 1e-6)

By a critic, with the value V_t of the state before token t, the only reward R at the end of a response of l tokens, a
discount gamma and a decay lambda (generalized advantage estimation, arXiv:1506.02438):

    delta_t = r_t + gamma V_{t+1} - V_t          r_t = R at t = l - 1, else 0
    A_t     = delta_t + gamma lambda A_{t+1}     A_l = 0

A response that has ended is worth nothing more, V_l = 0. One that a window cut off goes on, its reward is not known,
and its value is taken not to change at the cut, V_l = V_{l-1} (extended generalized advantage estimation of T-PPO,
arXiv:2506.15050).
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.types import Array

SMALLEST_DEVIATION: Final = 1e-6
"""What is added to a standard deviation before it divides."""


def relative_advantages(
    reward: Float[Array, " B"], scored: Bool[Array, " B"], *, responses_per_prompt: int
) -> Float[jax.Array, " B"]:
    """How much better each response is than the responses to the same prompt.

    Args:
        reward: the reward of every sample; responses to one prompt are neighbours.
        scored: False where there is no reward; such a response is no part of its prompt's mean.
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


@functools.partial(jax.jit, static_argnames=("discount", "decay"))
def generalized_advantages(
    value: Float[Array, "B T"],
    reward: Float[Array, " B"],
    response: Bool[Array, "B T"],
    finished: Bool[Array, " B"],
    *,
    discount: float,
    decay: float,
) -> Float[jax.Array, "B T"]:
    """Generalized advantages, extended for responses that go on; the mathematics stands at the top of the file.

    Args:
        value: the value of the state before each token, finite where ``response`` is.
        reward: the reward of each response, at its last token; not read of responses that go on.
        response: True on the tokens of responses, which are neighbours.
        finished: False for responses that go on.
        discount: gamma, what a token later a reward is worth.
        decay: lambda, by which what the critic says of later tokens counts less.

    Returns:
        float32; 0 on tokens of no response.

    >>> value, response = jnp.array([[0.0, 0.5, 0.25]] * 2), jnp.array([[False, True, True]] * 2)
    >>> finished, reward = jnp.array([True, False]), jnp.array([1.0, 1.0])
    >>> generalized_advantages(value, reward, response, finished, discount=1.0, decay=0.5).tolist()
    [[0.0, 0.125, 0.75], [0.0, -0.25, 0.0]]
    """
    value, reward = jnp.asarray(value, jnp.float32), jnp.asarray(reward, jnp.float32)
    finished = jnp.asarray(finished)

    def token(later, of_token):
        advantage, next_value, behind = later
        value, sampled = of_token
        # Behind the last token there is the reward, or the value as it is.
        at_end = jnp.where(finished, reward, discount * value)
        delta = jnp.where(behind, discount * next_value, at_end) - value
        advantage = jnp.where(sampled, delta + discount * decay * advantage, 0)
        return (advantage, value, sampled), advantage

    nothing = jnp.zeros_like(reward)
    start = (nothing, nothing, jnp.zeros(finished.shape, bool))
    by_token = (value.T, jnp.asarray(response).T)
    return jax.lax.scan(token, start, by_token, reverse=True)[1].T


def discounted_returns(
    reward: Float[Array, " B"], response: Bool[Array, "B T"], *, discount: float
) -> Float[jax.Array, "B T"]:
    """Monte-Carlo returns: what the reward at the end of a response is worth at each of its tokens.

    Args:
        reward: the reward of each response, at its last token.
        response: True on the tokens of responses, which are neighbours.
        discount: gamma, what a token later a reward is worth.

    Returns:
        float32; 0 on tokens of no response.

    >>> discounted_returns(jnp.array([1.0]), jnp.array([[False, True, True]]), discount=0.5).tolist()
    [[0.0, 0.5, 1.0]]
    """
    sampled = jnp.asarray(response)
    behind = jnp.cumsum(sampled[:, ::-1], axis=1)[:, ::-1] - 1
    worth = jnp.asarray(discount, jnp.float32) ** jnp.maximum(behind, 0)
    return jnp.where(sampled, worth * jnp.asarray(reward, jnp.float32)[:, None], 0)


def whiten(advantage: Float[Array, "B T"], used: Bool[Array, "B T"]) -> Float[jax.Array, "B T"]:
    """Advantages of mean 0 and standard deviation 1 over the tokens that are used; 0 on all others.

    >>> whiten(jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])).round(3).tolist()
    [[-1.0, 1.0, 0.0]]
    """
    used = jnp.asarray(used)
    count = jnp.maximum(used.sum(), 1)
    centred = jnp.where(used, advantage - jnp.where(used, advantage, 0).sum() / count, 0)
    deviation = jnp.sqrt(jnp.square(centred).sum() / count)
    return centred / (deviation + SMALLEST_DEVIATION)
