"""Dispatch and combine: token copies to their slots, and results back, weighted by their gates.

*Flat* dispatch is one exchange between all ranks. In *hierarchical* dispatch a token crosses to a node once, however
many of its experts are there: it goes to the rank with the same local index, and its copies then spread inside the
node. On the way back each node sums its results before they cross. The gates travel with the copies, so that the sum is
weighted. If the exchange inside nodes is ragged, tokens that arrive are gathered once, from where they arrive to where
they are sent on, and results are summed where they are sent back.

On a single node, hierarchical dispatch treats every rank as a node (`relibra_jax.contract.types.Topology.visited`): a
token goes once to every rank, however many of its experts are there, and is gathered into their slots on arrival.

Tables say where each row goes. `make_dispatch` and `make_node_dispatch` compute them once per batch, so that layers
only gather and send. Token copies and slots are both sorted by expert (`relibra_jax.routing.slots`): the first
``sent[slot]`` copies of an expert go to its first slot, and so on. One argsort places every copy of a rank. Receivers
do not sort, because the counts alone determine the rows of their buffers.

Everything here runs on one rank, inside shard_map.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.exchange import Exchange
from relibra_jax.execution.gather import inverse_index
from relibra_jax.execution.hop import Hop, Route, Sums, collect, deliver, give_back, make_hop, pack
from relibra_jax.execution.nccl_ep import SlotDispatch, return_from_slots, send_to_slots, with_routing
from relibra_jax.routing.segments import segment_rows, starts
from relibra_jax.routing.slots import line_up


class Dispatch(NamedTuple):
    """The tables that send a rank's token copies to their slots; combine uses them in reverse. All int32."""

    copy: Int[jax.Array, "*stack send"]
    """The token copy in each row of the send buffer, numbered ``token * K + k``; EMPTY for none."""
    place: Int[jax.Array, "*stack t K"] | None
    """The row of each copy in the send buffer; EMPTY for no copy. None where nothing leaves a rank (`_inside`)."""
    hop: Hop
    """The tables of the exchange. It delivers the computed rows, grouped by slot."""
    group_sizes: Int[jax.Array, "*stack S"]
    """The number of rows of each slot."""


class NodeDispatch(NamedTuple):
    """The tables of hierarchical dispatch: each token goes to every node that serves it, then its copies spread."""

    token: Int[jax.Array, "*stack send"]
    """The token in each row that crosses; EMPTY for none."""
    place: Int[jax.Array, "*stack t c"]
    """The rows of each token in the send buffer, one for each node that it visits, at most one for each of its K
    experts; EMPTY for none."""
    hop: Hop
    """The tables of the exchange with the ranks of the same local index in each node. It delivers the tokens for this
    node, grouped by the node that they come from."""
    inside: Dispatch
    """The tables for the copies of arrived tokens inside the node."""


type Tables = Dispatch | NodeDispatch | SlotDispatch
"""The tables of one piece of a rank's tokens, flat, hierarchical or for NCCL EP."""


class Travelling(NamedTuple):
    """The values that travel through a layer: of the tokens of a rank, or of the rows that it computes.

    Values that do not travel are None.
    """

    token: Float[jax.Array, "t *D"] | None
    """The values of each token; in rows, of the token of each row."""
    copy: Num[jax.Array, "t K"] | Num[jax.Array, " rows"] | None
    """A value for each token copy; in rows, for each row."""


def pack_tokens(
    values: Travelling, dispatch: Tables, exchanges: tuple[Exchange, ...]
) -> tuple[jax.Array, ...] | None:
    """Gather what the first hop of `send_tokens` will send, as `relibra_jax.execution.hop.pack` does."""
    if isinstance(dispatch, SlotDispatch):
        return None
    if isinstance(dispatch, Dispatch):
        values = _flat(values)
    return pack(exchanges[0], *_given(values, _routes(dispatch)))


