"""A lower bound of the modelled time of a batch over all plans, which shows how much there is left to gain.

The bound is over all homes, residents, replicas and assignments of whole samples to ranks and micro-batches, in the
terms of `relibra_jax.cost.batch_time`:

    attention   tokens / ranks, and squared lengths of samples / ranks, because the sum over micro-batches of the
                fullest rank's work is never less
    compute     copies / ranks, for the same reason
    exchange    the larger of crossings / ranks on the slow network (`relibra_jax.cost.least_crossings`) and of copies
                that leave their rank on the fast one. It includes the pushes of residents, or the unevenness, that
                fewer crossings would cost

It is a relaxation. It leaves out tiles, transfers of replicas, experts that change home, the excess of the busiest rank
over the mean, and most of the reasons why one set of experts is not the best for all samples. So no plan takes less
time, and the best plan may take much more.
"""

from typing import NamedTuple

from relibra_jax.contract.types import Price, RoutingReplay, Topology
from relibra_jax.cost.least_crossings import (
    Routing,
    copies_off_rank,
    count_routing,
    crossings_of_parts,
    crossings_of_sets,
)
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_not_negative


class LeastTime(NamedTuple):
    """The lower bound of the time of a batch in seconds, as three parts that add up to the total."""

    attention: float
    """Attention, projections and shared experts, and the rest of the batch that is the same for all plans."""
    compute: float
    """The routed experts."""
    exchange: float
    """Dispatch and combine, with the extra time elsewhere that so few crossings would cost."""

    @property
    def total(self) -> float:
        """The seconds of the whole batch."""
        return self.attention + self.compute + self.exchange


@checks_arguments
def least_time(
    replay: RoutingReplay, topology: Topology, *, cost: Price, across_nodes: bool = False
) -> LeastTime:
    """Compute a lower bound of the time of a batch over all plans and all assignments of its samples.

    The bound is the same for every number of micro-batches. It is computed on the host with NumPy, not under jit.

    Args:
        replay: the routing of all samples of the batch, which `relibra_jax.contract.replay.check_replay` accepts.
        topology: the expert-parallel group.
        cost: the price of the cluster and the model, from
            `relibra_jax.cost.cost_model.CostModel.price`.
        across_nodes: True if replicas may be in any node, False if only in nodes that hold their expert at home or as a
            resident.

    Returns:
        The bound as Python floats, in seconds. It includes the pushes of residents, averaged over the nodes.

    Raises:
        ValueError: if a time of ``cost`` is negative or too large (`relibra_jax.support.limits.check_not_negative`).

    >>> import numpy as np
    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> cost = Price(token=1.0, copy=1.0, crossing=4.0, spread=0.0, move=0.0, push=0.0)
    >>> replay = RoutingReplay(np.array([[[[0]], [[1]]], [[[0]], [[0]]]]), np.ones((2, 2), bool))
    >>> least_time(replay, topology, cost=cost)  # one token of the first sample is not where its expert is
    LeastTime(attention=2.0, compute=2.0, exchange=2.0)
    """
    for part in ("token", "pair", "head", "update", "copy", "crossing", "spread", "push"):
        check_not_negative(part, float(getattr(cost, part)))
    routing = count_routing(replay, num_experts=topology.num_experts)
    tokens, copies = int(routing.tokens.sum()), float(routing.load.sum())
    if not tokens:
        return LeastTime(0.0, 0.0, 0.0)
    layers, ranks = routing.load.shape[1], topology.num_ranks
    slow = _slow_exchange(routing, topology, cost, across_nodes=across_nodes)
    positions = tokens * (float(cost.token) + float(cost.head))
    squares = float((routing.tokens.astype(float) ** 2).sum()) * float(cost.pair)
    return LeastTime(
        layers * ((positions + squares) / ranks + float(cost.update)),
        copies * float(cost.copy) / ranks,
        max(slow, _fast_exchange(routing, topology, cost)) / ranks,
    )


def _slow_exchange(routing: Routing, topology: Topology, cost: Price, *, across_nodes: bool) -> float:
    """Bound the seconds of all ranks together on the slow network, with the price of so few crossings."""
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


def _fast_exchange(routing: Routing, topology: Topology, cost: Price) -> float:
    """Bound the seconds of all ranks together on the fast network, or of flat dispatch on both networks."""
    crossing, spread = float(cost.crossing), float(cost.spread)
    if cost.hierarchical:
        # A token crosses to the rank of the same local index in the other node, which sends its copies to the others.
        return spread * copies_off_rank(routing.load, topology.num_nodes * topology.slots)
    if topology.num_nodes > 1 and spread:
        # What leaves a rank is divided between the networks so that both take equally long.
        spread *= crossing / (crossing + spread)
    return spread * copies_off_rank(routing.load, topology.slots)
