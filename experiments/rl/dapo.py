"""What DAPO (arXiv:2503.14476) does to the responses of a batch: dynamic sampling, and a penalty on overlong ones.

Responses to one prompt that all have the same reward have no advantage over each other and teach nothing. Dynamic
sampling generates further batches of prompts until there are enough whose rewards differ, or as often as it may.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.rl.rewards import Rewards
from relibra_jax.limits import check_integer, check_not_negative
from relibra_jax.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dapo:
    """What DAPO is told.

    Raises:
        ValueError: if a number is out of its range.
    """

    more_rollouts: int = 3
    """How often a further batch of prompts may be responded to where too few prompts have rewards that differ."""
    overlong_share: float = 0.2
    """The last part of the room for a response, over which the penalty grows from 0 on."""
    overlong_penalty: float = 1.0
    """What a response that fills its room loses of its reward."""

    def __post_init__(self) -> None:
        check_integer("dapo.more_rollouts", self.more_rollouts, least=0)
        if not 0 < self.overlong_share <= 1:
            raise ValueError(f"dapo.overlong_share={self.overlong_share} must be above 0 and at most 1")
        check_not_negative("dapo.overlong_penalty", self.overlong_penalty)


def overlong_penalty(lengths: Int[Array, " B"], response_tokens: int, dapo: Dapo) -> Float[np.ndarray, " B"]:
    """What each response loses of its reward for its length: soft overlong punishment.

    Args:
        lengths: the tokens of each response.
        response_tokens: the room for a response.
        dapo: where the penalty begins, and its height.

    Returns:
        float32; 0 for short responses, growing with the tokens of long ones.

    >>> overlong_penalty(np.array([80, 90, 100]), 100, Dapo()).tolist()
    [0.0, 0.5, 1.0]
    """
    buffer = dapo.overlong_share * response_tokens
    over = np.clip((lengths - (response_tokens - buffer)) / buffer, 0, 1)
    return (dapo.overlong_penalty * over).astype(np.float32)


def rewards_differ(rewards: Rewards, *, responses_per_prompt: int) -> Bool[np.ndarray, " prompts"]:
    """The prompts whose responses do not all have the same reward; those without a reward do not count.

    >>> rewards = Rewards(np.array([1, 0, 1, 1, 1, 0], np.float32), np.array([1, 1, 1, 1, 1, 0], bool), [])
    >>> rewards_differ(rewards, responses_per_prompt=2).tolist()
    [True, False, False]
    """
    reward = rewards.reward.reshape(-1, responses_per_prompt)
    scored = rewards.scored.reshape(reward.shape)
    highest = np.where(scored, reward, -np.inf).max(1)
    return highest > np.where(scored, reward, np.inf).min(1)


def choose_prompts(differ: Bool[Array, " prompts"], count: int) -> Int[np.ndarray, " count"]:
    """The numbers of the prompts to learn from: the first whose rewards differ, and where they are too few, the first
    of the others, so that the batch is full.

    >>> choose_prompts(np.array([False, True, False, True, True]), 4).tolist()
    [1, 3, 4, 0]
    """
    return np.concatenate([np.flatnonzero(differ), np.flatnonzero(~differ)])[:count]
