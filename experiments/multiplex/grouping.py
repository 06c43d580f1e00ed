"""Forming co-execution groups: jobs one by one, each where it costs least, or the cheapest of all partitions.

Source of admission one by one: RollMux (arXiv 2512.11306).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Final

from experiments.multiplex.groups import Group, smallest_group
from experiments.multiplex.jobs import Job, Pools, check_jobs

MOST_JOBS: Final = 6
"""The most jobs for which all partitions are tried."""


def group_jobs(jobs: Sequence[Job], pools: Pools) -> tuple[Group, ...]:
    """Form groups of jobs that share pools, so that every job keeps its objective.

    Jobs arrive one after the other, and stay in their group. A new job joins an existing group, joins a group that gets
    more rollout nodes for it, or forms its own group, whichever adds the least to the price per hour. Among equal
    prices it joins the oldest group. A group can admit the job if the period with conservative durations keeps every
    member's objective, and the states of all members together fit the host memory.

    Args:
        jobs: the jobs, in the order in which they arrive.
        pools: the rollout pool and the training pool.

    Returns:
        The groups, in the order in which they were formed. In a group, jobs alternate in the order of their arrival.

    Raises:
        ValueError: under the conditions of `check_jobs`.

    >>> from experiments.multiplex.jobs import Pool
    >>> pool = Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4)
    >>> def job(name, rollout, training):
    ...     seconds = {"rollout_seconds": rollout, "training_seconds": training}
    ...     return Job(name=name, **seconds, rollout_nodes=1, training_nodes=1, slo=1.1)
    >>> groups = group_jobs(
    ...     [job("a", 60.0, 40.0), job("b", 90.0, 10.0), job("c", 40.0, 60.0)], Pools(rollout=pool, training=pool)
    ... )
    >>> [("".join(job.name for job in group.jobs), group.period) for group in groups]
    [('ac', 100.0), ('b', 100.0)]
    """
    check_jobs(jobs, pools)
    groups: list[Group] = []
    for job in jobs:
        new_group = Group((job,), job.rollout_nodes)
        options = [(new_group.price(pools), len(groups), new_group)]
        for place, group in enumerate(groups):
            larger_group = smallest_group((*group.jobs, job), pools)
            if larger_group is not None:
                options.append((larger_group.price(pools) - group.price(pools), place, larger_group))
        _, place, best = min(options, key=lambda option: option[:2])
        groups[place : place + 1] = [best]
    return tuple(groups)


def largest_first(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs into an order of admission that makes groups cheaper, if all jobs are known in advance.

    Jobs that need the most training nodes come first, because the training pool of a group is as large as its largest
    job needs. Among equal jobs, those that allow the shortest step come first.

    Args:
        jobs: the jobs in any order.

    >>> def job(name, nodes, slo):
    ...     return Job(
    ...         name=name, rollout_seconds=60.0, training_seconds=40.0, rollout_nodes=1, training_nodes=nodes, slo=slo
    ...     )
    >>> "".join(job.name for job in largest_first([job("a", 1, 1.0), job("b", 2, 2.0), job("c", 2, 1.5)]))
    'cba'
    """
    return sorted(jobs, key=lambda job: (-job.training_nodes, job.allowed_seconds))


def cheapest_groups(jobs: Sequence[Job], pools: Pools) -> tuple[Group, ...]:
    """Find the groups with the lowest price per hour over all partitions of the jobs.

    It uses all jobs at once, while `group_jobs` places each job before it sees the next.

    Args:
        jobs: the jobs, at most `MOST_JOBS`.
        pools: the rollout pool and the training pool.

    Returns:
        The groups, in the order of their first jobs.

    Raises:
        ValueError: if there are more than `MOST_JOBS` jobs, or under the conditions of `check_jobs`.

    >>> from experiments.multiplex.jobs import Pool
    >>> pool = Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4)
    >>> job = {"rollout_nodes": 1, "training_nodes": 1}
    >>> jobs = [
    ...     Job(name="a", rollout_seconds=50.0, training_seconds=50.0, slo=1.5, **job),
    ...     Job(name="b", rollout_seconds=90.0, training_seconds=10.0, slo=1.5, **job),
    ...     Job(name="c", rollout_seconds=50.0, training_seconds=50.0, slo=1.0, **job),
    ... ]
    >>> groups = cheapest_groups(jobs, Pools(rollout=pool, training=pool))
    >>> ["".join(job.name for job in group.jobs) for group in groups]
    ['ab', 'c']
    """
    check_jobs(jobs, pools)
    if len(jobs) > MOST_JOBS:
        raise ValueError(
            f"jobs: {len(jobs)} jobs are too many to try all partitions; the most is {MOST_JOBS}"
        )

    @functools.cache
    def cheapest(remaining: tuple[int, ...]) -> tuple[float, tuple[Group, ...]]:
        if not remaining:
            return 0.0, ()
        first, *others = remaining
        options = []
        for count in range(len(remaining)):
            for partners in itertools.combinations(others, count):
                group = smallest_group([jobs[number] for number in (first, *partners)], pools)
                if group is not None:
                    price, groups = cheapest(tuple(number for number in others if number not in partners))
                    options.append((group.price(pools) + price, (group, *groups)))
        return min(options, key=lambda option: option[0])

    return cheapest(tuple(range(len(jobs))))[1]
