"""What jobs cost and do, in groups and in the two ways that RollMux (arXiv 2512.11306) is compared with."""

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

from relibra_jax.sharing.groups import Group, rollout_seconds
from relibra_jax.sharing.jobs import Job, Pools, check_factor, check_jobs


class Outcome(NamedTuple):
    """What a way of running jobs costs, and what it does."""

    price: float
    """The price of all nodes for an hour."""
    work: float
    """The steps of all jobs, each in the time that one of its steps takes alone on pools of its own: a job at that pace
    counts 1."""
    within_slo: int
    """The number of jobs that keep their objectives."""

    @property
    def efficiency(self) -> float:
        """Work for the price: the cost efficiency."""
        return self.work / self.price


def outcome_of_groups(groups: Sequence[Group], pools: Pools) -> Outcome:
    """What jobs cost and do in groups, at the groups' periods.

    Args:
        groups: the groups.
        pools: the pools.
    """
    members = [(job, group) for group in groups for job in group.jobs]
    return Outcome(
        price=sum(group.price(pools) for group in groups),
        work=sum(job.alone_seconds / group.period for job, group in members),
        within_slo=sum(group.period <= job.allowed_seconds for job, group in members),
    )


def outcome_alone(jobs: Sequence[Job], pools: Pools) -> Outcome:
    """What jobs cost and do when each has a rollout pool and a training pool of its own: plain disaggregation.

    Args:
        jobs: the jobs.
        pools: the pools.

    Raises:
        ValueError: if the jobs do not fit the pools, as for ``multiplex``.

    >>> from relibra_jax.sharing.jobs import Pool
    >>> pool = Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4)
    >>> job = Job(name="a", rollout_seconds=60.0, training_seconds=40.0, rollout_nodes=1, training_nodes=1)
    >>> outcome_alone([job], Pools(rollout=pool, training=pool))
    Outcome(price=32.0, work=1.0, within_slo=1)
    """
    check_jobs(jobs, pools)
    return outcome_of_groups([Group((job,), job.rollout_nodes) for job in jobs], pools)


def outcome_colocated(jobs: Sequence[Job], pools: Pools, *, rollout_speed: float) -> Outcome:
    """What jobs cost and do when each runs its phases one after the other on training nodes of its own: co-location.

    A job takes the fewest nodes, from those that its training needs, with which it keeps its objective, and those that
    its training needs where no number does. Its rollout is divided over them as over rollout nodes.

    Args:
        jobs: the jobs.
        pools: the pools, of which only the training pool is used.
        rollout_speed: how fast a training node generates, a rollout node being 1.

    Raises:
        ValueError: if the jobs do not fit the pools, as for ``multiplex``, or ``rollout_speed`` is not positive.

    >>> from relibra_jax.sharing.jobs import Pool
    >>> pool = Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4)
    >>> job = Job(name="a", rollout_seconds=60.0, training_seconds=40.0, rollout_nodes=1, training_nodes=1)
    >>> outcome_colocated([job], Pools(rollout=pool, training=pool), rollout_speed=0.5)
    Outcome(price=16.0, work=0.625, within_slo=0)
    """
    check_factor("rollout_speed", rollout_speed)
    check_jobs(jobs, pools)
    price, work, within_slo = 0.0, 0.0, 0
    for job in jobs:
        choices = range(job.training_nodes, pools.training.max_nodes + 1)
        seconds_on = functools.partial(_colocated_seconds, job, rollout_speed)
        at = bisect.bisect_left(choices, -job.allowed_seconds, key=lambda nodes: -seconds_on(nodes))
        nodes = choices[at] if at < len(choices) else job.training_nodes
        seconds = seconds_on(nodes)
        price += nodes * pools.training.node_price
        work += job.alone_seconds / seconds
        within_slo += seconds <= job.allowed_seconds
    return Outcome(price, work, within_slo)


def _colocated_seconds(job: Job, rollout_speed: float, nodes: int) -> float:
    """The duration of a step whose phases follow each other on so many training nodes."""
    return rollout_seconds(job, nodes) / rollout_speed + job.training_seconds