def send_tokens(
    values: Travelling,
    dispatch: Tables,
    exchanges: tuple[Exchange, ...],
    packed: tuple[jax.Array, ...] | None = None,
) -> Travelling:
    """Send the values of tokens to experts, and return those of every row that this rank computes, by slot.

    Args:
        values: the values of this rank's tokens.
        dispatch: the tables.
        exchanges: the exchange of each hop.
        packed: what `pack_tokens` returned; None to pack them here.
    """
    if isinstance(dispatch, SlotDispatch):
        assert values.token is not None, "NCCL EP sends tokens"
        return Travelling(*send_to_slots(values.token, values.copy, dispatch, exchanges[0].sizes.receive))
    if isinstance(dispatch, NodeDispatch):
        first, hop = functools.partial(deliver, packed=packed), dispatch.hop
        inside = _inside(dispatch, exchanges)
        if exchanges[-1].has_lanes:
            values, packed = _hop(first, exchanges[0], values, _routes(dispatch), hop), None
        else:
            assert hop.arrival is not None, "exchanges between nodes have lanes"
            hop = hop._replace(arrival=_at(hop.arrival, _routes(inside)[0].source))
            values = _each_copy(_hop(first, exchanges[0], values, _routes(dispatch), hop), inside)
            packed = tuple(value for value in values if value is not None)
        dispatch = inside
    last = functools.partial(deliver, packed=packed)
    return _hop(last, exchanges[-1], _flat(values), _routes(dispatch), dispatch.hop)


def return_tokens(rows: Travelling, dispatch: Tables, exchanges: tuple[Exchange, ...]) -> Travelling:
    """Send rows back to the ranks of their tokens, and sum those of each token: the reverse of `send_tokens`.

    It is the transpose of `send_tokens` too.

    Args:
        rows: the values of the rows that this rank computes.
        dispatch: the tables.
        exchanges: the exchange of each hop.
    """
    if isinstance(dispatch, SlotDispatch):
        assert rows.token is not None, "NCCL EP sends tokens"
        return Travelling(*return_from_slots(rows.token, rows.copy, dispatch))
    if isinstance(dispatch, Dispatch):
        return _back(rows, dispatch, exchanges[0])
    inside, exchange = _inside(dispatch, exchanges), exchanges[1]
    if exchange.has_lanes or rows.token is None:
        values: tuple[jax.Array | Sums | None, ...] = _back(rows, inside, exchange)
    else:
        assert inside.place is not None
        sums = Sums(give_back(rows.token, inside.hop, exchange), inside.place)
        values = sums, _back(rows._replace(token=None), inside, exchange).copy
    return _hop(collect, exchanges[0], values, _routes(dispatch), dispatch.hop)


def group_sizes(dispatch: Tables) -> Int[jax.Array, " S"]:
    """Return the number of rows of each slot."""
    return dispatch.inside.group_sizes if isinstance(dispatch, NodeDispatch) else dispatch.group_sizes


def open_tables(values: Travelling, dispatch: Tables, exchanges: tuple[Exchange, ...]) -> Tables:
    """Return the tables with which the values travel to experts and their results back.

    Args:
        values: the values of this rank's tokens.
        dispatch: the tables of their piece.
        exchanges: the exchange of each hop.
    """
    if isinstance(dispatch, SlotDispatch):
        assert values.token is not None, "NCCL EP sends tokens"
        return with_routing(dispatch, values.token, exchanges[0].sizes.receive)
    return dispatch


def _back(rows: Travelling, dispatch: Dispatch, exchange: Exchange) -> Travelling:
    """Return rows through the last hop, and sum those of each token."""
    values = _hop(collect, exchange, rows, _routes(dispatch), dispatch.hop)
    assert dispatch.place is not None
    return values if values.copy is None else values._replace(copy=values.copy.reshape(dispatch.place.shape))


