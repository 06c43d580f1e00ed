"""Lower bounds of what a row of an exchange costs as it is sent; they add up to the exchanges' part of a bound of time.

Exchanges send lanes that are all as long as the longest, and a batch has buffers for the fullest of its layers and
micro-batches. A maximum is at least the mean, so a sum of rows over lanes, ranks, layers and micro-batches has a least
price for each row (`relibra_jax.cost.traffic` counts what is sent):

    crossing  its part of a lane between nodes, and the gather that packs it into the send buffer
    inside    the same for a lane inside a node
    arrival   the gathers of a token that arrives in a node, and its row of a buffer with spare room, which is not
              needed before a ragged exchange
    slot      the gathers of a token copy, and its row of the buffer of the experts' slots

Layers in pieces run the exchange of one piece beside the experts of another. Their time is a convex function of the
times of hops and experts that grows in proportion with them (`relibra_jax.cost.step_time.exposed_exchange`). So it is
at least the sum of these times, each multiplied by a slope of the function, wherever the slopes are taken.
"""

import dataclasses
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

from relibra_jax.contract.types import Price, Topology
from relibra_jax.cost.step_time import exposed_exchange, kind_between

SPARE_ROOM: Final = 1.25
"""The least size of a buffer with spare room, as a multiple of the rows that it needs."""
PIECES_LANE: Final = 9 / 11
"""The least length of a lane of layers in pieces, as a multiple of its rows. A lane has at least 9/16 of the 8 rows of
the smallest buffer, and what is rounded down is less than one row."""


class RowPrices(NamedTuple):
    """Seconds of a rank for one row, in all passes of a batch."""

    crossing: float
    """A row between nodes. Under flat dispatch, with what the same exchange takes inside nodes."""
    inside: float
    """A row that leaves its rank inside a node. Under flat dispatch, a row that leaves its rank, if crossings take
    less. On a single node, a token for each other rank that it visits."""
    buffer: float
    """A row that leaves its rank and is packed, under flat dispatch with lanes; else 0."""
    arrival: float
    """A token that visits a node, under hierarchical dispatch; else 0."""
    slot: float
    """A token copy that an expert computes."""


def row_prices(cost: Price, topology: Topology) -> RowPrices:
    """Compute the least price of every kind of row.

    Args:
        cost: the price, of layers in one piece or from `linear_price`.
        topology: the expert-parallel group.

    >>> price = Price(token=0.0, copy=0.0, crossing=4.0, spread=1.0, move=0.0, push=0.0, gather=0.1)
    >>> row_prices(price, Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=0)).slot
    0.1625
    """
    if cost.hierarchical and topology.num_nodes == 1 < topology.num_ranks:
        as_nodes = row_prices(dataclasses.replace(cost, crossing=cost.visit(topology)), topology.visited)
        return as_nodes._replace(crossing=0.0, inside=as_nodes.crossing)
    crossing, spread, gather = (float(part) for part in (cost.crossing, cost.spread, cost.gather))
    nodes, local, ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks
    room = SPARE_ROOM if cost.spare_room else 1.0
    lanes = {"padded": room, "fitted": 1.0 if cost.pieces == 1 else PIECES_LANE}
    slot = gather * (1 + room / 2)
    if cost.hierarchical:
        hops = ((kind_between(cost), crossing, nodes), (cost.exchange, spread, local))
        ragged = cost.exchange == "ragged" or local == 1  # tokens that arrive are gathered once
        across, within = (
            lanes[kind] * price + gather * ((not ragged) + parts / max(parts - 1, 1) * lanes[kind])
            if kind in lanes
            else price
            for kind, price, parts in hops
        )
        return RowPrices(across, within, 0.0, gather if ragged else gather * (1 + room), slot)
    if cost.exchange in lanes:
        lane = lanes[cost.exchange]
        away = max(crossing * (ranks - local), spread * (local - 1)) + ranks * gather
        return RowPrices(
            lane * away / max(ranks - local, 1), lane * away / max(ranks - 1, 1), gather, 0.0, slot
        )
    if nodes > 1 and spread:
        # What leaves a rank is divided between the networks so that both take equally long.
        spread *= crossing / (crossing + spread)
    return RowPrices(crossing, spread, 0.0, 0.0, slot)


def linear_price(cost: Price, topology: Topology, *, crossings: float, copies: float) -> Price:
    """Return prices of hops and experts that add up to no more than their time in pieces takes.

    Args:
        cost: the price.
        topology: the expert-parallel group.
        crossings: an estimate of the rows between nodes, at which the slopes are taken.
        copies: the number of token copies.
    """
    if cost.pieces == 1:
        return cost

    def seconds(between: jax.Array, inside: jax.Array, compute: jax.Array) -> jax.Array:
        return exposed_exchange(between, inside, compute, cost) + compute

    two_hops = cost.hierarchical and topology.num_nodes > 1
    spread = float(cost.spread) * copies * two_hops
    point = (float(cost.visit(topology)) * crossings, spread, float(cost.copy) * copies)
    slopes = jax.grad(seconds, (0, 1, 2))(*map(jnp.float32, point))
    crossing, spread, copy = (
        float(slope) * float(price)
        for slope, price in zip(slopes, (cost.crossing, cost.spread, cost.copy), strict=True)
    )
    if not two_hops:  # one exchange over both networks
        spread = float(slopes[0]) * float(cost.spread)
    return dataclasses.replace(cost, crossing=crossing, spread=spread, copy=copy)


def waits(cost: Price, topology: Topology) -> float:
    """Return the seconds of a layer in one micro-batch that do not depend on rows.

    Args:
        cost: the price.
        topology: the expert-parallel group.
    """
    hops = [(kind_between(cost), topology.num_nodes), (cost.exchange, topology.ranks_per_node)]
    if not cost.hierarchical:
        hops = [(cost.exchange, topology.num_ranks)]
    kinds = [kind for kind, ranks in hops if ranks > 1]
    striped, choices = float(cost.wait) * cost.striped, kinds.count("fitted")
    if cost.pieces > 1:
        return striped + float(cost.choice) / 2 * (choices > 0)
    return striped + len(kinds) * float(cost.wait) + choices * float(cost.choice)
