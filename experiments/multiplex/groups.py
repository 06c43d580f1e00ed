"""Co-execution groups: jobs that alternate on one rollout pool and one training pool (RollMux, arXiv 2512.11306).

The pools serve the jobs of a group round-robin: each pool serves one phase at a time, and each job once per round, in
the same cyclic order. So the length of a round, the period, is the duration of a step of every job. With constant
durations it is

    period = max(the longest step of a job alone, the sum of rollouts, the sum of training phases)

No schedule has a shorter period, because the phases of a job follow each other and a pool does one thing at a time.
Round-robin in any order reaches this period. The dependencies between phases form a graph, whose slowest cycle sets the
pace. A cycle that advances one round is one of the three terms. Any other cycle advances at least two rounds and
contains no phase twice, so it is no longer than two periods. For the same reason the first K steps of a job end within
K + 1 periods, if no duration exceeds its conservative one.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from experiments.multiplex.jobs import Job, Pools


class Group(NamedTuple):
    """Jobs that share two pools."""

    jobs: tuple[Job, ...]
    """The jobs, in the order in which the pools serve them."""
    rollout_nodes: int
    """The number of nodes of the group's rollout pool."""

    @property
    def training_nodes(self) -> int:
        """The number of nodes of the group's training pool: that of the job that needs the most."""
        return max(job.training_nodes for job in self.jobs)

    @property
    def rollouts(self) -> tuple[float, ...]:
        """The conservative duration of each job's rollout on the group's rollout nodes, in seconds."""
        return tuple(rollout_seconds(job, self.rollout_nodes) for job in self.jobs)

    @property
    def trainings(self) -> tuple[float, ...]:
        """The conservative duration of each job's training phase, in seconds."""
        return tuple(job.training_seconds for job in self.jobs)

    @property
    def period(self) -> float:
        """The seconds of a round with conservative durations."""
        longest = max(
            rollout + training for rollout, training in zip(self.rollouts, self.trainings, strict=True)
        )
        return max(longest, sum(self.rollouts), sum(self.trainings))

    @property
    def slack(self) -> float:
        """The share by which the period could grow before the first job misses its objective."""
        return min(job.allowed_seconds for job in self.jobs) / self.period - 1

    def price(self, pools: Pools) -> float:
        """Return the price of the group's nodes per hour."""
        return self.rollout_nodes * pools.rollout.node_price + self.training_nodes * pools.training.node_price


def rollout_seconds(job: Job, nodes: int) -> float:
    """Compute the conservative duration of a job's rollout on a number of nodes.

    Prompts are independent of each other, so with more nodes each engine gets proportionally fewer of them. The longest
    response is a single sequence, which more nodes do not shorten. So a share of the rollout, the tail, stays constant.

    Args:
        job: the job.
        nodes: the number of rollout nodes. In a group it is at least the number that the job needs.

    Returns:
        The duration in seconds.

    >>> job = Job(
    ...     name="a", rollout_seconds=300.0, training_seconds=100.0, rollout_nodes=2, training_nodes=1, tail_share=0.25
    ... )
    >>> [round(rollout_seconds(job, nodes), 2) for nodes in (2, 4, 8)]
    [300.0, 187.5, 131.25]
    """
    return job.rollout_seconds * (1 - (1 - job.tail_share) * (1 - job.rollout_nodes / nodes))


def smallest_group(jobs: Sequence[Job], pools: Pools) -> Group | None:
    """Find the cheapest group of exactly these jobs: the fewest rollout nodes with which all keep their objectives.

    Args:
        jobs: the jobs, in the order in which the pools serve them.
        pools: the rollout pool and the training pool.

    Returns:
        The group. None if the states of the jobs together do not fit a node's host memory, or no number of rollout
        nodes makes the period short enough. The state of a job counts on every node of the group.

    >>> from experiments.multiplex.jobs import Pool
    >>> pool = Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4)
    >>> first, second = (
    ...     Job(
    ...         name=name, rollout_seconds=300.0, training_seconds=100.0, rollout_nodes=1, training_nodes=1,
    ...         tail_share=0.5, slo=1.2,
    ...     )
    ...     for name in "ab"
    ... )
    >>> group = smallest_group([first, second], Pools(rollout=pool, training=pool))
    >>> group.rollout_nodes, round(group.period), round(group.slack, 3)
    (2, 450, 0.067)
    """
    members = tuple(jobs)
    if sum(job.rollout_bytes for job in members) > pools.rollout.host_bytes:
        return None
    if sum(job.training_bytes for job in members) > pools.training.host_bytes:
        return None
    least = max(job.rollout_nodes for job in members)
    allowed = min(job.allowed_seconds for job in members)
    choices = range(least, pools.rollout.max_nodes + 1)
    # More nodes never make the period longer, so bisection finds the fewest.
    at = bisect.bisect_left(choices, True, key=lambda nodes: Group(members, nodes).period <= allowed)
    return Group(members, choices[at]) if at < len(choices) else None
