"""The cheapest co-execution groups of all, found by looking at every partition of a few jobs."""

import functools
import itertools
from collections.abc import Sequence

from relibra_jax.sharing.groups import Group, smallest_group
from relibra_jax.sharing.jobs import Job, Pools, check_jobs

MOST_JOBS = 6


def cheapest_groups(jobs: Sequence[Job], pools: Pools) -> tuple[Group, ...]:
    """The groups of the least price of an hour, over all partitions of the jobs.

    It knows all jobs before the first is placed, which `relibra_jax.sharing.multiplex.multiplex` does not.

    Args:
        jobs: the jobs, at most `MOST_JOBS`.
        pools: the pools.

    Returns:
        The groups, by their first jobs.

    Raises:
        ValueError: if there are too many jobs, or they do not fit the pools, as for ``multiplex``.

    >>> from relibra_jax.sharing.jobs import Pool
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
        raise ValueError(f"{len(jobs)} jobs are more than the {MOST_JOBS} whose partitions are all looked at")

    @functools.cache
    def cheapest(left: tuple[int, ...]) -> tuple[float, tuple[Group, ...]]:
        if not left:
            return 0.0, ()
        first, *others = left
        options = []
        for count in range(len(left)):
            for company in itertools.combinations(others, count):
                group = smallest_group([jobs[number] for number in (first, *company)], pools)
                if group is not None:
                    price, groups = cheapest(tuple(number for number in others if number not in company))
                    options.append((group.price(pools) + price, (group, *groups)))
        return min(options, key=lambda option: option[0])

    return cheapest(tuple(range(len(jobs))))[1]
