"""One hop of tokens between ranks, and its reverse: rows are gathered, sent, and gathered again where they are needed.

`deliver` copies elements, such as the tokens of a rank, to the rows in which other ranks need them. `collect` brings
such rows back and sums those of each element. Each is the transpose of the other, so gradients need no scatter and have
a fixed order of sums.

A hop builds no more than the rows that it sends and receives. Where buffers have lanes, rows that a rank keeps are read
where they are, and a fitted exchange has a branch for each length of its lanes, in which all buffers have that length.
A ragged exchange puts rows where they are needed, so nothing gathers them after it. Where it follows another hop, that
hop delivers rows as the ragged one sends them, and takes back sums that are added up where they are sent. One gather
then does the work of two (`relibra_jax.execution.dispatch`). With one rank, it sends nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.exchange import Exchange, Lanes, send, send_back, swap_lanes, updates
from relibra_jax.execution.gather import inverse_index, sum_picked, take_rows
from relibra_jax.routing.segments import segment_rows, starts


class Route(NamedTuple):
    """The way of the elements of one array in a hop.

    The rows of the send and receive buffers are places in whole lanes, with the kept rows after them. Where exchanges
    have lanes, no such buffer is built.
    """

    source: Int[jax.Array, "*stack send"]
    """The element in each row of the send buffer; EMPTY for none."""
    places: Int[jax.Array, "*stack t c"]
    """The rows of the send buffer that have each element, the inverse of ``source``; EMPTY for none."""


class Sums(NamedTuple):
    """Rows that are sums of other rows, and are added up where they are read."""

    rows: jax.Array
    """The rows that are added, ``[r, ...]``."""
    places: Int[jax.Array, "t c"]
    """The rows whose sum each row is; EMPTY for none."""

    def take(self, index: Int[jax.Array, " n"]) -> jax.Array:
        """Return the sums at ``index``, ``[n, ...]``; zero where it is EMPTY."""
        places = jnp.where((index == EMPTY)[:, None], EMPTY, self.places[index])
        return sum_picked(functools.partial(take_rows, self.rows), places)


class Hop(NamedTuple):
    """The tables of a hop on one rank."""

    lanes: Lanes
    """The rows for and from each rank."""
    arrival: Int[jax.Array, "*stack rows"] | None
    """The row of the receive buffer that each delivered row copies; EMPTY for none. None if rows are delivered where
    they are received, by ragged exchanges."""
    delivered: Int[jax.Array, "*stack receive"] | None
    """The delivered row of each row of the receive buffer, the inverse of ``arrival``; EMPTY for none."""


def make_hop(
    counts: Int[jax.Array, "P P S"], exchange: Exchange, rows: int
) -> tuple[Hop, Int[jax.Array, "P S"]]:
    """Compute the tables of a hop that delivers rows in the order of slots, then of the ranks that sent them.

    Args:
        counts: the rows that each rank sends to each slot of each rank, equal on all ranks.
        exchange: the exchange between the P ranks.
        rows: the number of delivered rows, the same as received rows for a ragged exchange.

    Returns:
        The tables, and the first row for each slot of each rank in this rank's send buffer.
    """
    if not exchange.has_lanes:
        # XLA's kernels check no bounds: rows that do not fit would be written over other memory of their rank.
        runs = exchange.runs(jnp.where(exchange.fits(counts.sum(-1, dtype=counts.dtype)), counts, 0))
        return Hop(updates(runs), None, None), runs.send_start
    rank = jax.lax.axis_index(exchange.axes)
    lanes = exchange.lanes(counts.sum(-1, dtype=counts.dtype))
    received = counts[:, rank]
    first = lanes.receive_start[:, None] + starts(received)
    # Received rows are ordered by rank, then slot; delivered rows by slot, then rank.
    by_slot = received.T.ravel()
    arrival = segment_rows(rows, starts(by_slot), by_slot, first.T.ravel())
    hop = Hop(lanes, arrival, inverse_index(arrival, exchange.receive_rows))
    return hop, lanes.send_start[:, None] + starts(counts[rank])


def deliver(
    exchange: Exchange,
    elements: tuple[jax.Array, ...],
    routes: tuple[Route, ...],
    hop: Hop,
    packed: tuple[jax.Array, ...] | None = None,
) -> tuple[jax.Array, ...]:
    """Copy the elements of this rank to the rows of other ranks, with one choice of a length for all arrays.

    Args:
        exchange: the ranks, the kind and the buffer sizes of the exchange.
        elements: arrays ``[t, ...]``.
        routes: the route of each array.
        hop: the tables of this rank.
        packed: what is sent of each array, as `pack` returns it; None to pack them here.

    Returns:
        The delivered rows of each array, ``[rows, ...]``. After them are rows without meaning, which may be NaN.
    """
    return _run(exchange, _deliver, hop, elements, routes, packed or (None,) * len(elements))


def collect(
    exchange: Exchange, rows: tuple[jax.Array | Sums, ...], routes: tuple[Route, ...], hop: Hop
) -> tuple[jax.Array, ...]:
    """Bring delivered rows back, and sum the rows of each element in float32 or wider: the reverse of `deliver`.

    Args:
        exchange: the ranks, the kind and the buffer sizes of the exchange.
        rows: arrays ``[rows, ...]``, or sums to add up first, if the exchange has lanes.
        routes: the route of each array.
        hop: the tables of this rank.

    Returns:
        The sums for each array, ``[t, ...]``, in its dtype.
    """
    return _run(exchange, _collect, hop, rows, routes)


def pack(
    exchange: Exchange, elements: tuple[jax.Array, ...], routes: tuple[Route, ...]
) -> tuple[jax.Array, ...] | None:
    """Gather what `deliver` will send, so that it can be sent at any time.

    None if the length of lanes is not chosen yet, or there are no lanes.

    Args:
        exchange: the ranks, the kind and the buffer sizes of the exchange.
        elements: arrays ``[t, ...]``.
        routes: the route of each array.
    """
    length = exchange.chosen_length
    if exchange.ranks == 1 or length is None:
        return None
    return tuple(
        take_rows(each, _in_lanes(exchange, length, route.source))
        for each, route in zip(elements, routes, strict=True)
    )


def give_back(rows: jax.Array, hop: Hop, exchange: Exchange) -> jax.Array:
    """Return the rows of a ragged exchange to the ranks that sent them, ``[send_rows, ...]``."""
    return rows if exchange.ranks == 1 else send_back(rows, hop.lanes, exchange)


def _run(exchange: Exchange, way: Callable[..., Any], hop: Hop, *arrays: tuple[Any, ...]):
    def with_length(length: int, hop: Hop, *arrays: tuple[Any, ...]):
        return tuple(way(exchange, length, hop, *each) for each in zip(*arrays, strict=True))

    if exchange.ranks == 1:
        return with_length(0, hop, *arrays)
    if exchange.kind == "fitted" and exchange.chosen_length is None:
        # On a GPU, the host waits for each choice: all arrays share one.
        ways = [functools.partial(with_length, length) for length in exchange.lengths]
        return jax.lax.switch(hop.lanes.length, ways, hop, *arrays)
    return with_length(exchange.chosen_length or 0, hop, *arrays)


def _deliver(exchange: Exchange, length: int, hop: Hop, elements, route: Route, packed):
    if not exchange.has_lanes:
        rows = take_rows(elements, route.source) if packed is None else packed
        return rows if exchange.ranks == 1 else send(rows, hop.lanes, exchange)
    if packed is None:
        packed = take_rows(elements, _in_lanes(exchange, length, route.source))
    received = swap_lanes(packed, exchange.axes, exchange.ranks, length)
    return _pick(exchange, length, received, hop.arrival, elements, _kept(exchange, route.source))


def _collect(exchange: Exchange, length: int, hop: Hop, rows, route: Route):
    if not exchange.has_lanes:
        returned = give_back(rows, hop, exchange)
        return sum_picked(functools.partial(take_rows, returned), route.places)
    assert hop.delivered is not None, "exchanges with lanes gather what they deliver"
    leaving, kept = _in_lanes(exchange, length, hop.delivered), _kept(exchange, hop.delivered)
    if isinstance(rows, Sums):
        packed, rows = rows.take(leaving), rows.take(kept)
        kept = jnp.arange(len(kept), dtype=jnp.int32)
    else:
        packed = take_rows(rows, leaving)
    returned = swap_lanes(packed, exchange.axes, exchange.ranks, length)
    return sum_picked(lambda place: _pick(exchange, length, returned, place, rows, kept), route.places)


def _in_lanes(exchange: Exchange, length: int, source):
    """Return what ``source`` has for the first ``length`` rows of every lane."""
    pair = exchange.sizes.pair
    return source[: exchange.ranks * pair].reshape(exchange.ranks, pair)[:, :length].ravel()


def _kept(exchange: Exchange, source):
    """Return what ``source`` has for the rows that this rank keeps, which are after the lanes."""
    return source[exchange.ranks * exchange.sizes.pair :]


def _pick(exchange: Exchange, length: int, received, place, rows, kept):
    """Gather the rows at ``place`` in a buffer whose lanes are ``received``; the ``kept`` ones of ``rows`` follow."""
    pair, kept_start = exchange.sizes.pair, exchange.ranks * exchange.sizes.pair
    kept = take_rows(rows, jnp.where(place >= kept_start, kept[place - kept_start], EMPTY))
    if not length:
        return kept
    in_lane = (place != EMPTY) & (place < kept_start)
    row = jnp.where(in_lane, place // pair * length + place % pair, EMPTY)
    return jnp.where(in_lane.reshape(-1, *[1] * (rows.ndim - 1)), take_rows(received, row), kept)
