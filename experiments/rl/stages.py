"""The stages of a step: a recompute of old log-probabilities, and updates that share the samples of the batch.

Updates replay routing that was recorded in one of two places. If the rollout recorded it (R3, arXiv:2510.11370), it is
known before the recompute, which replays it, too, and one search plans all stages. If the recompute records it (R2),
the recompute routes live, without a plan: experts are at home and run in chunks of tokens. Then only the updates are
planned. Without replay, recompute and updates route live alike, so that ratios of probabilities start at 1; the plan
only says where samples and experts are.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from experiments.float8.hot_ranks import HotRanks, in_float8
from experiments.rl.balance import planned_imbalance, unplanned_imbalance
from experiments.rl.configs import Train
from experiments.rl.critic import of_tokens, state_values
from experiments.rl.generation import Responses
from experiments.rl.processes import on_every_host
from experiments.rl.state import State
from experiments.rl.step import RecomputeOutput, TrainingBatch, prepare_residents, recompute
from relibra_jax import Stage
from relibra_jax.contract.types import Array
from relibra_jax.execution import Residents
from relibra_jax.nnx import PreparedBatch, check_executed, get_homes


class PreparedStage(NamedTuple):
    """Some samples of a batch with their plan."""

    batch: PreparedBatch
    """The prepared plan, valid until the next batch is prepared."""
    samples: TrainingBatch
    """The tokens, mask and routing of the samples, on the ranks."""


class Stages(NamedTuple):
    """The stages of one batch, over the same homes and residents."""

    recompute: tuple[PreparedStage, ...]
    """The stages in which log-probabilities are recomputed: one with all samples, or the same stages as the updates.
    Empty if the recompute has run live before."""
    updates: tuple[PreparedStage, ...]
    """The stage of each optimizer update in a pass over the batch. Every sample is in one of them."""

    @property
    def batches(self) -> tuple[PreparedBatch, ...]:
        """The prepared batch of every stage."""
        recompute = () if self.recompute is self.updates else self.recompute
        return tuple(stage.batch for stage in (*recompute, *self.updates))


class RecomputeResult(NamedTuple):
    """What a recompute says of a batch before its updates: log-probabilities and values on the host."""

    old_log_probs: Float[np.ndarray, "B T"]
    """The log-probabilities, float32. Entry t belongs to token t."""
    imbalance: float | None
    """The imbalance of the recompute, max / mean of rank load. None if it ran under the plans of the updates."""
    residents: Residents | None = None
    """The residents that the recompute used. The first update may use them, too."""
    old_values: Float[np.ndarray, "B T"] | None = None
    """The value of the state before each token, float32, 0 at the first token. None without a critic."""
    reference_log_probs: Float[np.ndarray, "B T"] | None = None
    """The log-probabilities under the reference, float32. None without one."""
    hidden: tuple[Float[Array, "M B T D"], ...] = ()
    """The last hidden vectors, on the ranks, stage by stage: of the stages of the recompute, or of the updates if the
    recompute ran live. Empty without a critic."""


def prepare_stages(state: State, config: Train, responses: Responses) -> Stages:
    """Plan the stages of a batch, and move experts to their homes and samples to their ranks.

    Args:
        state: the state of the run.
        config: the settings of the run.
        responses: the samples, with the routing to replay.

    Returns:
        The stages.
    """
    options = stage_options(config)
    own = responses.own
    batches = state.balancer.prepare_stages(
        *(state.agent, state.optimizer, responses.replay), own=own, copies=state.copies, **options
    )
    samples = TrainingBatch(responses.tokens, responses.mask)
    stages = tuple(
        _on_ranks(batch, samples, batch.to_ranks(responses.expert_ids, own=own)) for batch in batches
    )
    updates = stages[-config.updates :]
    if config.recomputes_live:
        return Stages((), updates)
    return Stages(stages[: -config.updates] or updates, updates)


def stage_options(config: Train) -> dict[str, Any]:
    """Return the planned stages and their updates, as options of `Balancer.prepare_stages`."""
    micro_batches = None if config.recomputes_live else config.recompute_micro_batches
    recomputes = () if micro_batches is None else (Stage(micro_batches),)
    updates = (Stage(config.micro_batches, samples) for samples in config.mini_batches)
    return {
        "stages": (*recomputes, *updates),
        "updates": (*[0] * len(recomputes), *[1] * config.updates),
    }


def prepare_live(
    state: State, config: Train, samples: TrainingBatch, num_micro_batches: int | None = None
) -> PreparedStage:
    """Prepare samples for a pass that routes live, with experts at home.

    Args:
        state: the state of the run.
        config: the settings of the run.
        samples: the samples, on the host.
        num_micro_batches: M, the number of micro-batches. None takes as many as all updates have together.

    Returns:
        The prepared batch, and the samples on the ranks.
    """
    stage = Stage(num_micro_batches or config.updates * config.micro_batches)
    (batch,) = state.balancer.prepare_stages(state.agent, state.optimizer, None, [stage], mask=samples.mask)
    return _on_ranks(batch, samples)


def _on_ranks(
    batch: PreparedBatch, samples: TrainingBatch, expert_ids: jax.Array | None = None
) -> PreparedStage:
    """Put samples on the ranks, with their routes, which are there, and their packing."""
    on_ranks = batch.to_ranks(samples)._replace(expert_ids=expert_ids, packing=batch.packing)
    return PreparedStage(batch, on_ranks)


def recompute_planned(
    state: State, config: Train, stages: Stages, *, float8: HotRanks | None = None
) -> RecomputeResult:
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
    agent = state.on_devices()
    residents = prepare_residents(agent, state.optimizer, stages.recompute[0].batch)
    agent = agent if float8 is None else in_float8(agent, float8)
    has_critic = state.critic is not None
    parts, hidden, imbalance = [], [], None
    for batch, samples in stages.recompute:
        step = state.optimizer.step[...]
        output = recompute(
            agent, batch, samples, residents, step, temperature=config.temperature, hidden=has_critic
        )
        check_executed(output.slot_rows, batch)
        parts.append(_to_host(state, batch, output))
        hidden += [] if output.hidden is None else [output.hidden]
    if stages.recompute is not stages.updates:
        (stage,) = stages.recompute
        imbalance = float(planned_imbalance(jax.device_get(stage.batch.batch_plan.plan)))
    # Each sample is in one stage, and 0 in the results of the others.
    log_probs, values = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *parts)
    return RecomputeResult(log_probs, imbalance, residents, values, hidden=tuple(hidden))


def recompute_reference(state: State, config: Train, stages: Stages) -> Float[np.ndarray, "B T"]:
    """Compute log-probabilities under the reference, with the program, plans and routes of the policy's recompute.

    It runs in the stages of the recompute, or in those of the updates if the recompute routed live. Residents are the
    reference's own. Without replay it routes live, as the updates do.

    Args:
        state: the state of the run, with its reference.
        config: the settings of the run.
        stages: the stages of the batch.

    Returns:
        The log-probabilities, float32. Entry t belongs to token t.

    Raises:
        RuntimeError: if a slot computed a different number of rows than its quota.
    """
    reference, parts = state.reference_on_devices(), []
    stages_run = stages.recompute or stages.updates
    live = None if config.replay else live_batch(state, stages)
    residents = prepare_residents(reference, state.optimizer, stages_run[0].batch) if config.replay else None
    for batch, samples in stages_run:
        step = state.optimizer.step[...]
        output = recompute(reference, live or batch, samples, residents, step, temperature=config.temperature)
        if config.replay:
            check_executed(output.slot_rows, batch)
        parts.append(batch.from_ranks(output.log_probs))
    return np.sum(parts, axis=0)


def _to_host(
    state: State, batch: PreparedBatch, output: RecomputeOutput
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the log-probabilities and values of a recompute in the order of the batch, on the host."""
    if state.critic is None or output.hidden is None:
        return batch.from_ranks(output.log_probs), None
    log_probs, values = batch.from_ranks((output.log_probs, state_values(state.critic, output.hidden)))
    return log_probs, of_tokens(values)


