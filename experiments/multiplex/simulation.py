"""Simulation of a group, phase by phase: when its jobs run if durations vary, with pools that serve round-robin."""

import itertools
from collections.abc import Mapping
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from experiments.multiplex.groups import Group
from experiments.multiplex.run_metrics import StepDurations
from relibra_jax.support.limits import check_integer, check_seed

ROLLOUT, TRAINING = 0, 1
"""Indices of the phases of a step, and of the pools that they run on."""
CONSERVATIVE_QUANTILE: Final = 0.95
"""The share of drawn durations that do not exceed the conservative one, the same as the default for jobs of runs."""


class Timeline(NamedTuple):
    """The start and end times of every phase of every step, in seconds from the beginning."""

    start: Float[np.ndarray, "steps jobs 2"]
    """The start times of the rollouts and of the training phases."""
    end: Float[np.ndarray, "steps jobs 2"]
    """The end times of the rollouts and of the training phases."""


def conservative_durations(group: Group, *, steps: int) -> Float[np.ndarray, "steps jobs 2"]:
    """Make the conservative durations of a group, which are the same in every step.

    Args:
        group: the group.
        steps: the number of steps of each job.

    Returns:
        The seconds of every phase.

    Raises:
        ValueError: if ``steps`` is not an integer of at least 1.
    """
    check_integer("steps", steps, least=1)
    return np.broadcast_to(
        np.stack([group.rollouts, group.trainings], -1), (steps, len(group.jobs), 2)
    ).copy()


def draw_durations(
    group: Group, *, steps: int, spread: float, seed: int
) -> Float[np.ndarray, "steps jobs 2"]:
    """Draw lognormal durations, of which one in 20 exceeds the conservative one.

    Args:
        group: the group.
        steps: the number of steps of each job.
        spread: the standard deviation of the logarithm of a duration, from 0 to 1. With 0 every duration is the
            conservative one.
        seed: the seed of the draw.

    Returns:
        The seconds of every phase.

    Raises:
        ValueError: if a number is out of its range.

    >>> from experiments.multiplex.jobs import Job
    >>> job = Job(name="a", rollout_seconds=60.0, training_seconds=40.0, rollout_nodes=1, training_nodes=1)
    >>> drawn = draw_durations(Group((job,), 1), steps=1000, spread=0.5, seed=0)
    >>> np.median(drawn, axis=0).round().tolist(), (drawn > [60.0, 40.0]).mean(axis=0).round(2).tolist()
    ([[26.0, 17.0]], [[0.05, 0.04]])
    """
    check_seed("seed", seed)
    if not 0 <= spread <= 1:
        raise ValueError(f"spread={spread} must be at least 0 and at most 1")
    conservative = conservative_durations(group, steps=steps)
    normal = np.random.default_rng(seed).standard_normal(conservative.shape)
    return conservative * np.exp(spread * (normal - NormalDist().inv_cdf(CONSERVATIVE_QUANTILE)))


def resample_durations(
    group: Group,
    durations: Float[np.ndarray, "steps jobs 2"],
    recorded: Mapping[str, StepDurations],
    *,
    seed: int,
) -> Float[np.ndarray, "steps jobs 2"]:
    """Replace the durations of jobs that are runs by durations of their recorded steps, drawn with replacement.

    Both phases of a step come from the same recorded step. On more nodes a rollout shrinks by the same factor as its
    conservative duration.

    Args:
        group: the group.
        durations: the seconds of all phases. Jobs without recorded steps keep theirs.
        recorded: the recorded durations, by the names of the jobs.
        seed: the seed of the draw.

    Returns:
        The seconds of every phase.

    Raises:
        ValueError: if ``seed`` is out of its range.
    """
    check_seed("seed", seed)
    rng, resampled = np.random.default_rng(seed), durations.copy()
    for number, job in enumerate(group.jobs):
        if job.name in recorded:
            steps = recorded[job.name]
            chosen = rng.integers(len(steps.rollout), size=len(durations))
            factor = group.rollouts[number] / job.rollout_seconds
            resampled[:, number, ROLLOUT] = factor * steps.rollout[chosen]
            resampled[:, number, TRAINING] = steps.training[chosen]
    return resampled


def simulate(durations: Float[np.ndarray, "steps jobs 2"]) -> Timeline:
    """Simulate a group, with every phase started as early as round-robin allows.

    Both pools serve the jobs in their order, round by round. A phase starts when its pool has finished the phase of the
    previous job, and its own job has finished its previous phase: training follows the rollout of the same step, and a
    rollout follows the training of the step before. A pool waits for the next job in the order, even if another job is
    ready.

    Args:
        durations: the seconds of each rollout and each training phase.

    Returns:
        The start and end times of all phases.

    >>> timeline = simulate(np.tile(np.array([[[3.0, 1.0], [2.0, 4.0]]]), (3, 1, 1)))
    >>> timeline.end[:, :, TRAINING].tolist()
    [[4.0, 9.0], [10.0, 15.0], [16.0, 21.0]]
    """
    start, end = np.zeros_like(durations), np.zeros_like(durations)
    steps, jobs, _ = durations.shape
    pool_free, job_ready = np.zeros(2), np.zeros(jobs)
    # In this order every phase comes after the phases that it waits for.
    for step, job, pool in itertools.product(range(steps), range(jobs), (ROLLOUT, TRAINING)):
        start[step, job, pool] = max(pool_free[pool], job_ready[job])
        end[step, job, pool] = start[step, job, pool] + durations[step, job, pool]
        pool_free[pool] = job_ready[job] = end[step, job, pool]
    return Timeline(start, end)


def steps_within_slo(group: Group, timeline: Timeline) -> Bool[np.ndarray, " jobs"]:
    """Check whether each job finished its steps within its objective.

    K steps may take K + 1 times the duration that the objective allows for a step. The extra one is for the first
    round, in which the training pool waits for the first rollouts.

    Args:
        group: the group.
        timeline: the simulated times of the group's phases.

    Returns:
        Whether each job keeps its objective.
    """
    allowed = np.array([job.allowed_seconds for job in group.jobs])
    return timeline.end[-1, :, TRAINING] <= (len(timeline.end) + 1) * allowed
