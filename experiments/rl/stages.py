"""The stages of a step: a recompute of old log-probabilities, and updates from samples of their own.

The routing that updates replay was recorded in the rollout (R3, arXiv:2510.11370): then it is known before the
recompute, which replays it too, and all stages are planned by one search. Or it is recorded in the recompute (R2): this
routes live then, in order, with experts at home and buffers for the worst case, and only the updates are planned.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

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
from relibra_jax.nnx import HotRanks, PreparedBatch, check_executed, get_homes, in_float8


class Stage(NamedTuple):
    """Some samples of a batch with their plan."""

    batch: PreparedBatch
    """What the stage follows, in force until the next batch is prepared."""
    samples: TrainingBatch
    """Tokens, mask and routing of its samples, on the ranks."""


class Stages(NamedTuple):
    """The stages of one batch, over the same homes and residents."""

    recompute: tuple[Stage, ...]
    """Those that log-probabilities are recomputed in: one with all samples, or the updates' own; none where the
    recompute has run before, live."""
    updates: tuple[Stage, ...]
    """One for each optimizer update of a pass over the batch; no sample is in two of them."""


class OldPolicy(NamedTuple):
    """What the recompute says of the agent before its updates."""

    log_prob: Float[np.ndarray, "B T"]
    """float32, entry t of token t."""
    imbalance: float | None
    """Max / mean of rank load, as the recompute ran; None where it ran under the plans of the updates."""
    residents: Residents | None = None
    """The residents that it ran with, which the first update may use, too."""
    value: Float[np.ndarray, "B T"] | None = None
    """float32, the value of the state before each token of a response; None without a critic."""


def prepare_stages(state: State, config: Train, responses: Responses) -> Stages:
    """Plan the stages of a batch, move experts to their homes and samples to their ranks.

    Args:
        state: the state of the run.
        config: its settings.
        responses: the samples with the routing that is replayed.
    """
    batches = state.balancer.prepare_stages(
        *(state.agent, state.optimizer, responses.replay), **stage_options(config)
    )
    samples = TrainingBatch(responses.tokens, responses.mask, responses.expert_ids)
    stages = tuple(Stage(batch, batch.to_ranks(samples)._replace(packing=batch.packing)) for batch in batches)
    updates = stages[-config.updates :]
    if config.routing == "recompute":
        return Stages((), updates)
    return Stages(stages[: -config.updates] or updates, updates)


def stage_options(config: Train) -> dict[str, Any]:
    """The micro-batches and samples of the stages that are planned, for `Balancer.prepare_stages`."""
    own = config.recompute_micro_batches if config.routing == "rollout" else None
    recomputes = () if own is None else (own,)
    return {
        "num_micro_batches": (*recomputes, *[config.micro_batches] * config.updates),
        "samples": (*[None] * len(recomputes), *config.mini_batches),
    }


def recompute_planned(
    state: State, config: Train, stages: Stages, *, float8: HotRanks | None = None
) -> OldPolicy:
    """Recompute log-probabilities under the plans of the recompute's stages, and hold what ran to them.

    Args:
        state: the state of the run.
        config: its settings.
        stages: the stages of the batch.
        float8: which ranks compute their experts in float8; None for none.

    Raises:
        RuntimeError: if a slot computed other rows than its plan says.
    """
    residents = prepare_residents(state.agent, state.optimizer, stages.recompute[0].batch)
    parts, imbalance = [], None
    for batch, samples in stages.recompute:
        runs = batch if float8 is None else in_float8(batch, float8)
        ran = recompute(state.agent, runs, samples, residents, temperature=config.temperature)
        check_executed(ran.slot_rows, batch)
        parts.append(batch.from_ranks((ran.log_prob, ran.value)))
    if stages.recompute is not stages.updates:
        (own,) = stages.recompute
        imbalance = float(planned_imbalance(jax.device_get(own.batch.batch_plan.plan)))
    # A sample is in one of them, and zeros are elsewhere.
    log_prob, value = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *parts)
    return OldPolicy(log_prob, imbalance, residents, value)


def recompute_live(state: State, config: Train, responses: Responses) -> tuple[Responses, OldPolicy]:
    """Recompute log-probabilities under live routing, and record it.

    Returns:
        The responses with the routing of the recompute in place of the rollout's; and what the recompute says.
    """
    (batch,) = state.balancer.prepare_stages(
        *(state.agent, state.optimizer, None),
        num_micro_batches=(config.live_micro_batches,),
        num_samples=config.samples,
    )
    samples = batch.to_ranks(TrainingBatch(responses.tokens, responses.mask))
    ran = recompute(state.agent, batch, samples, temperature=config.temperature, record=True)
    log_prob, ids, value = batch.from_ranks((ran.log_prob, ran.expert_ids, ran.value))
    ids *= responses.mask[..., None, None]
    load = on_every_host(ran.load, batch.parallel.mesh)
    # Experts are where the batch before has left them.
    imbalance = unplanned_imbalance(load, get_homes(state.agent), topology=batch.parallel.topology)
    return responses._replace(expert_ids=ids), OldPolicy(log_prob, float(imbalance), value=value)


def start_critic(
    state: State, config: Train, rollout: Rollout, rewards: Rewards, old: OldPolicy
) -> OldPolicy:
    """Let a new critic begin at the mean return of finished responses, in place.

    A head is new as long as all its values are 0: it is not updated before there is something to learn, so this needs
    no record of its own, and a stop between changes nothing.

    Args:
        state: the state of the run, whose critic gets its first bias.
        config: the settings of the run.
        rollout: the responses of the step.
        rewards: their rewards.
        old: what the recompute says of them.

    Returns:
        ``old``, with the bias for values where the critic is new.
    """
    head, of_finished = state.agent.critic, rollout.responses.response & rewards.scored[:, None]
    if head is None or old.value is None or old.value.any() or not of_finished.any():
        return old
    returns = discounted_returns(rewards.reward, rollout.responses.response, discount=config.critic.discount)
    mean = np.asarray(returns)[of_finished].mean(dtype=np.float32)
    head.bias[...] = jax.device_put(mean, head.bias[...].sharding)
    return old._replace(value=np.full_like(old.value, mean))


class Taught(NamedTuple):
    """What the algorithm makes of a batch."""

    lessons: Lessons
    not_finite: int
    """The samples for which the critic returned no finite number; nothing is learned from them."""


def teach(config: Train, rollout: Rollout, rewards: Rewards, old: OldPolicy) -> Taught:
    """What the batch teaches, by the run's algorithm.

    Args:
        config: the settings of the run.
        rollout: the responses of the step.
        rewards: their rewards.
        old: what the recompute says of them.
    """
    response, value = rollout.responses.response, None
    finite = np.ones(len(response), bool)
    if old.value is not None:
        of_response = np.where(response, old.value, 0)
        finite = np.isfinite(of_response).all(1)
        value = np.where(finite[:, None], of_response, 0)
    usable = finite & (rewards.scored | ~rollout.finished)
    sampled = Sampled(rewards.reward, usable, rollout.finished, response, rollout.new, value)
    lessons = config.algorithm_entry.teach(sampled, config.responses_per_prompt, config.critic)
    return Taught(jax.device_get(lessons), int((~finite).sum()))


def with_lessons(config: Train, updates: Sequence[Stage], lessons: Lessons, old: OldPolicy) -> list[Stage]:
    """The updates with what their samples teach.

    Advantages are made for the whole batch. Weights sum to 1 over the samples of each update, whose loss is so a mean
    over its own tokens: as if it were a batch, and however many tokens other updates have.
    """

    def weigh(tokens):
        weight = [token_weights(tokens[own], token_level=config.token_level) for own in config.mini_batches]
        return np.concatenate(weight)

    critic = None
    if lessons.critic_tokens is not None:
        assert lessons.value_target is not None
        assert old.value is not None
        critic = CriticBatch(weigh(lessons.critic_tokens), lessons.value_target, old.value)
    of_tokens = (weigh(lessons.policy_tokens), lessons.advantage, old.log_prob, critic)
    taught = []
    for batch, samples in updates:
        weight, advantage, log_prob, critic_there = batch.to_ranks(of_tokens)
        learned = {"weight": weight, "advantage": advantage, "old_log_prob": log_prob, "critic": critic_there}
        taught.append(Stage(batch, samples._replace(**learned)))
    return taught


def join_metrics(metrics: Sequence[StepMetrics]) -> StepMetrics:
    """The metrics of updates of one pass as those of the pass: means of numbers, counts of all micro-batches."""
    return metrics[0] if len(metrics) == 1 else _join_metrics(list(metrics))


@jax.jit
def _join_metrics(metrics: list[StepMetrics]) -> StepMetrics:
    def mean(*values):
        return jnp.stack(values).mean(0)

    def join(*counts):
        return jnp.concatenate(counts)

    policy, critic, norm, *counted = zip(*metrics, strict=True)
    return StepMetrics(
        jax.tree.map(mean, *policy), mean(*critic), mean(*norm), *(join(*each) for each in counted)
    )
