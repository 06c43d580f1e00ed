"""DAPO (arXiv:2503.14476): dynamic sampling of prompts, and a penalty on overlong responses.

If all responses to a prompt have the same reward, none has an advantage over the others and nothing is learned from
them. Dynamic sampling generates responses to more batches of prompts until enough prompts have rewards that differ,
or until it has made ``more_rollouts`` additional rollouts.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.rl.rewards import Rewards
from relibra_jax.contract.types import Array
from relibra_jax.support.limits import check_integer, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dapo:
    """The settings of DAPO: dynamic sampling, and the penalty on overlong responses.

    Raises:
        ValueError: if a number is out of its range.
    """

    more_rollouts: int = 3
    """The maximum number of additional rollouts in a step, made while too few prompts have rewards that differ."""
    overlong_share: float = 0.2
    """The last share of the maximum response length, over which the penalty grows from 0."""
    overlong_penalty: float = 1.0
    """The penalty on a response of the maximum length, subtracted from its reward."""

    def __post_init__(self) -> None:
        check_integer("dapo.more_rollouts", self.more_rollouts, least=0)
        if not 0 < self.overlong_share <= 1:
            raise ValueError(f"dapo.overlong_share={self.overlong_share} must be above 0 and at most 1")
        check_not_negative("dapo.overlong_penalty", self.overlong_penalty)


def overlong_penalty(lengths: Int[Array, " B"], response_tokens: int, dapo: Dapo) -> Float[np.ndarray, " B"]:
    """Compute the length penalty of each response, DAPO's soft overlong punishment.

    Args:
        lengths: the number of tokens in each response.
        response_tokens: the maximum number of tokens in a response.
        dapo: the settings of DAPO: where the penalty begins, and its maximum.

    Returns:
        The penalties, float32: 0 for short responses, and linear in the tokens of long ones.

    >>> overlong_penalty(np.array([80, 90, 100]), 100, Dapo()).tolist()
    [0.0, 0.5, 1.0]
    """
    buffer = dapo.overlong_share * response_tokens
    excess = np.clip((lengths - (response_tokens - buffer)) / buffer, 0, 1)
    return (dapo.overlong_penalty * excess).astype(np.float32)


def rewards_differ(rewards: Rewards, *, responses_per_prompt: int) -> Bool[np.ndarray, " prompts"]:
    """Find the prompts whose responses do not all have the same reward. Responses without a reward do not count.

    >>> rewards = Rewards(np.array([1, 0, 1, 1, 1, 0], np.float32), np.array([1, 1, 1, 1, 1, 0], bool), [])
    >>> rewards_differ(rewards, responses_per_prompt=2).tolist()
    [True, False, False]
    """
    reward = rewards.reward.reshape(-1, responses_per_prompt)
    scored = rewards.scored.reshape(reward.shape)
    highest = np.where(scored, reward, -np.inf).max(1)
    return highest > np.where(scored, reward, np.inf).min(1)


def choose_prompts(differ: Bool[Array, " prompts"], count: int) -> Int[np.ndarray, " count"]:
    """Choose the prompts to learn from: the first whose rewards differ, then others until the batch is full.

    Args:
        differ: True for prompts whose rewards differ.
        count: the number of prompts in a batch.

    Returns:
        The indices of the prompts.

    >>> choose_prompts(np.array([False, True, False, True, True]), 4).tolist()
    [1, 3, 4, 0]
    """
    return np.concatenate([np.flatnonzero(differ), np.flatnonzero(~differ)])[:count]
