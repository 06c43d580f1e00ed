"""``python -m experiments.float8_error [--run FOLDER]``: what float8 does to recomputed log-probabilities and to PPO.

A small policy is trained, or a run's last checkpoint taken, and responds to prompts. Their log-probabilities are then
recomputed under one plan: in float32, in bfloat16, and in bfloat16 with the experts of hot ranks in float8, by several
thresholds (`relibra_jax.hot_ranks`). Reported are the errors of the log-probabilities of sampled tokens, and what an
update would make of them that computes in the reference's precision, on the same weights: its ratios, which should all
be 1, outside PPO's clip, and the estimate of the KL divergence that runs report. The floor of rows is 1 here: a small
policy has few rows a rank.
"""

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jaxtyping import Float
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.rl.configs import Train
from experiments.rl.devices import compile_quickly, host_devices
from experiments.rl.generation import Responses
from experiments.rl.saved_config import saved_config
from experiments.rl.stages import Stages, prepare_stages, recompute_planned
from experiments.rl.step import Clip
from experiments.rl.train import keep_compiled, run_train
from experiments.rl.trainer import EVALUATION, Trainer
from relibra_jax.cli.parsing import run_program
from relibra_jax.hot_ranks import HotRanks, mark_hot_ranks
from relibra_jax.limits import check_integer, check_not_negative
from relibra_jax.plan import rank_load
from relibra_jax.types import Plan

TRAINED: Final = Train(planner="static", anneal_steps=0, warmup_steps=80, steps=4, evaluation_batches=0)
"""The run without ``--run``: experts and samples in order, so that there are hot ranks."""
REFERENCES: Final = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Error:
    """Measure the errors of a recompute in float8.

    Raises:
        ValueError: if a number is out of its range.
    """

    run: Path | None = None
    """The folder of a training run; a short one with static placement when not given."""
    thresholds: tuple[float, ...] = (1.5, 1.25, 0.0)
    """Ranks above so many times the mean compute in float8; 0 for all."""
    batches: int = 3
    """The batches of responses."""

    def __post_init__(self) -> None:
        for threshold in self.thresholds:
            check_not_negative("thresholds", threshold)
        check_integer("batches", self.batches, least=1)


class Errors(NamedTuple):
    """What tokens have of another precision than the reference's."""

    mean: float
    """Of the absolute error of a log-probability, nats."""
    percentile: float
    """The 99th."""
    largest: float
    """The largest."""
    clipped: float
    """The share of tokens whose ratio of reference to this is outside the clip."""
    kl: float
    """The mean of ratio - 1 - log ratio, nats a token."""


class Recomputes(NamedTuple):
    """The log-probabilities of one batch of responses in all precisions, of sampled tokens alone."""

    log_prob: dict[str, Float[np.ndarray, " tokens"]]
    """By precision: ``float32``, ``bfloat16``, and ``float8 above`` each threshold."""
    marked: dict[str, tuple[float, float]]
    """The share of ranks, and of rows, in float8, over all layers and micro-batches."""


def compare(
    log_prob: Float[np.ndarray, " tokens"], reference: Float[np.ndarray, " tokens"], clip: Clip
) -> Errors:
    """The errors of log-probabilities, and of the ratios of an update that computes as the reference does.

    >>> errors = compare(np.array([-1.0, -2.0, 0.0, 0.0]), np.array([-1.0, -1.5, 0.0, 0.0]), Clip())
    >>> errors.mean, errors.largest, errors.clipped, round(errors.kl, 4)
    (0.125, 0.5, 0.25, 0.0372)
    """
    error, ratio = np.abs(log_prob - reference), np.exp(reference - log_prob)
    outside = (ratio < 1 - clip.low) | (ratio > 1 + clip.high)
    kl = ratio - 1 - (reference - log_prob)
    return Errors(
        *map(float, (error.mean(), np.percentile(error, 99), error.max(), outside.mean(), kl.mean()))
    )


def main(config: Float8Error) -> None:
    """Train if there is no run, recompute, and print the table."""
    console = Console()
    compile_quickly()
    with tempfile.TemporaryDirectory() as folder:
        run = config.run
        if run is None:
            run = run_train(dataclasses.replace(TRAINED, out=Path(folder)), Console(quiet=True))
        settings = saved_config(run)
        host_devices(settings.topology.num_ranks)
        keep_compiled()
        recomputes = list(recompute_all(run, settings, config))
    _show(recomputes, settings, console)


def recompute_all(run: Path, settings: Train, config: Float8Error) -> Iterator[Recomputes]:
    """Recompute the log-probabilities of some batches of responses in all precisions.

    Args:
        run: the folder of the run, whose first seed is taken.
        settings: its settings.
        config: thresholds and number of batches.
    """
    trainers = {
        dtype: _restored(run, dataclasses.replace(settings, dtype=dtype, routing="rollout"))
        for dtype in REFERENCES
    }
    for number in range(config.batches):
        first = trainers[REFERENCES[0]]
        key = jax.random.fold_in(jax.random.key(EVALUATION), number)
        responses = first.sampler.respond(first.prompts.groups((EVALUATION, number)), key)
        found = Recomputes({}, {})
        for dtype, trainer in trainers.items():
            trainer.state.balancer.discard()
            stages = prepare_stages(trainer.state, trainer.config, responses)
            recompute = functools.partial(_recompute, trainer, stages, responses)
            found.log_prob[dtype] = recompute(None)
        for threshold in config.thresholds:  # of bfloat16, which came last
            name, rule = f"float8 above {threshold:g}", HotRanks(threshold=threshold, min_rows=1)
            found.log_prob[name] = recompute(rule)
            found.marked[name] = _marked_shares(stages, rule)
        yield found


def _restored(run: Path, settings: Train) -> Trainer:
    """The last checkpoint of the run's first seed, computing in the dtype of ``settings``."""
    seed = settings.seeds[0]
    checkpoints = (run / f"seed-{seed}" / "checkpoints").absolute()
    if not checkpoints.is_dir():
        raise ValueError(f"{run}: no checkpoints of seed {seed}")
    trainer = Trainer(settings, seed)
    with ocp.CheckpointManager(checkpoints) as manager:
        trainer.state.restore(manager)
    return trainer


def _recompute(
    trainer: Trainer, stages: Stages, responses: Responses, rule: HotRanks | None
) -> Float[np.ndarray, " tokens"]:
    old = recompute_planned(trainer.state, trainer.config, stages, float8=rule)
    return old.log_prob[responses.response].astype(np.float64)


def _marked_shares(stages: Stages, rule: HotRanks) -> tuple[float, float]:
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
        f"{settings.model_name}, {settings.planner}: {len(log_prob['float32'])} sampled tokens. Errors of"
        f" log-probabilities in nats; ratios outside {clip}",
        highlight=False,
    )
    for number, reference in enumerate(REFERENCES):
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(f"against {reference}", no_wrap=True)
        for column in ("ranks", "rows", "mean", "99%", "max", "outside", "KL"):
            table.add_column(column, justify="right")
        for name in [name for name in log_prob if name not in REFERENCES[: number + 1]]:
            marked = [each.marked.get(name, (0.0, 0.0)) for each in recomputes]
            shares = [f"{share:.0%}" for share in np.mean(marked, axis=0)]
            errors = compare(log_prob[name], log_prob[reference], settings.clip)
            numbers = [f"{error:.4f}" for error in errors[:3]]
            table.add_row(name, *shares, *numbers, f"{errors.clipped:.2%}", f"{errors.kl:.1e}")
        console.print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, Float8Error, description=__doc__))
