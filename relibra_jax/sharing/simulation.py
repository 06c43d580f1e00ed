"""A group executed turn by turn: what its jobs take when durations vary, by the rules of round-robin."""

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from relibra_jax.limits import check_integer, check_seed
from relibra_jax.sharing.groups import Group

ROLLOUT, TRAINING = 0, 1
"""The phases of a step, and the pools that they occupy."""


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
    """Durations drawn uniformly between a share of the conservative ones and all of them, seconds.

    Args:
        group: the group.
        steps: the number of steps of each job.
        spread: the largest share by which a phase is shorter than its conservative duration, 0 to 1.
        seed: the seed.

    Raises:
        ValueError: if a number is out of its range.
    """
    check_seed("seed", seed)
    if not 0 <= spread <= 1:
        raise ValueError(f"spread={spread} must be at least 0 and at most 1")
    longest = conservative_durations(group, steps=steps)
    return longest * (1 - spread * np.random.default_rng(seed).random(longest.shape))


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
