"""Measurement of the errors that float8 causes in a recompute and in PPO.

A small policy is trained, or the last checkpoint of a run is loaded, and responds to prompts. The log-probabilities of
the responses are then recomputed under one plan: in float32, in bfloat16, and in bfloat16 with the experts of hot ranks
in float8, for several thresholds (`experiments.float8.hot_ranks`).

The tables show the errors of the log-probabilities of sampled tokens, and their effect on an update that computes with
the same weights in the reference's precision. All its ratios should be 1; the tables show the share of ratios outside
PPO's clip and the estimate of the KL divergence that runs report. The minimum number of rows for float8 is 1 here,
because a small policy has few rows per rank.
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jaxtyping import Float
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.float8.hot_ranks import HotRanks, mark_hot_ranks
from experiments.rl.configs import Train
from experiments.rl.devices import compile_quickly, host_devices
from experiments.rl.losses import Clip
from experiments.rl.run_folder import saved_config
from experiments.rl.stages import Stages, prepare_stages, recompute_planned
from experiments.rl.train import run_train
from experiments.rl.trainer import EVALUATION, Trainer
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.types import Plan
from relibra_jax.support.limits import check_integer, check_not_negative

TRAINED: Final = Train(planner="static", anneal_steps=0, warmup_steps=80, steps=4, evaluation_batches=0)
"""The settings of the run without ``--run``. Experts and samples stay in order, so there are hot ranks."""
REFERENCES: Final = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Error:
    """Measure the errors of a recompute in float8.

    Raises:
        ValueError: if a threshold is negative, or ``batches`` is below 1.
    """

    run: Path | None = None
    """The folder of a training run. Defaults to a new short run with static placement."""
    thresholds: tuple[float, ...] = (1.5, 1.25, 0.0)
    """The thresholds: ranks with more rows than this multiple of the mean compute in float8. 0 marks all ranks."""
    batches: int = 3
    """The number of batches of responses."""

    def __post_init__(self) -> None:
        for threshold in self.thresholds:
            check_not_negative("thresholds", threshold)
        check_integer("batches", self.batches, least=1)


class Errors(NamedTuple):
    """The errors of log-probabilities that were computed in a different precision than the reference."""

    mean: float
    """The mean absolute error of a log-probability, in nats."""
    percentile: float
    """The 99th percentile of the absolute error, in nats."""
    largest: float
    """The largest absolute error, in nats."""
    clipped: float
    """The share of tokens whose ratio, reference over this precision, is outside the clip."""
    kl: float
    """The mean of ratio - 1 - log ratio, in nats per token."""


class Recomputes(NamedTuple):
    """The log-probabilities of the sampled tokens of one batch of responses, in all precisions."""

    log_prob: dict[str, Float[np.ndarray, " tokens"]]
    """The log-probabilities by precision: ``float32``, ``bfloat16``, and ``float8 above`` each threshold."""
    shares: dict[str, tuple[float, float]]
    """The shares of ranks and of rows in float8, over all layers and micro-batches, by precision."""


def compare(
    log_prob: Float[np.ndarray, " tokens"], reference: Float[np.ndarray, " tokens"], clip: Clip
) -> Errors:
    """Compare log-probabilities with a reference, and compute the ratios of an update in the reference's precision.

    Args:
        log_prob: the log-probabilities to compare, in nats.
        reference: the log-probabilities of the same tokens in the reference precision.
        clip: the clip of PPO's ratio.

    >>> errors = compare(np.array([-1.0, -2.0, 0.0, 0.0]), np.array([-1.0, -1.5, 0.0, 0.0]), Clip())
    >>> errors.mean, errors.largest, errors.clipped, round(errors.kl, 4)
    (0.125, 0.5, 0.25, 0.0372)
    """
    error, ratio = np.abs(log_prob - reference), np.exp(reference - log_prob)
    outside = (ratio < 1 - clip.low) | (ratio > 1 + clip.high)
    kl = ratio - 1 - (reference - log_prob)
    return Errors(
        mean=float(error.mean()),
        percentile=float(np.percentile(error, 99)),
        largest=float(error.max()),
        clipped=float(outside.mean()),
        kl=float(kl.mean()),
    )


def measure_errors(config: Float8Error, console: Console) -> None:
    """Train a policy if no run is given, recompute, and print the tables.

    Args:
        config: the settings.
        console: the console that the tables are printed on.
    """
    compile_quickly()
    with tempfile.TemporaryDirectory() as folder:
        run = config.run
        if run is None:
            run = run_train(dataclasses.replace(TRAINED, out=Path(folder)), Console(quiet=True))
        settings = saved_config(run)
        host_devices(settings.topology.num_ranks)
        recomputes = list(recompute_all(run, settings, config))
    _show(recomputes, settings, console)


def recompute_all(run: Path, settings: Train, config: Float8Error) -> Iterator[Recomputes]:
    """Recompute the log-probabilities of some batches of responses in all precisions.

    Args:
        run: the folder of the run, of which the first seed is used.
        settings: the settings of the run.
        config: the settings of the measurement.

    Yields:
        The log-probabilities of each batch.
    """
    trainers = {
        dtype: _restored(run, dataclasses.replace(settings, dtype=dtype, routing="rollout"))
        for dtype in REFERENCES
    }
    for number in range(config.batches):
        first = trainers[REFERENCES[0]]
        key = jax.random.fold_in(jax.random.key(EVALUATION), number)
        responses = first.sampler.respond(first.prompts.groups((EVALUATION, number)), key).responses
        recomputes = Recomputes({}, {})
        for dtype, trainer in trainers.items():
            trainer.state.balancer.discard()
            stages = prepare_stages(trainer.state, trainer.config, responses)
            for name, rule in _rules(dtype, config.thresholds).items():
                recomputed = recompute_planned(trainer.state, trainer.config, stages, float8=rule)
                sampled = recomputed.old_log_probs[responses.response_mask]
                recomputes.log_prob[name] = sampled.astype(np.float64)
                recomputes.shares[name] = (0.0, 0.0) if rule is None else _shares_in_float8(stages, rule)
        yield recomputes


def _rules(dtype: str, thresholds: Sequence[float]) -> dict[str, HotRanks | None]:
    """Return the rules of the recomputes in a dtype, by the name of the precision. Float8 is beside bfloat16."""
    if dtype != "bfloat16":
        return {dtype: None}
    hot = {f"float8 above {above:g}": HotRanks(threshold=above, min_rows=1) for above in thresholds}
    return {dtype: None, **hot}


def _restored(run: Path, settings: Train) -> Trainer:
    """Restore the last checkpoint of the run's first seed, to compute in the dtype of ``settings``."""
    seed = settings.seeds[0]
    checkpoints = (run / f"seed-{seed}" / "checkpoints").absolute()
    if not checkpoints.is_dir():
        raise ValueError(f"{run} contains no checkpoints of seed {seed}")
    trainer = Trainer(settings, seed)
    with ocp.CheckpointManager(checkpoints) as manager:
        trainer.state.restore(manager)
    return trainer


