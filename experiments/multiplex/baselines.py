"""Price and work of jobs in groups, and in the two baselines of RollMux (arXiv 2512.11306)."""

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

from experiments.multiplex.groups import Group, rollout_seconds
from experiments.multiplex.jobs import Job, Pools, check_factor, check_jobs


class Outcome(NamedTuple):
    """The price of a way to run jobs, and the work that it does."""

    price: float
    """The price of all nodes per hour."""
    work: float
    """The sum over jobs of each job's speed, relative to its speed on pools of its own."""
    within_slo: int
    """The number of jobs that keep their objectives."""

    @property
    def efficiency(self) -> float:
        """The cost efficiency: work per price."""
        return self.work / self.price


def outcome_of_groups(groups: Sequence[Group], pools: Pools) -> Outcome:
    """Compute the price and work of jobs in groups, each job with one step per period of its group.

    Args:
        groups: the groups.
        pools: the rollout pool and the training pool.
    """
    members = [(job, group) for group in groups for job in group.jobs]
    return Outcome(
        price=sum(group.price(pools) for group in groups),
        work=sum(job.alone_seconds / group.period for job, group in members),
        within_slo=sum(group.period <= job.allowed_seconds for job, group in members),
    )


def outcome_alone(jobs: Sequence[Job], pools: Pools) -> Outcome:
    """Compute the price and work of jobs that each have a rollout pool and a training pool: plain disaggregation.

    Args:
        jobs: the jobs.
        pools: the rollout pool and the training pool.

    Raises:
        ValueError: under the conditions of `check_jobs`.

    >>> from experiments.multiplex.jobs import Pool
    >>> pool = Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4)
    >>> job = Job(name="a", rollout_seconds=60.0, training_seconds=40.0, rollout_nodes=1, training_nodes=1)
    >>> outcome_alone([job], Pools(rollout=pool, training=pool))
    Outcome(price=32.0, work=1.0, within_slo=1)
    """
    check_jobs(jobs, pools)
    return outcome_of_groups([Group((job,), job.rollout_nodes) for job in jobs], pools)


def outcome_colocated(jobs: Sequence[Job], pools: Pools, *, rollout_speed: float) -> Outcome:
    """Compute the price and work of jobs that each run rollout and training in turn on their own training nodes.

    This is co-location. A job uses at least the nodes that its training needs, and the fewest with which it keeps its
    objective. If no number of nodes keeps the objective, it uses those that its training needs. Its rollout scales with
    the nodes as on rollout nodes.

    Args:
        jobs: the jobs.
        pools: the pools. Only the training pool is used.
        rollout_speed: the speed at which a training node generates, relative to a rollout node.

    Raises:
        ValueError: under the conditions of `check_jobs`, or if ``rollout_speed`` is not from 1e-9 to 1e9.

    >>> from experiments.multiplex.jobs import Pool
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
    """Return the seconds of a step whose rollout and training run in turn on ``nodes`` training nodes."""
    return rollout_seconds(job, nodes) / rollout_speed + job.training_seconds