def _inside(dispatch: NodeDispatch, exchanges: tuple[Exchange, ...]) -> Dispatch:
    """Return the tables inside a node.

    Where nothing leaves a rank, the rows of the copies of each token that arrives are computed in layers. They would be
    most of the memory of prepared tables, because few of a token's copies are on one rank.
    """
    (between, here), inside = exchanges, dispatch.inside
    if inside.place is not None:
        return inside
    tokens, copies = between.sizes.receive, here.copies
    return inside._replace(place=inverse_index(inside.copy, tokens * copies).reshape(tokens, copies))


def _at(values: Int[jax.Array, " r"], index: Int[jax.Array, " n"]) -> jax.Array:
    """Return the values at an index; EMPTY where it is EMPTY."""
    return jnp.where(index == EMPTY, EMPTY, values[index])


def _each_copy(rows: Travelling, dispatch: Dispatch) -> Travelling:
    """Keep the value of each row's own copy, from rows that have the values of all copies of their token."""
    if rows.copy is None:
        return rows
    number = jnp.maximum(dispatch.copy, 0) % rows.copy.shape[1]
    return rows._replace(copy=jnp.take_along_axis(rows.copy, number[:, None], 1)[:, 0])


def _hop(
    way: Callable[..., Any],
    exchange: Exchange,
    values: tuple[jax.Array | Sums | None, ...],
    routes: tuple[Route, Route],
    hop: Hop,
) -> Travelling:
    """Run one hop of the values that travel."""
    moved = iter(way(exchange, *_given(values, routes), hop))
    return Travelling(*(None if value is None else next(moved) for value in values))


def _given[T](
    values: tuple[T | None, ...], routes: tuple[Route, Route]
) -> tuple[tuple[T, ...], tuple[Route, ...]]:
    """Return the values that travel and their routes."""
    given = [(value, route) for value, route in zip(values, routes, strict=True) if value is not None]
    return tuple(value for value, _ in given), tuple(route for _, route in given)


def _flat(values: Travelling) -> Travelling:
    """Return values with one entry for each copy."""
    return values if values.copy is None else values._replace(copy=values.copy.ravel())


def make_dispatch(
    key: Int[jax.Array, "t K"],
    slot_key: Int[jax.Array, "P S"],
    sent: Int[jax.Array, "P P S"],
    exchange: Exchange,
    *,
    rows: int,
) -> tuple[Dispatch, Bool[jax.Array, ""]]:
    """Compute the tables that send each token copy in one exchange to the slots with its key.

    Args:
        key: the key of each token copy, its expert or its slot; EMPTY for no copy.
        slot_key: the key of each slot of all ranks; EMPTY for none.
        sent: the number of copies from each rank to each slot, equal on all ranks. On this rank, the numbers of the
            slots with one key add up to the copies with this key.
        exchange: the exchange between the P ranks.
        rows: the number of rows that a rank computes.

    Returns:
        The tables, and whether the buffers are large enough. If they are not, the tables are meaningless.
    """
    rank = jax.lax.axis_index(exchange.axes)
    hop, slot_start = make_hop(sent, exchange, rows)
    copy = _copies_in_lanes(key, slot_key, sent[rank], slot_start, exchange)
    tables = Dispatch(
        copy=copy,
        place=inverse_index(copy, key.size).reshape(key.shape),
        hop=hop,
        group_sizes=sent[:, rank].sum(0, dtype=sent.dtype),
    )
    return tables, _fits(exchange, sent.sum(-1, dtype=sent.dtype), rows)