def _shares_in_float8(stages: Stages, rule: HotRanks) -> tuple[float, float]:
    plans: list[Plan] = [jax.device_get(stage.batch.batch_plan.plan) for stage in stages.recompute]
    hot = np.concatenate([np.ravel(mark_hot_ranks(plan, rule)) for plan in plans])
    rows = np.concatenate([np.ravel(rank_load(plan)) for plan in plans])
    return float(hot.mean()), float(rows[hot].sum() / rows.sum())


def _show(recomputes: list[Recomputes], settings: Train, console: Console) -> None:
    log_prob = {
        name: np.concatenate([each.log_prob[name] for each in recomputes]) for name in recomputes[0].log_prob
    }
    clip = f"{1 - settings.clip.low:g}..{1 + settings.clip.high:g}"
    console.print(
        f"{settings.model_name}, {settings.planner}: {len(log_prob['float32'])} sampled tokens; errors of"
        f" log-probabilities in nats, share of ratios outside {clip}, KL in nats per token",
        highlight=False,
    )
    for number, reference in enumerate(REFERENCES):
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(f"against {reference}", no_wrap=True)
        for column in ("ranks", "rows", "mean", "99%", "max", "outside", "KL"):
            table.add_column(column, justify="right")
        for name in [name for name in log_prob if name not in REFERENCES[: number + 1]]:
            shares = np.mean([each.shares[name] for each in recomputes], axis=0)
            errors = compare(log_prob[name], log_prob[reference], settings.clip)
            numbers = [f"{error:.4f}" for error in errors[:3]]
            table.add_row(
                name,
                *(f"{share:.0%}" for share in shares),
                *numbers,
                f"{errors.clipped:.2%}",
                f"{errors.kl:.1e}",
            )
        console.print(table)
