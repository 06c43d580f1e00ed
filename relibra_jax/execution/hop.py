"""One hop of tokens between ranks, and its reverse: rows are gathered, sent, and gathered again where they are needed.

`deliver` copies elements, such as the tokens of a rank, to the rows in which other ranks need them. `collect` brings
such rows back and sums those of each element. Each is the transpose of the other, so gradients need no scatter and have
a fixed order of sums.

A hop builds no more than the rows that it sends and receives. Where buffers have lanes, rows that a rank keeps are read
where they are, and a fitted exchange has a branch for each length of its lanes, in which all buffers have that length.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.exchange import Exchange, Lanes, send, send_back, swap_lanes
from relibra_jax.execution.gather import sum_picked, take_rows


class Route(NamedTuple):
    """The way of the elements of one array in a hop.

    The rows of the send and receive buffers are places in whole lanes, with the kept rows after them. Where exchanges
    have lanes, no such buffer is built.
    """

    source: Int[jax.Array, "*stack send"]
    """The element in each row of the send buffer; EMPTY for none."""
    places: Int[jax.Array, "*stack t c"]
    """The rows of the send buffer that have each element, the inverse of ``source``; EMPTY for none."""


class Hop(NamedTuple):
    """The tables of a hop on one rank."""

    lanes: Lanes
    """The rows for and from each rank."""
    arrival: Int[jax.Array, "*stack rows"]
    """The row of the receive buffer that each delivered row copies; EMPTY for none."""
    delivered: Int[jax.Array, "*stack receive"]
    """The delivered row of each row of the receive buffer, the inverse of ``arrival``; EMPTY for none."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def deliver(
    exchange: Exchange, elements: tuple[jax.Array, ...], routes: tuple[Route, ...], hop: Hop
) -> tuple[jax.Array, ...]:
    """Copy the elements of this rank to the rows of other ranks, with one choice of a length for all arrays.

    Args:
        exchange: the ranks, the kind and the buffer sizes of the exchange.
        elements: arrays ``[t, ...]``.
        routes: the route of each array.
        hop: the tables of this rank.

    Returns:
        The delivered rows of each array, ``[rows, ...]``; zero for no row.
    """
    return _run(exchange, _deliver, hop, elements, routes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collect(
    exchange: Exchange, rows: tuple[jax.Array, ...], routes: tuple[Route, ...], hop: Hop
) -> tuple[jax.Array, ...]:
    """Bring delivered rows back, and sum the rows of each element in float32 or wider: the reverse of `deliver`.

    Args:
        exchange: the ranks, the kind and the buffer sizes of the exchange.
        rows: arrays ``[rows, ...]``.
        routes: the route of each array.
        hop: the tables of this rank.

    Returns:
        The sums for each array, ``[t, ...]``, in its dtype.
    """
    return _run(exchange, _collect, hop, rows, routes)


deliver.defvjp(
    lambda exchange, elements, *tables: (deliver(exchange, elements, *tables), tables),
    lambda exchange, tables, cotangents: (collect(exchange, cotangents, *tables), None, None),
)
collect.defvjp(
    lambda exchange, rows, *tables: (collect(exchange, rows, *tables), tables),
    lambda exchange, tables, cotangents: (deliver(exchange, cotangents, *tables), None, None),
)


def _run(exchange: Exchange, way: Callable[..., Any], hop: Hop, arrays, routes):
    def with_length(length: int, arrays, routes, hop: Hop):
        return tuple(way(exchange, length, *each, hop) for each in zip(arrays, routes, strict=True))

    if exchange.ranks == 1:
        return with_length(0, arrays, routes, hop)
    if exchange.kind == "fitted" and exchange.chosen_length is None:
        # On a GPU, the host waits for each choice: all arrays share one.
        ways = [functools.partial(with_length, length) for length in exchange.lengths]
        return jax.lax.switch(hop.lanes.length, ways, arrays, routes, hop)
    return with_length(exchange.chosen_length or 0, arrays, routes, hop)


def _deliver(exchange: Exchange, length: int, elements, route: Route, hop: Hop):
    if not exchange.has_lanes:
        sent = take_rows(elements, route.source)
        return take_rows(send(sent, hop.lanes, exchange), hop.arrival)
    received = _swap(exchange, length, elements, route.source)
    return _pick(exchange, length, received, hop.arrival, elements, route.source)


def _collect(exchange: Exchange, length: int, rows, route: Route, hop: Hop):
    if not exchange.has_lanes:
        returned = send_back(take_rows(rows, hop.delivered), hop.lanes, exchange)
        return sum_picked(functools.partial(take_rows, returned), route.places)
    returned = _swap(exchange, length, rows, hop.delivered)
    return sum_picked(
        lambda place: _pick(exchange, length, returned, place, rows, hop.delivered), route.places
    )


def _swap(exchange: Exchange, length: int, rows, source):
    """Gather the first ``length`` rows of every lane from ``rows``, and exchange them."""
    pair = exchange.sizes.pair
    lanes = source[: exchange.ranks * pair].reshape(exchange.ranks, pair)[:, :length]
    return swap_lanes(take_rows(rows, lanes.ravel()), exchange.axes, exchange.ranks, length)


def _pick(exchange: Exchange, length: int, received, place, rows, source):
    """Gather the rows at ``place`` in a buffer whose lanes are ``received``; after them are kept rows of ``rows``."""
    pair, kept_start = exchange.sizes.pair, exchange.ranks * exchange.sizes.pair
    kept = take_rows(rows, jnp.where(place >= kept_start, source[place], EMPTY))
    if not length:
        return kept
    in_lane = (place != EMPTY) & (place < kept_start)
    row = jnp.where(in_lane, place // pair * length + place % pair, EMPTY)
    return jnp.where(in_lane.reshape(-1, *[1] * (rows.ndim - 1)), take_rows(received, row), kept)
