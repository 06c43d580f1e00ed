"""A lower bound of what a batch takes under any plan: how much there is left to gain.

Over all homes, residents, replicas and assignments of whole samples to ranks and micro-batches, in the terms of
`relibra_jax.cost.batch_time`:

    attention   tokens / ranks: the sum over micro-batches of the fullest rank's is never less
    compute     copies / ranks, likewise
    exchange    the larger of crossings / ranks on the slow network (`relibra_jax.cost.least_crossings`) and of copies
                off their rank on the fast one; with pushes of residents, or unevenness, that must be paid for fewer

It is a relaxation: left out are tiles, replicas' transfers, experts that change home, that the busiest rank has more
than the mean, and most of what keeps one set of experts from being the best for all samples. So no plan is below it,
and the best one may be well above it.
"""

from typing import NamedTuple

from relibra_jax.cost.least_crossings import (
    Routing,
    copies_off_rank,
    count_routing,
    crossings_of_parts,
    crossings_of_sets,
)
from relibra_jax.limits import check_not_negative
from relibra_jax.types import RoutingReplay, Topology, UnitTimes


class LeastTime(NamedTuple):
    """Seconds of a batch that no plan is below; the three add up."""

    attention: float
    """Attention, projections and shared experts."""
    compute: float
    """The experts."""
    exchange: float
    """Dispatch and combine, with what must be paid elsewhere to have so few crossings."""

    @property
    def total(self) -> float:
        """Seconds of the batch."""
        return self.attention + self.compute + self.exchange


def least_time(
    replay: RoutingReplay, topology: Topology, *, cost: UnitTimes, across_nodes: bool = False
) -> LeastTime:
    """A lower bound of the time of a batch over all plans and all assignments of its samples.

    It is the same for every number of micro-batches. It is counted on the host with NumPy, and does not work under jit.

    Args:
        replay: the routing of all samples of the batch, which `relibra_jax.replay.check_replay` accepts.
        topology: the expert-parallel group.
        cost: the unit times of the cluster and the model, from `relibra_jax.cost.unit_times.unit_times`.
        across_nodes: whether replicas may be in any node, not only where their expert has its home or is a resident.

    Returns:
        LeastTime of Python floats. Residents are counted at the price of their pushes, over the mean node.

    Raises:
        ValueError: if ``cost`` has a negative or infinite time.

    >>> import numpy as np
    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> cost = UnitTimes(token=1.0, copy=1.0, crossing=4.0, spread=0.0, move=0.0, push=0.0)
    >>> replay = RoutingReplay(np.array([[[[0]], [[1]]], [[[0]], [[0]]]]), np.ones((2, 2), bool))
    >>> least_time(replay, topology, cost=cost)  # one token of the first sample is not where its expert is
    LeastTime(attention=2.0, compute=2.0, exchange=2.0)
    """
    for part in ("token", "copy", "crossing", "spread", "push"):
        check_not_negative(part, float(getattr(cost, part)))
    routing = count_routing(replay, num_experts=topology.num_experts)
    tokens, copies = int(routing.tokens.sum()), float(routing.load.sum())
    if not tokens:
        return LeastTime(0.0, 0.0, 0.0)
    layers, ranks = routing.load.shape[1], topology.num_ranks
    slow = _slow_exchange(routing, topology, cost, across_nodes=across_nodes)
    return LeastTime(
        layers * tokens * float(cost.token) / ranks,
        copies * float(cost.copy) / ranks,
        max(slow, _fast_exchange(routing, topology, cost)) / ranks,
    )


def _slow_exchange(routing: Routing, topology: Topology, cost: UnitTimes, *, across_nodes: bool) -> float:
    """Seconds of all ranks together on the slow network, and of what has to be paid for so few crossings."""
    crossing, nodes = float(cost.crossing), topology.num_nodes
    if nodes == 1 or crossing == 0:
        return 0.0
    weight = routing.share if cost.hierarchical else routing.load
    push = float(cost.push) / crossing
    fewest = crossings_of_sets(weight, topology, push=push, across_nodes=across_nodes)
    if not across_nodes and not topology.resident_slots:
        token, copy = (nodes * float(price) / crossing for price in (cost.token, cost.copy))
        parts = crossings_of_parts(routing, topology, token=token, copy=copy, hierarchical=cost.hierarchical)
        fewest = max(fewest, parts)
    return crossing * fewest


def _fast_exchange(routing: Routing, topology: Topology, cost: UnitTimes) -> float:
    """Seconds of all ranks together if the fast network, or flat copies on both, were all that they wait for."""
    crossing, spread = float(cost.crossing), float(cost.spread)
    if cost.hierarchical:
        # A token crosses to the rank of its own number in the other node, and from there to the others.
        return spread * copies_off_rank(routing.load, topology.num_nodes * topology.slots)
    if topology.num_nodes > 1 and spread:
        spread *= crossing / (
            crossing + spread
        )  # what leaves a rank, divided so that both networks take as long
    return spread * copies_off_rank(routing.load, topology.slots)
