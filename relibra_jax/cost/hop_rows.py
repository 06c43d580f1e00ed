"""The rows that the hops of a layer move on a rank, if load is even and routing is uniform over the experts.

`relibra_jax.cost.traffic.count_sent` counts what ranks send under a plan. Here a rank stands for all, and the rows that
gathers read and write are counted too.
"""

import math
from dataclasses import dataclass
from typing import Any

from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.routing.exchange_rules import between_nodes
from relibra_jax.routing.sizes import round_capacity, with_spare_room


@dataclass(frozen=True, kw_only=True)
class HopRows:
    """The rows of one hop of dispatch on a rank. Combine moves them back."""

    name: str
    """The ranks that exchange rows: ``between nodes``, ``inside nodes``, or empty for all; ``on the rank`` for the
    gathers of a rank alone."""
    kind: str
    """The kind of exchange."""
    ranks: int
    """The number of ranks that exchange rows."""
    across: float
    """The rows that a rank sends to other nodes."""
    inside: float
    """The rows that a rank sends to other ranks of its node."""
    leaving: float
    """The rows of the send buffer that hold a token. Only ragged exchanges send kept rows as well."""
    buffer: float
    """The rows of the send buffer, lanes as long as they are sent."""
    arriving: float
    """The rows that arrive at a rank or stay there."""
    delivered: float
    """The rows of the buffer in which they are delivered."""
    elements: float
    """The rows of the buffer of elements that are sent, and to which combine sums."""
    gates: int
    """The gates that travel with a row."""


def even_hops(run: CostModel, topology: Topology, tokens: int) -> tuple[HopRows, ...]:
    """Count the rows of the hops of dispatch: one for flat dispatch, two for hierarchical dispatch.

    Between nodes, layers with a ragged exchange have a fitted one (`relibra_jax.execution.parallel`). On a single node,
    hierarchical dispatch sends tokens to ranks, and each rank then gathers its own copies in a second hop.

    Args:
        run: the cost model, without ``auto``, as `CostModel.on` returns it.
        topology: the expert-parallel group.
        tokens: t, the number of tokens of a rank.
    """
    single = topology.num_nodes == 1
    if run.path == "hierarchical":
        topology = topology.visited
    nodes, local, ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks
    copies = float(tokens * run.model.top_k)
    slots = room(copies, run)
    if run.path == "flat":
        return (
            HopRows(
                name="",
                **_sent(run, run.exchange, copies / ranks, ranks, across=ranks - local),
                arriving=copies,
                delivered=slots,
                elements=float(tokens),
                gates=1,
            ),
        )
    visits = tokens * visit_share(topology, run.model.top_k)
    arrived = room(nodes * visits, run)
    return (
        HopRows(
            name="" if single else "between nodes",
            **_sent(run, between_nodes(run.exchange), visits, nodes, across=0 if single else nodes - 1),
            arriving=nodes * visits,
            delivered=arrived,
            elements=float(tokens),
            gates=run.model.top_k,
        ),
        HopRows(
            name="on the rank" if single else "inside nodes",
            **_sent(run, "ragged" if local == 1 else run.exchange, copies / local, local, across=0),
            arriving=copies,
            delivered=slots,
            elements=arrived,
            gates=1,
        ),
    )


def _sent(run: CostModel, kind: str, part: float, ranks: int, *, across: int) -> dict[str, Any]:
    """Return the fields of a hop that say what a rank sends, if it has ``part`` rows for each of ``ranks`` ranks.

    ``across`` of them are on other nodes.
    """
    ragged = kind == "ragged"
    # The lengths of a fitted exchange are fitted to lanes that are all equally long.
    lane = room(part, run) if kind == "padded" else part
    return {
        "kind": kind,
        "ranks": ranks,
        "across": across * lane,
        "inside": (ranks - 1 - across) * lane,
        "leaving": part * (ranks if ragged else ranks - 1),
        "buffer": room(part * ranks, run) if ragged else ranks * lane,
    }


def room(rows: float, run: CostModel) -> float:
    """Return the rows of a buffer that holds ``rows`` rows, as `relibra_jax.routing.sizes.padded_rows` does."""
    size = round_capacity(math.ceil(rows))
    return float(with_spare_room(size) if run.spare_room else size)


def visit_share(topology: Topology, top_k: int, *, of_ranks: bool = False) -> float:
    """Return the share of tokens that visit a node under uniform routing.

    Args:
        topology: the expert-parallel group.
        top_k: K, the number of experts of a token, which are different.
        of_ranks: True for the share that visits a rank.

    >>> topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    >>> round(visit_share(topology, 2), 4), round(visit_share(topology, 2, of_ranks=True), 4)
    (0.7857, 0.4643)
    """
    experts = topology.num_experts
    own = experts // (topology.num_ranks if of_ranks else topology.num_nodes)
    return 1 - math.comb(experts - own, top_k) / math.comb(experts, top_k)