def live_batch(state: State, stages: Stages) -> PreparedBatch:
    """Return a batch that routes live, with samples on the ranks where the plan of the stages has put them."""
    split = stages.updates[0].batch.parallel.split_sequences
    return PreparedBatch(None, dataclasses.replace(state.balancer.live, split_sequences=split))


def recompute_live(
    state: State, config: Train, responses: Responses
) -> tuple[Responses, RecomputeResult, Float[np.ndarray, "b T D"] | None]:
    """Recompute log-probabilities with live routing, and record that routing.

    Args:
        state: the state of the run.
        config: the settings of the run.
        responses: the samples.

    Returns:
        The responses, with the routing of the recompute in place of the rollout's; the results of the recompute; and
        for a critic the hidden vectors of the samples of this process, for `add_hidden`.
    """
    on_host = TrainingBatch(responses.tokens, responses.mask)
    batch, samples = prepare_live(state, config, on_host, config.live_micro_batches)
    output = recompute(
        *(state.on_devices(), batch, samples),
        temperature=config.temperature,
        record=True,
        hidden=state.critic is not None,
    )
    log_probs, values = _to_host(state, batch, output)
    hidden = None if output.hidden is None else batch.from_ranks(output.hidden, own=responses.own)
    ids = batch.from_ranks(output.expert_ids, own=responses.own)
    ids *= responses.replay.mask[..., None, None]
    load = on_every_host(output.load, batch.parallel.mesh)
    # Experts are still at the homes of the previous batch.
    imbalance = unplanned_imbalance(load, get_homes(state.agent), topology=batch.parallel.topology)
    result = RecomputeResult(log_probs, float(imbalance), old_values=values)
    return responses._replace(expert_ids=ids), result, hidden


def add_hidden(
    recomputed: RecomputeResult,
    stages: Stages,
    hidden: Float[np.ndarray, "b T D"] | None,
    responses: Responses,
) -> RecomputeResult:
    """Put the hidden vectors of a live recompute on the ranks of the updates, whose plan was not known before.

    Args:
        recomputed: the results of the recompute.
        stages: the stages of the batch.
        hidden: the hidden vectors of the samples of this process. None without a critic.
        responses: the samples.
    """
    if hidden is None:
        return recomputed
    on_ranks = tuple(batch.to_ranks(hidden, own=responses.own) for batch, _ in stages.updates)
    return recomputed._replace(hidden=on_ranks)