def make_node_dispatch(
    slot: Int[jax.Array, "t K"],
    sent: Int[jax.Array, "N G N G S"],
    between: Exchange,
    inside: Exchange,
    *,
    rows: int,
) -> tuple[NodeDispatch, Bool[jax.Array, ""]]:
    """Compute the tables of hierarchical dispatch, with one exchange between nodes and one inside them.

    Args:
        slot: the flat slot that serves each copy (`relibra_jax.routing.slots.copy_slots`); EMPTY for no copy.
        sent: the number of copies from each rank to each slot, equal on all ranks.
        between: the exchange between the ranks with one local index in all nodes.
        inside: the exchange inside a node.
        rows: the number of rows that a rank computes.

    Returns:
        The tables, and whether the buffers are large enough, as for `make_dispatch`.
    """
    nodes, local, slots = sent.shape[2:]
    node, top_k = jax.lax.axis_index(between.axes), slot.shape[1]
    served = slot[:, None] // (local * slots) == jnp.arange(nodes, dtype=jnp.int32)[None, :, None]
    served &= (slot != EMPTY)[:, None]
    visit = served.any(-1)
    counts = jax.lax.all_gather(visit.sum(0, dtype=jnp.int32), between.axes)
    hop, start = make_hop(counts[..., None], between, between.sizes.receive)
    place = jnp.where(visit, start.T + starts(visit.astype(jnp.int32), 0), EMPTY)
    # The slot of each copy inside its node.
    inner = jnp.where(served, slot[:, None] % (local * slots), EMPTY)
    if nodes > top_k:  # a token visits no more nodes than it has experts
        order = jnp.argsort(~visit, axis=1, stable=True)[:, :top_k]
        place, inner = (
            jnp.take_along_axis(each, index, axis=1)
            for each, index in ((place, order), (inner, order[..., None]))
        )
    source, inner = inverse_index(place.ravel(), between.send_rows), inner.reshape(-1, top_k)
    # Whole lanes are cheaper than a choice by the host, and layers can be prepared together.
    whole = replace(between, kind="padded") if between.kind == "fitted" else between
    (arrived,) = deliver(whole, (inner,), (Route(source, place.reshape(-1, 1)),), hop)
    row = jnp.arange(between.sizes.receive, dtype=jnp.int32)[:, None]
    arrived = jnp.where(row < counts[:, node].sum(), arrived, EMPTY)
    spread, fits = make_dispatch(
        arrived,
        jnp.arange(local * slots, dtype=jnp.int32).reshape(local, slots),
        sent[:, :, node].sum(0, dtype=sent.dtype),
        inside,
        rows=rows,
    )
    if inside.ranks == 1:
        spread = spread._replace(place=None)
    token = jnp.where(source == EMPTY, EMPTY, source // place.shape[1])
    # If a buffer overflows on any node, rows from all nodes are affected, so the check covers every node.
    fits &= jax.vmap(lambda counts: _fits(inside, counts, rows), 1)(sent.sum((0, -1), dtype=sent.dtype)).all()
    return NodeDispatch(token, place, hop, spread), fits & between.fits(counts)


def _routes(tables: Dispatch | NodeDispatch) -> tuple[Route, Route]:
    """Return the routes of tokens and copies in the first hop of the tables.

    Between nodes the copies of a token go with it. In the last hop a token takes as many rows as it has copies.
    """
    if isinstance(tables, NodeDispatch):
        route = Route(tables.token, tables.place)
        return route, route
    assert tables.place is not None
    token = jnp.where(tables.copy == EMPTY, EMPTY, tables.copy // tables.place.shape[1])
    return Route(token, tables.place), Route(tables.copy, tables.place.reshape(-1, 1))


def _fits(exchange: Exchange, counts, rows: int):
    return exchange.fits(counts) & (counts.sum(0).max() <= rows)


def _copies_in_lanes(key, slot_key, sent, slot_start, exchange: Exchange):
    """Return the token copy in each row of the send buffer."""
    order, slots, begin = line_up(key, slot_key, sent)
    first = jnp.zeros_like(begin).at[slots].set(begin, unique_indices=True).reshape(sent.shape)
    # Segments must ascend. They are ordered by lane and not by start, because an empty segment may share the start of a
    # segment in another lane.
    lanes = exchange.lane_order()
    rank = segment_rows(exchange.send_rows, *(array[lanes].ravel() for array in (slot_start, sent, first)))
    return jnp.where(rank == EMPTY, EMPTY, order[rank].astype(jnp.int32))
