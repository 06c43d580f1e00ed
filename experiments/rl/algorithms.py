"""The table of reinforcement-learning algorithms: how each turns the responses of a batch into training targets.

All algorithms run on the same balanced step, and its plan does not depend on the algorithm. An algorithm is a pure
function: from a batch of scored responses it computes which tokens to learn from and the advantage of each. To add one,
write such a function and add an entry to `ALGORITHMS`, which the settings, the reports and the tests read. The flags of
an entry say what the algorithm changes while responses are sampled, where the function has no part.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Bool, Float

from experiments.rl.advantages import (
    Group,
    discounted_returns,
    generalized_advantages,
    relative_advantages,
    whiten,
)
from relibra_jax.contract.types import Array
from relibra_jax.support.limits import check_integer, check_positive
from relibra_jax.support.suggestions import suggest_names

WHITENINGS: Final = ("together", "apart", "none")


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
    cut_decay: float | None = None
    """Lambda for responses that a window cut off. None takes ``decay``."""
    whiten: str = "together"
    """Over what advantages are whitened: together over all tokens that are learned from, apart over those of finished
    and those of unfinished responses (T-PPO), or none."""
    clip: float = 0.2
    """The maximum change of a value from its value before the updates."""
    learning_rate: float = 3e-3
    """The learning rate of the critic, which has an optimizer of its own."""
    epochs: int = 32
    """The number of passes of the critic over a batch. They run no layer of the policy."""
    width: int = 64
    """The number of hidden units of the critic. 0 leaves a linear function."""

    def __post_init__(self) -> None:
        for name in ("discount", "decay", "cut_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"critic.{name}={value} must be at least 0 and at most 1")
        if self.whiten not in WHITENINGS:
            raise ValueError(
                f"critic.whiten {self.whiten!r} must be one of {', '.join(WHITENINGS)}"
                f"{suggest_names(self.whiten, WHITENINGS)}"
            )
        check_positive("critic.clip", self.clip)
        check_positive("critic.learning_rate", self.learning_rate)
        check_integer("critic.epochs", self.epochs, least=1)
        check_integer("critic.width", self.width, least=0)


class RolloutBatch(NamedTuple):
    """The responses of a batch with their rewards and values, as an algorithm sees them."""

    rewards: Float[Array, " B"]
    """The reward of each sample, 0 for samples without a reward."""
    usable: Bool[Array, " B"]
    """False for samples to leave out, because the reward function failed or the critic returned no finite number."""
    finished: Bool[Array, " B"]
    """False for responses that the next rollout continues, which have no reward yet."""
    response_mask: Bool[Array, "B T"]
    """True on all tokens of responses."""
    new_mask: Bool[Array, "B T"]
    """True on the response tokens that the policy sampled in this step. The others were sampled in earlier steps."""
    values: Float[Array, "B T"] | None
    """The value of the state before each token, always finite. None without a critic."""


class Targets(NamedTuple):
    """The training targets that an algorithm computes from a batch."""

    policy_mask: Bool[Array, "B T"]
    """True on the tokens that the policy learns from."""
    advantages: Float[Array, "B T"]
    """The advantage of each of these tokens, 0 on all others."""
    critic_mask: Bool[Array, "B T"] | None = None
    """True on the tokens that the critic learns from. None without a critic."""
    returns: Float[Array, "B T"] | None = None
    """The return of each of these tokens, which the critic learns. None without a critic."""


@runtime_checkable
class ComputeTargets(Protocol):
    """An algorithm: a function from a batch, and the settings of critic and groups, to the training targets."""

    def __call__(
        self, batch: RolloutBatch, critic: Critic, group: Group, *, responses_per_prompt: int
    ) -> Targets:
        """Compute the training targets. Responses to one prompt are next to each other in the batch."""


def grpo_targets(batch: RolloutBatch, critic: Critic, group: Group, *, responses_per_prompt: int) -> Targets:
    """Apply GRPO (arXiv:2402.03300): the tokens of a response get its advantage over the prompt's other responses."""
    usable = jnp.asarray(batch.usable)
    advantages = relative_advantages(batch.rewards, usable, group, responses_per_prompt=responses_per_prompt)
    policy_mask = batch.response_mask & usable[:, None]
    return Targets(policy_mask, jnp.where(policy_mask, advantages[:, None], 0))


