"""Co-execution groups: jobs that take turns on one rollout pool and one training pool (RollMux, arXiv 2512.11306).

A group's jobs stand in a circle. Both pools serve one phase at a time, in this order, each job once in a round, so that
a round's length, the period, is the duration of a step of every job. With constant durations it is

    period = max(the longest step of a job alone, the sum of rollouts, the sum of training phases)

Nothing is shorter: a job's phases follow each other, and a pool does one thing at a time. And round-robin in any order
reaches it. Who waits for whom is a graph, and its slowest cycle sets the pace. A cycle that goes one round ahead is one
of the three. Any other goes at least two rounds ahead and holds no phase twice, so that it is no longer than two
periods. For the same reason the first K steps of a job end within K + 1 periods, however the durations vary below the
conservative ones.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from relibra_jax.sharing.jobs import Job, Pools


class Group(NamedTuple):
    """Jobs that share two pools."""

    jobs: tuple[Job, ...]
    """The jobs, in the order of their turns."""
    rollout_nodes: int
    """The nodes of its rollout pool."""

    @property
    def training_nodes(self) -> int:
        """The nodes of its training pool: those of the job that needs most."""
        return max(job.training_nodes for job in self.jobs)

    @property
    def rollouts(self) -> tuple[float, ...]:
        """The conservative duration of each job's rollout on the nodes of the group, seconds."""
        return tuple(rollout_seconds(job, self.rollout_nodes) for job in self.jobs)

    @property
    def trainings(self) -> tuple[float, ...]:
        """The conservative duration of each job's training phase, seconds."""
        return tuple(job.training_seconds for job in self.jobs)

    @property
    def period(self) -> float:
        """The seconds of a round, by conservative durations."""
        longest = max(
            rollout + training for rollout, training in zip(self.rollouts, self.trainings, strict=True)
        )
        return max(longest, sum(self.rollouts), sum(self.trainings))

    @property
    def slack(self) -> float:
        """How much longer the period might be, as a share of it, until the first job misses its objective."""
        return min(job.allowed_seconds for job in self.jobs) / self.period - 1

    def price(self, pools: Pools) -> float:
        """The price of its nodes for an hour."""
        return self.rollout_nodes * pools.rollout.node_price + self.training_nodes * pools.training.node_price


def rollout_seconds(job: Job, nodes: int) -> float:
    """The conservative duration of a job's rollout on a number of nodes.

    Prompts are independent of each other, so engines on more nodes take proportionally fewer of them each. The longest
    response is one sequence, which no further node shortens: a share of the rollout, the tail, stays as it is.

    Args:
        job: the job.
        nodes: the nodes; in a group at least those that the job needs.

    Returns:
        Seconds.

    >>> job = Job(
    ...     name="a", rollout_seconds=300.0, training_seconds=100.0, rollout_nodes=2, training_nodes=1, tail_share=0.25
    ... )
    >>> [round(rollout_seconds(job, nodes), 2) for nodes in (2, 4, 8)]
    [300.0, 187.5, 131.25]
    """
    return job.rollout_seconds * (1 - (1 - job.tail_share) * (1 - job.rollout_nodes / nodes))


def smallest_group(jobs: Sequence[Job], pools: Pools) -> Group | None:
    """The cheapest group of exactly these jobs: on the fewest rollout nodes with which all keep their objectives.

    Args:
        jobs: the jobs, in the order of their turns.
        pools: the pools.

    Returns:
        The group; None if their states do not fit a node's host memory together, or no number of rollout nodes makes
        the period short enough. A job's state is counted on every node of the group.

    >>> from relibra_jax.sharing.jobs import Pool
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
    # The period never grows with nodes.
    at = bisect.bisect_left(choices, True, key=lambda nodes: Group(members, nodes).period <= allowed)
    return Group(members, choices[at]) if at < len(choices) else None
