"""Descriptions of reinforcement-learning jobs, and of the pools of nodes that they run on."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Final

from relibra_jax.support.limits import COST_MAX, check_integer, check_not_negative

BYTES_MAX = 2**63 - 1
"""The largest number of bytes that is accepted."""
SECONDS_MAX: Final = 365 * 24 * 3600
"""The longest duration of a phase that is accepted, a year, so that sums of durations stay finite."""


def check_factor(name: str, value: float) -> None:
    """Raise ValueError unless a price or a speed is from 1e-9 to 1e9, so that products and quotients stay finite.

    Args:
        name: the name of the number, for the message.
        value: the number.

    >>> check_factor("device_price", 1e308)
    Traceback (most recent call last):
    ValueError: device_price=1e+308 must be positive: at least 1e-09 and at most 1e+09
    """
    if not 1 / COST_MAX <= value <= COST_MAX:
        raise ValueError(
            f"{name}={value} must be positive: at least {1 / COST_MAX:g} and at most {COST_MAX:g}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One reinforcement-learning job. Each step is a rollout and then a training phase; steps do not overlap.

    Durations are conservative: a step rarely takes longer. They include the time to bring the job's state from host
    memory to its devices. Sizes are whole nodes, because a state stays in the host memory of the nodes that use it.

    Raises:
        ValueError: if a number is out of its range.

    >>> Job(name="a", rollout_seconds=300.0, training_seconds=100.0, rollout_nodes=2, training_nodes=1).alone_seconds
    400.0
    """

    name: str
    """The name of the job."""
    rollout_seconds: float
    """The conservative duration of a rollout on ``rollout_nodes`` nodes, in seconds."""
    training_seconds: float
    """The conservative duration of the rest of a step on ``training_nodes`` nodes, in seconds."""
    rollout_nodes: int
    """The smallest number of nodes of the rollout pool that the job needs."""
    training_nodes: int
    """The number of nodes of the training pool that the job needs. More nodes do not make it faster, because its layout
    is made for this number."""
    tail_share: float = 1.0
    """The share of a rollout that more nodes do not shorten; see `experiments.multiplex.groups.rollout_seconds`. With
    1, the cautious choice, more nodes do not help at all."""
    slo: float = 1.0
    """The service-level objective: the longest mean duration of a step over `alone_seconds`; at least 1."""
    rollout_bytes: int = 0
    """The bytes that the job keeps in the host memory of each rollout node: the weights of its engines."""
    training_bytes: int = 0
    """The bytes that the job keeps in the host memory of each training node: its part of the training state."""

    def __post_init__(self):
        for name in ("rollout_seconds", "training_seconds"):
            seconds = getattr(self, name)
            if not 0 < seconds <= SECONDS_MAX:
                raise ValueError(
                    f"job {self.name}: {name}={seconds} must be positive and at most {SECONDS_MAX}, a year"
                )
        for name in ("rollout_nodes", "training_nodes"):
            check_integer(f"job {self.name}: {name}", getattr(self, name), least=1)
        for name in ("rollout_bytes", "training_bytes"):
            check_integer(f"job {self.name}: {name}", getattr(self, name), least=0, most=BYTES_MAX)
        check_not_negative(f"job {self.name}: slo", self.slo)
        if self.slo < 1:
            raise ValueError(
                f"job {self.name}: slo={self.slo} must be at least 1, because no step is faster than alone"
            )
        if not 0 <= self.tail_share <= 1:
            raise ValueError(
                f"job {self.name}: tail_share={self.tail_share} must be at least 0 and at most 1"
            )

    @property
    def alone_seconds(self) -> float:
        """The seconds of a step on pools of the job's own."""
        return self.rollout_seconds + self.training_seconds

    @property
    def allowed_seconds(self) -> float:
        """The longest mean seconds of a step that keep the objective."""
        return self.slo * self.alone_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool of nodes of one kind. Every group has its own nodes of the pool.

    Raises:
        ValueError: if a number is out of its range.

    >>> Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4).node_price
    16.0
    """

    device_price: float
    """The price of one device per hour, in any currency."""
    devices_per_node: int
    """The number of devices on a node."""
    host_bytes: int
    """The bytes of a node's host memory that the states of jobs may take."""
    max_nodes: int
    """The most nodes that one group may use."""

    def __post_init__(self):
        check_factor("device_price", self.device_price)
        check_integer("devices_per_node", self.devices_per_node, least=1)
        check_integer("host_bytes", self.host_bytes, least=1, most=BYTES_MAX)
        check_integer("max_nodes", self.max_nodes, least=1)

    @property
    def node_price(self) -> float:
        """The price of one node per hour."""
        return self.device_price * self.devices_per_node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pools:
    """The two pools: nodes on which engines generate, and nodes on which trainers learn."""

    rollout: Pool
    """The pool of nodes for rollouts."""
    training: Pool
    """The pool of nodes for training."""


def check_jobs(jobs: Sequence[Job], pools: Pools) -> None:
    """Check that jobs have different names and that each of them can run alone on the pools.

    Args:
        jobs: the jobs.
        pools: the rollout pool and the training pool.

    Raises:
        ValueError: if there is no job, two jobs have the same name, or a job needs more nodes or host memory than its
            pool has.

    >>> pool = Pool(device_price=2.0, devices_per_node=8, host_bytes=10**12, max_nodes=4)
    >>> job = Job(name="a", rollout_seconds=3.0, training_seconds=1.0, rollout_nodes=5, training_nodes=1)
    >>> check_jobs([job], Pools(rollout=pool, training=pool))
    Traceback (most recent call last):
    ValueError: job a: rollout_nodes=5 exceeds the 4 nodes that a group may use
    """
    if not jobs:
        raise ValueError("jobs must have at least one job")
    name, count = collections.Counter(job.name for job in jobs).most_common(1)[0]
    if count > 1:
        raise ValueError(f"jobs: {count} jobs have the name {name!r}; names must be unique")
    for job in jobs:
        for kind, pool in (("rollout", pools.rollout), ("training", pools.training)):
            nodes, state_bytes = getattr(job, f"{kind}_nodes"), getattr(job, f"{kind}_bytes")
            if nodes > pool.max_nodes:
                raise ValueError(
                    f"job {job.name}: {kind}_nodes={nodes} exceeds the {pool.max_nodes} nodes that a group may use"
                )
            if state_bytes > pool.host_bytes:
                raise ValueError(
                    f"job {job.name}: {kind}_bytes={state_bytes} exceeds the {pool.host_bytes} bytes of a node's host"
                    " memory"
                )
