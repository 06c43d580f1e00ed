"""The training targets of a batch: the algorithm's advantages and returns, with the weight of every token."""

from collections.abc import Sequence

import jax
import numpy as np

from experiments.rl.advantages import discounted_returns
from experiments.rl.algorithms import RolloutBatch, Targets
from experiments.rl.configs import Train
from experiments.rl.correction import importance_weights
from experiments.rl.critic import CriticTargets, of_states
from experiments.rl.losses import token_weights
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.stages import PreparedStage, RecomputeResult, Stages
from experiments.rl.state import State


def initialise_critic(
    state: State, config: Train, rollout: Rollout, rewards: Rewards, recomputed: RecomputeResult
) -> RecomputeResult:
    """Set the bias of a new critic to the mean return of finished responses, in place.

    A critic is new as long as all its values are 0. It stays so until the first batch with finished responses, because
    it has nothing to learn before. So checkpoints need not record whether it is new.

    Args:
        state: the state of the run, whose critic gets its first bias.
        config: the settings of the run.
        rollout: the responses of the step.
        rewards: the rewards of the responses.
        recomputed: the results of the recompute.

    Returns:
        The results of the recompute. If the critic is new, all values are the bias.
    """
    critic, values = state.critic, recomputed.old_values
    response_mask = rollout.responses.response_mask
    finished = response_mask & rewards.scored[:, None]
    if critic is None or values is None or values.any() or not finished.any():
        return recomputed
    returns = discounted_returns(rewards.reward, response_mask, discount=config.critic.discount)
    mean = np.asarray(returns)[finished].mean(dtype=np.float32)
    critic.bias[...] = jax.device_put(mean, critic.bias[...].sharding)
    return recomputed._replace(old_values=np.full_like(values, mean))


def compute_targets(
    config: Train, rollout: Rollout, rewards: Rewards, recomputed: RecomputeResult
) -> tuple[Targets, int]:
    """Compute the training targets of a batch with the run's algorithm.

    Args:
        config: the settings of the run.
        rollout: the responses of the step.
        rewards: the rewards of the responses.
        recomputed: the results of the recompute.

    Returns:
        The training targets, and the number of samples left out because the critic returned no finite number for them.
    """
    response_mask, values = rollout.responses.response_mask, None
    finite = np.ones(len(response_mask), bool)
    if recomputed.old_values is not None:
        response_values = np.where(response_mask, recomputed.old_values, 0)
        finite = np.isfinite(response_values).all(1)
        values = np.where(finite[:, None], response_values, 0)
    batch = RolloutBatch(
        rewards=rewards.reward,
        usable=finite & (rewards.scored | ~rollout.finished),
        finished=rollout.finished,
        response_mask=response_mask,
        new_mask=rollout.new_mask,
        values=values,
    )
    targets = config.algorithm_entry.compute_targets(
        batch, config.critic, config.group, responses_per_prompt=config.responses_per_prompt
    )
    targets = jax.device_get(targets)
    if config.mask_truncated:
        truncated = rollout.finished & ~np.asarray(rollout.responses.ended)
        targets = targets._replace(policy_mask=targets.policy_mask & ~truncated[:, None])
    return _corrected(config, targets, rollout, recomputed), int((~finite).sum())


def _corrected(config: Train, targets: Targets, rollout: Rollout, recomputed: RecomputeResult) -> Targets:
    """Multiply advantages by importance weights, and learn from no token whose weight is 0."""
    if config.correction.kind == "none":
        return targets
    sampled = rollout.responses.log_probs
    weights = importance_weights(recomputed.old_log_probs, sampled, config.correction)
    return targets._replace(
        policy_mask=targets.policy_mask & (weights > 0), advantages=targets.advantages * weights
    )


def add_targets(
    config: Train, updates: Sequence[PreparedStage], targets: Targets, recomputed: RecomputeResult
) -> list[PreparedStage]:
    """Add the training targets to the samples of the updates.

    Advantages come from the whole batch. Weights add up to 1 over the samples of each update. So the loss of an update
    is a mean over its own tokens, however many tokens the other updates have.

    Args:
        config: the settings of the run.
        updates: the stages of the updates.
        targets: the training targets of the batch.
        recomputed: the results of the recompute.

    Returns:
        The stages of the updates, whose samples have targets.
    """

    def weigh(mask):
        weights = [
            token_weights(mask[samples], config.token_weights, length=config.response_tokens)
            for samples in config.mini_batches
        ]
        return np.concatenate(weights)

    of_batch = {
        "weights": weigh(targets.policy_mask),
        "advantages": targets.advantages,
        "old_log_probs": recomputed.old_log_probs,
        "reference_log_probs": recomputed.reference_log_probs,
    }
    return [PreparedStage(batch, samples._replace(**batch.to_ranks(of_batch))) for batch, samples in updates]


def critic_targets(
    config: Train, stages: Stages, targets: Targets, recomputed: RecomputeResult
) -> list[CriticTargets | None]:
    """Put the targets of the critic on the ranks, where the hidden vectors of a recompute are.

    The loss of a stage is the mean over its tokens, whatever the weights of the policy's tokens are.

    Args:
        config: the settings of the run.
        stages: the stages of the batch.
        targets: the training targets of the batch.
        recomputed: the results of the recompute, with its hidden vectors.

    Returns:
        The targets of each stage that has hidden vectors. None for stages without returns.
    """
    critic_mask, returns, old_values = targets.critic_mask, targets.returns, recomputed.old_values
    assert critic_mask is not None
    assert returns is not None
    assert old_values is not None
    batches = [batch for batch, _ in stages.recompute or stages.updates]
    parts = config.mini_batches if len(batches) == config.updates else (range(config.samples),)
    weights = np.concatenate([token_weights(critic_mask[samples]) for samples in parts])
    of_batch = CriticTargets(of_states(weights), of_states(returns), of_states(old_values))
    learned = [bool(critic_mask[np.array(samples)].any()) for samples in parts]
    return [
        batch.to_ranks(of_batch) if any_token else None
        for batch, any_token in zip(batches, learned, strict=True)
    ]
