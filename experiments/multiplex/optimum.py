"""The cheapest co-execution groups of a few jobs, found by trying every partition of the jobs."""

import functools
import itertools
from collections.abc import Sequence

from experiments.multiplex.groups import Group, smallest_group
from experiments.multiplex.jobs import Job, Pools, check_jobs

MOST_JOBS = 6
"""The most jobs for which all partitions are tried."""


def cheapest_groups(jobs: Sequence[Job], pools: Pools) -> tuple[Group, ...]:
    """Find the groups with the lowest price per hour over all partitions of the jobs.

    It uses all jobs at once, while `experiments.multiplex.multiplex.multiplex` places each job before it sees the next.

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
