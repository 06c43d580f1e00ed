"""The table of algorithms: what a batch of responses teaches the policy, and the critic if there is one.

All algorithms run over the same balanced step, whose plan knows nothing of them. Each is a pure function, from what was
sampled to the advantage of every token and the tokens that are learned from; adding one is one function and one entry
in `ALGORITHMS`, which the tests, the settings and the reports read. What the function cannot say, because it happens
while responses are sampled, are the flags of its entry.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float

from experiments.rl.advantages import (
    discounted_returns,
    generalized_advantages,
    relative_advantages,
    whiten,
)
from relibra_jax.limits import check_not_negative, check_positive
from relibra_jax.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
    """What algorithms with a critic are told.

    Raises:
        ValueError: if a number is out of its range.
    """

    discount: float = 1.0
    """Gamma, what a token later a reward is worth."""
    decay: float = 1.0
    """Lambda of generalized advantage estimation, by which what the critic says of later tokens counts less; with 1 the
    advantage is the reward at the end less the value."""
    factor: float = 0.5
    """The factor of the critic's loss beside the policy's."""
    clip: float = 0.2
    """How far a value may go from what it was before the updates."""
    rate: float = 10.0
    """How many times the learning rate of the policy the value head has, which begins from nothing."""

    def __post_init__(self) -> None:
        for name in ("discount", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"critic.{name}={getattr(self, name)} must be at least 0 and at most 1")
        check_not_negative("critic.factor", self.factor)
        check_positive("critic.clip", self.clip)
        check_positive("critic.rate", self.rate)


class Sampled(NamedTuple):
    """What an algorithm is told of a batch."""

    reward: Float[Array, " B"]
    """The reward of each sample; 0 where there is none."""
    usable: Bool[Array, " B"]
    """False where nothing is learned from a sample: its reward function failed, or the critic returned no number."""
    finished: Bool[Array, " B"]
    """False for responses that the next rollout goes on with, which have no reward yet."""
    response: Bool[Array, "B T"]
    """True on all tokens of responses."""
    new: Bool[Array, "B T"]
    """True on those that the policy sampled in this step; the others were sampled in earlier ones."""
    value: Float[Array, "B T"] | None
    """The value of the state before each token, finite; None without a critic."""


class Lessons(NamedTuple):
    """What a batch teaches."""

    policy_tokens: Bool[Array, "B T"]
    """The tokens that the policy learns from."""
    advantage: Float[Array, "B T"]
    """Their advantages."""
    critic_tokens: Bool[Array, "B T"] | None = None
    """The tokens that the critic learns from; None without a critic."""
    value_target: Float[Array, "B T"] | None = None
    """The values that it learns there."""


type Teach = Callable[[Sampled, int, Critic], Lessons]
"""``teach(sampled, responses_per_prompt, critic) -> lessons``."""


def teach_by_comparison(sampled: Sampled, responses_per_prompt: int, critic: Critic) -> Lessons:
    """GRPO (arXiv:2402.03300): all tokens of a response have its advantage over the others to the same prompt."""
    usable = jnp.asarray(sampled.usable)
    advantage = relative_advantages(sampled.reward, usable, responses_per_prompt=responses_per_prompt)
    tokens = sampled.response & usable[:, None]
    return Lessons(tokens, jnp.where(tokens, advantage[:, None], 0))


def teach_by_critic(sampled: Sampled, responses_per_prompt: int, critic: Critic) -> Lessons:
    """PPO (arXiv:1707.06347) with generalized advantages, whitened; the critic learns advantage plus value."""
    advantage = _generalized_advantages(sampled, critic)
    tokens = sampled.response & jnp.asarray(sampled.usable)[:, None]
    assert sampled.value is not None
    return Lessons(tokens, whiten(advantage, tokens), tokens, advantage + sampled.value)


def teach_windows(sampled: Sampled, responses_per_prompt: int, critic: Critic) -> Lessons:
    """T-PPO (arXiv:2506.15050): the policy learns from all new tokens by extended generalized advantages, the critic
    from responses that have ended, from their first token on, by Monte-Carlo returns."""
    usable = jnp.asarray(sampled.usable)
    tokens = sampled.new & usable[:, None]
    ended = sampled.response & (usable & sampled.finished)[:, None]
    returns = discounted_returns(sampled.reward, sampled.response, discount=critic.discount)
    return Lessons(tokens, whiten(_generalized_advantages(sampled, critic), tokens), ended, returns)


def _generalized_advantages(sampled: Sampled, critic: Critic) -> Float[Array, "B T"]:
    assert sampled.value is not None, "algorithms with a critic are given values"
    return generalized_advantages(
        *(sampled.value, sampled.reward, sampled.response, sampled.finished),
        discount=critic.discount,
        decay=critic.decay,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmEntry:
    """An algorithm, and what happens for it while responses are sampled."""

    teach: Teach
    summary: str
    """One line for tables and help texts."""
    critic: bool = False
    """Whether there is a critic, whose values ``teach`` is given."""
    compares: bool = False
    """Whether responses to one prompt are compared, so that it takes several of them."""
    mixed_groups: bool = False
    """Whether prompts whose responses all have the same reward are replaced, and long responses penalised."""
    windows: bool = False
    """Whether a rollout ends at a window of tokens, and the next one goes on with the responses that it cut off."""


ALGORITHMS: Final[Mapping[str, AlgorithmEntry]] = MappingProxyType(
    {
        "grpo": AlgorithmEntry(
            teach=teach_by_comparison,
            summary="GRPO: responses to one prompt are compared",
            compares=True,
        ),
        "dapo": AlgorithmEntry(
            teach=teach_by_comparison,
            summary="DAPO: GRPO with dynamic sampling and a penalty on overlong responses",
            compares=True,
            mixed_groups=True,
        ),
        "ppo": AlgorithmEntry(
            teach=teach_by_critic,
            summary="PPO: a value head on the policy's trunk, generalized advantages",
            critic=True,
        ),
        "tppo": AlgorithmEntry(
            teach=teach_windows,
            summary="T-PPO: PPO on windows of responses, unfinished ones carried to the next rollout",
            critic=True,
            windows=True,
        ),
    }
)
"""The algorithms that runs can name."""
