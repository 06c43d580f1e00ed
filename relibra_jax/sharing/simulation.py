"""A group executed turn by turn: what its jobs take when durations vary, by the rules of round-robin."""

import itertools
from collections.abc import Mapping
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from relibra_jax.limits import check_integer, check_seed
from relibra_jax.sharing.groups import Group
from relibra_jax.sharing.run_metrics import StepDurations

ROLLOUT, TRAINING = 0, 1
"""The phases of a step, and the pools that they occupy."""
CONSERVATIVE_QUANTILE: Final = 0.95
"""The share of drawn durations that do not exceed the conservative one: as for the jobs of runs."""


class Timeline(NamedTuple):
    """When each phase of each step began and ended, seconds after the start."""

    start: Float[np.ndarray, "steps jobs 2"]
    """The beginning of a rollout, and of a training phase."""
    end: Float[np.ndarray, "steps jobs 2"]
    """The end of each."""


def conservative_durations(group: Group, *, steps: int) -> Float[np.ndarray, "steps jobs 2"]:
    """The durations that a group was planned for, the same in every step, seconds.

    Args:
        group: the group.
        steps: the number of steps of each job.
    """
    check_integer("steps", steps, least=1)
    return np.broadcast_to(
        np.stack([group.rollouts, group.trainings], -1), (steps, len(group.jobs), 2)
    ).copy()


def draw_durations(
    group: Group, *, steps: int, spread: float, seed: int
) -> Float[np.ndarray, "steps jobs 2"]:
    """Durations drawn lognormally, of which one in 20 exceeds the conservative one, seconds.

    Args:
        group: the group.
        steps: the number of steps of each job.
        spread: the standard deviation of a duration's logarithm, 0 to 1; with 0 each is the conservative one.
        seed: the seed.

    Raises:
        ValueError: if a number is out of its range.

    >>> from relibra_jax.sharing.jobs import Job
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
    """Durations in which the jobs of runs take what their recorded steps took, each step drawn with replacement.

    Both phases are those of one recorded step, and a rollout on more nodes is shorter as its conservative duration is.

    Args:
        group: the group.
        durations: the durations of all jobs, of which those of jobs without recorded steps are kept, seconds.
        recorded: the recorded steps, by the names of jobs.
        seed: the seed.

    Raises:
        ValueError: if ``seed`` is none.
    """
    check_seed("seed", seed)
    rng, resampled = np.random.default_rng(seed), durations.copy()
    for number, job in enumerate(group.jobs):
        if job.name in recorded:
            steps = recorded[job.name]
            chosen = rng.integers(len(steps.rollout), size=len(durations))
            shorter = group.rollouts[number] / job.rollout_seconds
            resampled[:, number, ROLLOUT] = shorter * steps.rollout[chosen]
            resampled[:, number, TRAINING] = steps.training[chosen]
    return resampled


def simulate(durations: Float[np.ndarray, "steps jobs 2"]) -> Timeline:
    """Run every step of every job as soon as its turn comes.

    The rollout pool serves the jobs in their order, round by round, and so does the training pool. A phase begins when
    its pool has ended the phase of the job before and its own job has ended its phase before: training follows its
    rollout, and a rollout follows the training of the step before. A pool waits for the job whose turn it is, even if
    another is ready.

    Args:
        durations: the duration of each rollout and each training phase, seconds.

    Returns:
        Timeline of all phases.

    >>> timeline = simulate(np.tile(np.array([[[3.0, 1.0], [2.0, 4.0]]]), (3, 1, 1)))
    >>> timeline.end[:, :, TRAINING].tolist()
    [[4.0, 9.0], [10.0, 15.0], [16.0, 21.0]]
    """
    start, end = np.zeros_like(durations), np.zeros_like(durations)
    steps, jobs, _ = durations.shape
    pool_free, job_ready = np.zeros(2), np.zeros(jobs)
    # In this order whatever a phase waits for has been executed before it.
    for step, job, pool in itertools.product(range(steps), range(jobs), (ROLLOUT, TRAINING)):
        start[step, job, pool] = max(pool_free[pool], job_ready[job])
        end[step, job, pool] = start[step, job, pool] + durations[step, job, pool]
        pool_free[pool] = job_ready[job] = end[step, job, pool]
    return Timeline(start, end)


def steps_within_slo(group: Group, timeline: Timeline) -> Bool[np.ndarray, " jobs"]:
    """Whether each job ended its steps in time.

    K steps may take K + 1 times the duration that the objective allows a step: the one more is for the first round, in
    which pools wait for jobs that have nothing to train on yet.

    Args:
        group: the group.
        timeline: its execution.
    """
    allowed = np.array([job.allowed_seconds for job in group.jobs])
    return timeline.end[-1, :, TRAINING] <= (len(timeline.end) + 1) * allowed
