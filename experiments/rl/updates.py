"""The updates of a learning step: policy and critic learn from the training targets of one batch."""

import math

import numpy as np

from experiments.rl.algorithms import Targets
from experiments.rl.configs import Train
from experiments.rl.critic import update_critic
from experiments.rl.processes import on_every_host
from experiments.rl.stages import RecomputeResult, Stages, live_batch
from experiments.rl.state import State
from experiments.rl.step import StepMetrics, join_metrics, update
from experiments.rl.targets import add_targets, critic_targets
from relibra_jax.execution import check_residents
from relibra_jax.nnx import check_executed


def update_policy(
    state: State, config: Train, stages: Stages, targets: Targets, recomputed: RecomputeResult
) -> StepMetrics:
    """Learn from a batch for all epochs, and return the metrics of the last one, with the skipped updates of all.

    The loss of an update is a mean over its own tokens, as if its samples were a batch. An update whose samples have no
    token to learn from is left out, unless none has: moments would move the weights without data. Residents are pushed
    for each update. The first update uses the residents of the recompute.

    Args:
        state: the state of the run, changed in place.
        config: the settings of the run.
        stages: the stages of the batch.
        targets: the training targets of the batch.
        recomputed: the results of the recompute.

    Returns:
        The metrics.

    Raises:
        RuntimeError: if a slot computed a different number of rows than its quota.
        ValueError: under the conditions of `check_forward`.
    """
    learned = [bool(targets.policy_mask[np.array(samples)].any()) for samples in config.mini_batches]
    updates = [
        stage
        for stage, any_token in zip(
            add_targets(config, stages.updates, targets, recomputed), learned, strict=True
        )
        if any_token or not any(learned)
    ]
    live = None if config.replay else live_batch(state, stages)
    residents, skipped = recomputed.residents if config.replay else None, 0
    for _ in range(config.epochs):
        metrics = []
        for batch, samples in updates:
            if residents is not None:
                plan, topology = batch.batch_plan.plan, batch.parallel.topology
                check_residents(residents, state.optimizer.step[...], plan, topology)
            update_metrics = update(
                state.agent,
                state.optimizer,
                live or batch,
                samples,
                batch.batch_plan.load.sum((0, 2, 3)),
                residents,
                balance=config.balance,
                largest_gradient=config.adamw.largest_gradient,
                losses=config.losses,
            )
            update_metrics, residents = on_every_host(update_metrics, batch.parallel.mesh), None
            if config.replay:
                check_executed(update_metrics.slot_rows, batch)
            check_forward(state.step, int(update_metrics.tokens_not_finite))
            skipped += int(update_metrics.skipped)
            metrics.append(update_metrics)
    return join_metrics(metrics)._replace(
        skipped=np.asarray(skipped, np.int32), updates=np.asarray(config.epochs * len(updates), np.int32)
    )


def update_values(
    state: State, config: Train, stages: Stages, targets: Targets, recomputed: RecomputeResult
) -> float | None:
    """Train the critic on the hidden vectors of the recompute, in stages that have returns.

    Args:
        state: the state of the run, changed in place.
        config: the settings of the run.
        stages: the stages of the batch.
        targets: the training targets of the batch.
        recomputed: the results of the recompute.

    Returns:
        The loss of the last pass; NaN if an update of it was not finite, and so changed nothing. None without a critic,
        and if no token has a return.
    """
    critic, optimizer = state.critic, state.critic_optimizer
    if critic is None or optimizer is None:
        return None
    parts = [
        (hidden, part)
        for hidden, part in zip(
            recomputed.hidden, critic_targets(config, stages, targets, recomputed), strict=True
        )
        if part is not None
    ]
    if not parts:
        return None
    for _ in range(config.critic.epochs):
        results = [update_critic(critic, optimizer, *part, clip=config.critic.clip) for part in parts]
    losses_and_norms: np.ndarray = np.array(on_every_host(results, state.balancer.parallel.mesh))
    return float(losses_and_norms[:, 0].mean()) if np.isfinite(losses_and_norms).all() else math.nan


def check_forward(step: int, not_finite: int) -> None:
    """Raise ValueError if a forward pass gave log-probabilities that are not finite: no other batch would help.

    Args:
        step: the step of the run.
        not_finite: the number of tokens with such log-probabilities.
    """
    if not_finite:
        raise ValueError(
            f"step {step}: the log-probabilities of {not_finite} tokens are not finite: a layer rejected its plan or"
            " its buffers, or the training diverged; nothing of this step is saved"
        )
