"""The stages of a step: a recompute of old log-probabilities, and updates that share the samples of the batch.

Updates replay routing that was recorded in one of two places. If the rollout recorded it (R3, arXiv:2510.11370), it is
known before the recompute, which replays it, too, and one search plans all stages. If the recompute records it (R2),
the recompute routes live: samples are in order, experts at home, and buffers sized for the worst case. Then only the
updates are planned.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import relibra_jax
from experiments.float8.hot_ranks import HotRanks, in_float8
from experiments.rl.advantages import discounted_returns
from experiments.rl.algorithms import Lessons, Sampled
from experiments.rl.balance import planned_imbalance, unplanned_imbalance
from experiments.rl.configs import Train
from experiments.rl.generation import Responses
from experiments.rl.losses import token_weights
from experiments.rl.processes import on_every_host
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.state import State
from experiments.rl.step import CriticBatch, StepMetrics, TrainingBatch, prepare_residents, recompute
from relibra_jax.execution import Residents
from relibra_jax.nnx import PreparedBatch, check_executed, get_homes


class Stage(NamedTuple):
    """Some samples of a batch with their plan."""

    batch: PreparedBatch
    """The prepared plan, valid until the next batch is prepared."""
    samples: TrainingBatch
    """The tokens, mask and routing of the samples, on the ranks."""


class Stages(NamedTuple):
    """The stages of one batch, over the same homes and residents."""

    recompute: tuple[Stage, ...]
    """The stages in which log-probabilities are recomputed: one with all samples, or the same stages as the updates.
    Empty if the recompute has run live before."""
    updates: tuple[Stage, ...]
    """The stage of each optimizer update in a pass over the batch. Every sample is in one of them."""

    @property
    def batches(self) -> tuple[PreparedBatch, ...]:
        """The prepared batch of every stage."""
        recompute = () if self.recompute is self.updates else self.recompute
        return tuple(stage.batch for stage in (*recompute, *self.updates))


class OldPolicy(NamedTuple):
    """The results of the recompute: log-probabilities and values of the agent before its updates."""

    log_prob: Float[np.ndarray, "B T"]
    """The log-probabilities, float32. Entry t belongs to token t."""
    imbalance: float | None
    """The imbalance of the recompute, max / mean of rank load. None if it ran under the plans of the updates."""
    residents: Residents | None = None
    """The residents that the recompute used. The first update may use them, too."""
    value: Float[np.ndarray, "B T"] | None = None
    """The value of the state before each response token, float32. None without a critic."""


def prepare_stages(state: State, config: Train, responses: Responses) -> Stages:
    """Plan the stages of a batch, and move experts to their homes and samples to their ranks.

    Args:
        state: the state of the run.
        config: the settings of the run.
        responses: the samples, with the routing to replay.

    Returns:
        The stages.
    """
    batches = state.balancer.prepare_stages(
        state.agent, state.optimizer, responses.replay, **stage_options(config)
    )
    samples = TrainingBatch(responses.tokens, responses.mask, responses.expert_ids)
    stages = tuple(Stage(batch, batch.to_ranks(samples)._replace(packing=batch.packing)) for batch in batches)
    updates = stages[-config.updates :]
    if config.routing == "recompute":
        return Stages((), updates)
    return Stages(stages[: -config.updates] or updates, updates)


def stage_options(config: Train) -> dict[str, Any]:
    """Return the planned stages and their updates, as options of `Balancer.prepare_stages`."""
    micro_batches = config.recompute_micro_batches if config.routing == "rollout" else None
    recomputes = () if micro_batches is None else (relibra_jax.Stage(micro_batches),)
    updates = (relibra_jax.Stage(config.micro_batches, samples) for samples in config.mini_batches)
    return {
        "stages": (*recomputes, *updates),
        "updates": (*[0] * len(recomputes), *[1] * config.updates),
    }


def recompute_planned(
    state: State, config: Train, stages: Stages, *, float8: HotRanks | None = None
) -> OldPolicy:
    """Recompute log-probabilities in the recompute's stages, and check that every slot computed what its plan says.

    Args:
        state: the state of the run.
        config: the settings of the run.
        stages: the stages of the batch.
        float8: the rule for which ranks compute their experts in float8. None for no rank.

    Returns:
        The results of the recompute.

    Raises:
        RuntimeError: if a slot computed a different number of rows than its quota.
    """
    residents = prepare_residents(state.agent, state.optimizer, stages.recompute[0].batch)
    agent = state.agent if float8 is None else in_float8(state.agent, float8)
    parts, imbalance = [], None
    for batch, samples in stages.recompute:
        recomputed = recompute(agent, batch, samples, residents, temperature=config.temperature)
        check_executed(recomputed.slot_rows, batch)
        parts.append(batch.from_ranks((recomputed.log_prob, recomputed.value)))
    if stages.recompute is not stages.updates:
        (stage,) = stages.recompute
        imbalance = float(planned_imbalance(jax.device_get(stage.batch.batch_plan.plan)))
    # Each sample is in one stage, and 0 in the results of the others.
    log_prob, value = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *parts)
    return OldPolicy(log_prob, imbalance, residents, value)


def recompute_live(state: State, config: Train, responses: Responses) -> tuple[Responses, OldPolicy]:
    """Recompute log-probabilities with live routing, and record that routing.

    Args:
        state: the state of the run.
        config: the settings of the run.
        responses: the samples.

    Returns:
        The responses, with the routing of the recompute in place of the rollout's; and the results of the recompute.
    """
    (batch,) = state.balancer.prepare_stages(
        state.agent,
        state.optimizer,
        None,
        [relibra_jax.Stage(config.live_micro_batches)],
        num_samples=config.samples,
    )
    samples = batch.to_ranks(TrainingBatch(responses.tokens, responses.mask))
    recomputed = recompute(state.agent, batch, samples, temperature=config.temperature, record=True)
    log_prob, ids, value = batch.from_ranks((recomputed.log_prob, recomputed.expert_ids, recomputed.value))
    ids *= responses.mask[..., None, None]
    load = on_every_host(recomputed.load, batch.parallel.mesh)
    # Experts are still at the homes of the previous batch.
    imbalance = unplanned_imbalance(load, get_homes(state.agent), topology=batch.parallel.topology)
    return responses._replace(expert_ids=ids), OldPolicy(log_prob, float(imbalance), value=value)


def start_critic(
    state: State, config: Train, rollout: Rollout, rewards: Rewards, old: OldPolicy
) -> OldPolicy:
    """Set the bias of a new critic to the mean return of finished responses, in place.

    A critic is new as long as all its values are 0. It stays so until the first batch with finished responses, because
    it has nothing to learn before. So checkpoints need not record whether it is new.

    Args:
        state: the state of the run, whose critic gets its first bias.
        config: the settings of the run.
        rollout: the responses of the step.
        rewards: the rewards of the responses.
        old: the results of the recompute.

    Returns:
        The results of the recompute. If the critic is new, all values are the bias.
    """
    head, finished_tokens = state.agent.critic, rollout.responses.response & rewards.scored[:, None]
    if head is None or old.value is None or old.value.any() or not finished_tokens.any():
        return old
    returns = discounted_returns(rewards.reward, rollout.responses.response, discount=config.critic.discount)
    mean = np.asarray(returns)[finished_tokens].mean(dtype=np.float32)
    head.bias[...] = jax.device_put(mean, head.bias[...].sharding)
    return old._replace(value=np.full_like(old.value, mean))


class BatchLessons(NamedTuple):
    """The training targets of a batch."""

    lessons: Lessons
    """The training targets that the algorithm computed."""
    not_finite: int
    """The number of samples left out because the critic returned no finite number for them."""


def teach(config: Train, rollout: Rollout, rewards: Rewards, old: OldPolicy) -> BatchLessons:
    """Compute the training targets of a batch with the run's algorithm.

    Args:
        config: the settings of the run.
        rollout: the responses of the step.
        rewards: the rewards of the responses.
        old: the results of the recompute.

    Returns:
        The training targets, and the number of samples left out because of the critic.
    """
    response, value = rollout.responses.response, None
    finite = np.ones(len(response), bool)
    if old.value is not None:
        response_values = np.where(response, old.value, 0)
        finite = np.isfinite(response_values).all(1)
        value = np.where(finite[:, None], response_values, 0)
    usable = finite & (rewards.scored | ~rollout.finished)
    sampled = Sampled(rewards.reward, usable, rollout.finished, response, rollout.new, value)
    lessons = config.algorithm_entry.teach(sampled, config.responses_per_prompt, config.critic)
    return BatchLessons(jax.device_get(lessons), int((~finite).sum()))


def with_lessons(config: Train, updates: Sequence[Stage], lessons: Lessons, old: OldPolicy) -> list[Stage]:
    """Add the training targets to the samples of the updates.

    Advantages come from the whole batch. Weights add up to 1 over the samples of each update. So the loss of an update
    is a mean over its own tokens, however many tokens the other updates have.

    Args:
        config: the settings of the run.
        updates: the stages of the updates.
        lessons: the training targets of the batch.
        old: the results of the recompute.

    Returns:
        The stages of the updates, whose samples have targets.
    """

    def weigh(tokens):
        weights = [
            token_weights(tokens[samples], token_level=config.token_level) for samples in config.mini_batches
        ]
        return np.concatenate(weights)

    critic = None
    if lessons.critic_tokens is not None:
        assert lessons.value_target is not None
        assert old.value is not None
        critic = CriticBatch(weigh(lessons.critic_tokens), lessons.value_target, old.value)
    batch_targets = (weigh(lessons.policy_tokens), lessons.advantage, old.log_prob, critic)
    stages = []
    for batch, samples in updates:
        weight, advantage, log_prob, critic_batch = batch.to_ranks(batch_targets)
        targets = {"weight": weight, "advantage": advantage, "old_log_prob": log_prob, "critic": critic_batch}
        stages.append(Stage(batch, samples._replace(**targets)))
    return stages


def join_metrics(metrics: Sequence[StepMetrics]) -> StepMetrics:
    """Join the metrics of the updates of one pass: average the numbers, and concatenate the micro-batches' counts."""
    return metrics[0] if len(metrics) == 1 else _join_metrics(list(metrics))


@jax.jit
def _join_metrics(metrics: list[StepMetrics]) -> StepMetrics:
    def mean(*values):
        return jnp.stack(values).mean(0)

    def join(*counts):
        return jnp.concatenate(counts)

    policy, critic, norm, *counts = zip(*metrics, strict=True)
    return StepMetrics(
        jax.tree.map(mean, *policy), mean(*critic), mean(*norm), *(join(*parts) for parts in counts)
    )