def ppo_targets(batch: RolloutBatch, critic: Critic, group: Group, *, responses_per_prompt: int) -> Targets:
    """Apply PPO (arXiv:1707.06347) with whitened generalized advantages. The returns are advantages plus values."""
    mask = batch.response_mask & jnp.asarray(batch.usable)[:, None]
    advantages = _generalized_advantages(batch, critic)
    assert batch.values is not None
    return Targets(mask, _whitened(advantages, mask, batch, critic), mask, advantages + batch.values)


def tppo_targets(batch: RolloutBatch, critic: Critic, group: Group, *, responses_per_prompt: int) -> Targets:
    """Apply T-PPO (arXiv:2506.15050).

    The policy learns from all new tokens, by whitened extended generalized advantages. The critic learns from all
    tokens of finished responses, by Monte-Carlo returns. ``critic.cut_decay`` and ``critic.whiten`` treat the tokens
    of unfinished responses apart, whose advantages contain no reward.
    """
    usable = jnp.asarray(batch.usable)
    policy_mask = batch.new_mask & usable[:, None]
    advantages = _whitened(_generalized_advantages(batch, critic), policy_mask, batch, critic)
    critic_mask = batch.response_mask & (usable & batch.finished)[:, None]
    returns = discounted_returns(batch.rewards, batch.response_mask, discount=critic.discount)
    return Targets(policy_mask, advantages, critic_mask, returns)


def _generalized_advantages(batch: RolloutBatch, critic: Critic) -> Float[Array, "B T"]:
    assert batch.values is not None, "algorithms with a critic need values"
    cut_decay = critic.decay if critic.cut_decay is None else critic.cut_decay
    return generalized_advantages(
        batch.values,
        batch.rewards,
        batch.response_mask,
        batch.finished,
        discount=critic.discount,
        decay=jnp.where(batch.finished, critic.decay, cut_decay),
    )


def _whitened(
    advantages: Float[Array, "B T"], mask: Bool[Array, "B T"], batch: RolloutBatch, critic: Critic
) -> Float[Array, "B T"]:
    """Whiten the advantages of the tokens of a mask as ``critic.whiten`` says; they are 0 elsewhere."""
    if critic.whiten == "none":
        return jnp.where(mask, advantages, 0)
    if critic.whiten == "together":
        return whiten(advantages, mask)
    finished = jnp.asarray(batch.finished)[:, None]
    return whiten(advantages, mask & finished) + whiten(advantages, mask & ~finished)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmEntry:
    """An algorithm, with flags for what it needs while responses are sampled."""

    compute_targets: ComputeTargets
    """The function that computes the training targets."""
    critic: bool = False
    """Whether the algorithm has a critic, whose values ``compute_targets`` receives."""
    group_relative: bool = False
    """Whether the algorithm compares responses to the same prompt, and so needs several of them."""
    dynamic_sampling: bool = False
    """Whether prompts whose responses all have the same reward are replaced, and long responses penalised."""
    learns_unfinished: bool = False
    """Whether the policy learns from responses that a window has cut off. Otherwise it learns from all tokens of a
    response in the batch in which it ends."""


ALGORITHMS: Final[Mapping[str, AlgorithmEntry]] = MappingProxyType(
    {
        "grpo": AlgorithmEntry(
            compute_targets=grpo_targets,
            group_relative=True,
        ),
        "dapo": AlgorithmEntry(
            compute_targets=grpo_targets,
            group_relative=True,
            dynamic_sampling=True,
        ),
        "ppo": AlgorithmEntry(
            compute_targets=ppo_targets,
            critic=True,
        ),
        "tppo": AlgorithmEntry(
            compute_targets=tppo_targets,
            critic=True,
            learns_unfinished=True,
        ),
    }
)
"""The algorithms by name, as ``--algorithm`` takes them."""
