"""A lower bound of the modelled time of a batch over all plans, which shows how much there is left to gain.

The bound is over all homes, residents, replicas and assignments of whole samples to ranks and micro-batches, in the
terms of `relibra_jax.cost.batch_time`:

    attention   tokens / ranks, and squared lengths of samples / ranks, because the sum over micro-batches of the
                fullest rank's work is never less
    compute     copies / ranks, for the same reason
    exchange    the sum, on the path of two hops, of crossings / ranks (`relibra_jax.cost.least_crossings`)
                and of copies that leave their rank inside nodes (`relibra_jax.cost.least_spread`); the larger of both
                on the flat path. Rows cost what they take as sent, with their buffers (`relibra_jax.cost.row_prices`).
                It includes the pushes of residents, or the unevenness, that fewer crossings would cost, and what each
                layer and micro-batch takes besides rows

It is a relaxation. It leaves out tiles, transfers of replicas, experts that change home, the excess of the busiest rank
or lane over the mean, and most of the reasons why one set of experts is not the best for all samples. So no plan takes
less time, and the best plan may take more.
"""

from typing import Final, NamedTuple

from relibra_jax.contract.types import Price, RoutingReplay, Topology
from relibra_jax.cost.least_crossings import (
    MOST_SAMPLES,
    Routing,
    count_routing,
    crossings_of_samples,
    crossings_together,
)
from relibra_jax.cost.least_spread import copies_off_rank, striped_copies_off_rank
from relibra_jax.cost.row_prices import linear_price, row_prices, waits
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer, check_not_negative

PRICES: Final = (
    "token",
    "pair",
    "head",
    "update",
    "copy",
    "crossing",
    "spread",
    "gather",
    "stripe",
    "wait",
    "choice",
    "push",
)
"""The prices that the bound reads."""


class LeastTime(NamedTuple):
    """The lower bound of the time of a batch in seconds, as three parts that add up to the total."""

    attention: float
    """Attention, projections and shared experts, and the rest of the batch that is the same for all plans."""
    compute: float
    """The routed experts."""
    exchange: float
    """Dispatch and combine with their buffers, and the extra time elsewhere that so few crossings would cost."""

    @property
    def total(self) -> float:
        """The seconds of the whole batch."""
        return self.attention + self.compute + self.exchange


@checks_arguments
def least_time(
    replay: RoutingReplay,
    topology: Topology,
    *,
    cost: Price,
    across_nodes: bool = False,
    micro_batches: int = 1,
) -> LeastTime:
    """Compute a lower bound of the time of a batch over all plans and all assignments of its samples.

    It is computed on the host with NumPy, not under jit.

    Args:
        replay: the routing of all samples of the batch, which `relibra_jax.contract.replay.check_replay` accepts.
        topology: the expert-parallel group.
        cost: the price of the cluster and the model, from
            `relibra_jax.cost.cost_model.CostModel.price`.
        across_nodes: True if replicas may be in any node, False if only in nodes that hold their expert at home or as a
            resident.
        micro_batches: the least number of micro-batches of a data-parallel group. Only waits depend on it.

    Returns:
        The bound as Python floats, in seconds. It includes the pushes of residents, averaged over the nodes.

    Raises:
        ValueError: if a time of ``cost`` is negative or too large (`relibra_jax.support.limits.check_not_negative`), or
            ``micro_batches`` is not an integer of at least 1.

    >>> import numpy as np
    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> cost = Price(token=1.0, copy=1.0, crossing=4.0, spread=0.0, move=0.0, push=0.0)
    >>> replay = RoutingReplay(np.array([[[[0]], [[1]]], [[[0]], [[0]]]]), np.ones((2, 2), bool))
    >>> bound = least_time(replay, topology, cost=cost)
    >>> # One token of the first sample is not where its expert is, which takes 4 seconds.
    >>> bound.attention, bound.compute, 2.0 < bound.exchange < 4.0
    (2.0, 2.0, True)
    """
    check_integer("micro_batches", micro_batches, least=1)
    for part in PRICES:
        check_not_negative(part, float(getattr(cost, part)))
    routing = count_routing(replay, num_experts=topology.num_experts)
    tokens, copies = int(routing.tokens.sum()), float(routing.load.sum())
    if not tokens:
        return LeastTime(0.0, 0.0, 0.0)
    layers, ranks = routing.load.shape[1], topology.num_ranks * cost.data_parallel
    visits = float(tokens * layers * (topology.num_nodes - 1))
    rows_sent = visits if cost.hierarchical and topology.num_nodes > 1 else copies
    cost = linear_price(cost, topology, crossings=rows_sent, copies=copies)
    rows = row_prices(cost, topology)
    crossings = rows.crossing * _least_crossings(
        replay, routing, topology, cost, rows.crossing, across_nodes=across_nodes
    )
    inside = _copies_off_rank(replay, routing, topology, cost)
    hops = (
        crossings + rows.inside * inside
        if cost.hierarchical
        else max(crossings, rows.inside * inside) + rows.buffer * inside
    )
    # Every token visits a node, and ranks deal all copies to each other if layers are striped.
    others = rows.arrival * tokens * layers + (rows.slot + float(cost.stripe)) * copies
    positions = tokens * (float(cost.token) + float(cost.head))
    squares = float((routing.tokens.astype(float) ** 2).sum()) * float(cost.pair)
    return LeastTime(
        layers * ((positions + squares) / ranks + float(cost.update)),
        copies * float(cost.copy) / ranks,
        (hops + others) / ranks + layers * micro_batches * waits(cost, topology),
    )


def _least_crossings(
    replay: RoutingReplay,
    routing: Routing,
    topology: Topology,
    cost: Price,
    crossing: float,
    *,
    across_nodes: bool,
) -> float:
    """Bound the rows between nodes, each of which costs ``crossing``, with the price of so few of them."""
    if topology.num_nodes == 1 or crossing == 0:
        return 0.0
    weight = routing.share if cost.hierarchical else routing.load
    push = float(cost.push) * cost.data_parallel / crossing
    fewest = crossings_of_samples(weight, topology, push=push, across_nodes=across_nodes)
    if not across_nodes and len(routing.tokens) <= MOST_SAMPLES:
        together = crossings_together(
            replay,
            routing,
            topology,
            token=(float(cost.token) + float(cost.head)) / crossing,
            copy=float(cost.copy) / crossing,
            push=push,
            hierarchical=cost.hierarchical,
        )
        fewest = max(fewest, together)
    return max(0.0, fewest)


def _copies_off_rank(replay: RoutingReplay, routing: Routing, topology: Topology, cost: Price) -> float:
    """Bound the token copies that leave their rank, under hierarchical dispatch inside a node.

    On a single node it is the tokens that go to another rank under hierarchical dispatch, each once for every rank.
    """
    if cost.hierarchical and topology.num_nodes == 1:
        if not cost.striped:
            return crossings_of_samples(routing.share, topology.visited, push=0.0, across_nodes=True)
        off = striped_copies_off_rank(replay, topology, copied=topology.slots - topology.home_slots)
        return off / min(replay.expert_ids.shape[-1], topology.slots)
    # A token crosses to the rank of the same local index in the other node, which sends its copies to the others.
    ranks = topology.num_nodes if cost.hierarchical else 1
    if cost.striped:
        copied = ranks * (topology.slots - topology.home_slots)
        return striped_copies_off_rank(replay, topology, copied=copied)
    return copies_off_rank(routing.load, ranks * topology.slots)
