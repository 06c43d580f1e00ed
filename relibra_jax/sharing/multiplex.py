"""Admission of jobs to co-execution groups, each where it costs least (RollMux, arXiv 2512.11306)."""

from collections.abc import Sequence

from relibra_jax.sharing.groups import Group, smallest_group
from relibra_jax.sharing.jobs import Job, Pools, check_jobs


def multiplex(jobs: Sequence[Job], pools: Pools) -> tuple[Group, ...]:
    """Groups of jobs that share pools, so that every job keeps its objective.

    Jobs come one after the other, and stay where they are put. A new job joins a group as it is, joins one that is
    given more nodes for it, or begins a group of its own, whichever adds the least to the price of an hour. Of equals
    it joins the group that came first. A group admits it if the period, by conservative durations, keeps every member's
    objective, and the states of all fit host memory together.

    Args:
        jobs: the jobs, in the order in which they come.
        pools: the pools.

    Returns:
        The groups, in the order in which they began. Jobs take turns in the order in which they came.

    Raises:
        ValueError: if there is no job, two have one name, or one is too large for a pool.

    >>> from relibra_jax.sharing.jobs import Pool
    >>> pool = Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4)
    >>> def job(name, rollout, training):
    ...     seconds = {"rollout_seconds": rollout, "training_seconds": training}
    ...     return Job(name=name, **seconds, rollout_nodes=1, training_nodes=1, slo=1.1)
    >>> groups = multiplex(
    ...     [job("a", 60.0, 40.0), job("b", 90.0, 10.0), job("c", 40.0, 60.0)], Pools(rollout=pool, training=pool)
    ... )
    >>> [("".join(job.name for job in group.jobs), group.period) for group in groups]
    [('ac', 100.0), ('b', 100.0)]
    """
    check_jobs(jobs, pools)
    groups: list[Group] = []
    for job in jobs:
        own = Group((job,), job.rollout_nodes)
        options = [(own.price(pools), len(groups), own)]
        for place, group in enumerate(groups):
            joined = smallest_group((*group.jobs, job), pools)
            if joined is not None:
                options.append((joined.price(pools) - group.price(pools), place, joined))
        _, place, best = min(options, key=lambda option: option[:2])
        groups[place : place + 1] = [best]
    return tuple(groups)


def largest_first(jobs: Sequence[Job]) -> list[Job]:
    """Jobs in the order in which groups come out cheaper, where all jobs are known before the first is placed.

    Those that need most training nodes come first, since a group's training pool is as large as its largest job's; of
    equals, those that allow the shortest step.

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
