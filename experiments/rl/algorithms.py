"""The table of reinforcement-learning algorithms: how each turns sampled responses into training targets.

All algorithms run on the same balanced step, and its plan does not depend on the algorithm. An algorithm is a pure
function: from the sampled responses it computes which tokens to learn from and the advantage of each. To add one, write
such a function and add an entry to `ALGORITHMS`, which the settings, the reports and the tests read. The flags of an
entry say what the algorithm changes while responses are sampled, where the function has no part.
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
from relibra_jax.contract.types import Array
from relibra_jax.support.limits import check_not_negative, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
    """The settings of algorithms with a critic.

    Raises:
        ValueError: if a number is out of its range.
    """

    discount: float = 1.0
    """Gamma, the discount of a reward for every token that it comes later."""
    decay: float = 1.0
    """Lambda of generalized advantage estimation, the decay of later temporal differences.
    With discount and decay 1 the advantage is the final reward minus the value."""
    factor: float = 0.5
    """The factor of the critic's loss in the sum with the policy's loss."""
    clip: float = 0.2
    """The maximum change of a value from its value before the updates."""
    rate: float = 10.0
    """The learning rate of the value head, as a multiple of the policy's, because the head starts untrained."""

    def __post_init__(self) -> None:
        for name in ("discount", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"critic.{name}={getattr(self, name)} must be at least 0 and at most 1")
        check_not_negative("critic.factor", self.factor)
        check_positive("critic.clip", self.clip)
        check_positive("critic.rate", self.rate)


class Sampled(NamedTuple):
    """The sampled responses of a batch, as an algorithm sees them."""

    reward: Float[Array, " B"]
    """The reward of each sample, 0 for samples without a reward."""
    usable: Bool[Array, " B"]
    """False for samples to leave out, because the reward function failed or the critic returned no finite number."""
    finished: Bool[Array, " B"]
    """False for responses that the next rollout continues, which have no reward yet."""
    response: Bool[Array, "B T"]
    """True on all tokens of responses."""
    new: Bool[Array, "B T"]
    """True on the response tokens that the policy sampled in this step. The others were sampled in earlier steps."""
    value: Float[Array, "B T"] | None
    """The value of the state before each token, always finite. None without a critic."""


class Lessons(NamedTuple):
    """The training targets that an algorithm computes from a batch."""

    policy_tokens: Bool[Array, "B T"]
    """True on the tokens that the policy learns from."""
    advantage: Float[Array, "B T"]
    """The advantage of each of these tokens."""
    critic_tokens: Bool[Array, "B T"] | None = None
    """True on the tokens that the critic learns from. None without a critic."""
    value_target: Float[Array, "B T"] | None = None
    """The value that the critic learns at each of its tokens. None without a critic."""


type Teach = Callable[[Sampled, int, Critic], Lessons]
"""An algorithm: ``teach(sampled, responses_per_prompt, critic) -> lessons``."""


def teach_by_comparison(sampled: Sampled, responses_per_prompt: int, critic: Critic) -> Lessons:
    """Apply GRPO (arXiv:2402.03300): the tokens of a response get its advantage over the prompt's other responses."""
    usable = jnp.asarray(sampled.usable)
    advantage = relative_advantages(sampled.reward, usable, responses_per_prompt=responses_per_prompt)
    tokens = sampled.response & usable[:, None]
    return Lessons(tokens, jnp.where(tokens, advantage[:, None], 0))


def teach_by_critic(sampled: Sampled, responses_per_prompt: int, critic: Critic) -> Lessons:
    """Apply PPO (arXiv:1707.06347) with whitened generalized advantages. The critic learns advantage plus value."""
    advantage = _generalized_advantages(sampled, critic)
    tokens = sampled.response & jnp.asarray(sampled.usable)[:, None]
    assert sampled.value is not None
    return Lessons(tokens, whiten(advantage, tokens), tokens, advantage + sampled.value)


def teach_windows(sampled: Sampled, responses_per_prompt: int, critic: Critic) -> Lessons:
    """Apply T-PPO (arXiv:2506.15050).

    The policy learns from all new tokens, by whitened extended generalized advantages. The critic learns from all
    tokens of finished responses, by Monte-Carlo returns.
    """
    usable = jnp.asarray(sampled.usable)
    tokens = sampled.new & usable[:, None]
    critic_tokens = sampled.response & (usable & sampled.finished)[:, None]
    returns = discounted_returns(sampled.reward, sampled.response, discount=critic.discount)
    return Lessons(tokens, whiten(_generalized_advantages(sampled, critic), tokens), critic_tokens, returns)


def _generalized_advantages(sampled: Sampled, critic: Critic) -> Float[Array, "B T"]:
    assert sampled.value is not None, "algorithms with a critic need values"
    return generalized_advantages(
        *(sampled.value, sampled.reward, sampled.response, sampled.finished),
        discount=critic.discount,
        decay=critic.decay,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmEntry:
    """An algorithm, with flags for what it needs while responses are sampled."""

    teach: Teach
    """The function that computes the training targets."""
    summary: str
    """A one-line description."""
    critic: bool = False
    """Whether the algorithm has a critic, whose values ``teach`` receives."""
    compares: bool = False
    """Whether the algorithm compares responses to the same prompt, and so needs several of them."""
    mixed_groups: bool = False
    """Whether prompts whose responses all have the same reward are replaced, and long responses penalised."""
    windows: bool = False
    """Whether a rollout samples at most a window of tokens, and the next one continues the unfinished responses."""


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
"""The algorithms by name, as ``--algorithm`` takes them."""
