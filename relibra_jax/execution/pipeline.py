"""The way of tokens through experts in pieces: one piece travels while the experts of another run, in both directions.

The backward pass is the same way with other values: gradients of outputs go to the experts, and those of tokens and
gates come back. In both, a piece travels to other ranks beside the experts of the piece before it, and returns beside
those of the piece after it. XLA orders collectives by its own estimates, which do not know the time of kernels.
Therefore a piece is packed before the experts of the piece before it run, and what has arrived of it is read only after
them. Flat ragged exchanges are neither packed beforehand nor picked up afterwards, so XLA alone orders them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.execution.dispatch import (
    NodeDispatch,
    Tables,
    Travelling,
    group_sizes,
    open_tables,
    pack_tokens,
    return_tokens,
    send_tokens,
)
from relibra_jax.execution.exchange import Exchange
from relibra_jax.execution.hop import Hop
from relibra_jax.execution.nccl_ep import SlotDispatch
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.routing.sizes import LAYER_SIXTEENTHS

type Compute = Callable[[jax.Array, Sequence[jax.Array], jax.Array, jax.Array], jax.Array]
"""A function of rows, weights, group sizes and row scales, as `relibra_jax.execution.moe.ExpertMlp`."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_pieces(
    compute: Compute,
    exchanges: tuple[Exchange, ...],
    values: tuple[Travelling, ...],
    weights: tuple[jax.Array, ...],
    tables: tuple[Tables, ...],
    valid: Bool[jax.Array, ""],
) -> tuple[Float[jax.Array, "t D"], ...]:
    """Run the experts of every token, piece by piece.

    Args:
        compute: the function that computes rows.
        exchanges: the exchange of each hop.
        values: the tokens and gates of each piece.
        weights: the weights of this rank's slots.
        tables: the dispatch tables of each piece.
        valid: whether the tables are valid. If not, results and gradients are NaN.

    Returns:
        The sums of the outputs of each token's experts, weighted by the gates, for each piece.
    """
    return _forward(compute, exchanges, values, weights, tables, valid)[0]


def _forward(compute, exchanges, values, weights, tables, valid):
    def way(exchanges, values, weights, tables, valid):
        kept = []

        def experts(piece: int, rows: Travelling) -> Travelling:
            kept.append(rows)
            return Travelling(_experts(compute, tables[piece], valid)(rows.token, rows.copy, weights), None)

        results = _through(values, tables, exchanges, experts, scopes=("dispatch", "experts", "combine"))
        return tuple(result.token for result in results), tuple(kept)

    results, kept = _with_lengths(way, exchanges, tables)(values, weights, tables, valid)
    return results, (kept, weights, tables, valid)


def _backward(compute, exchanges, residuals, d_results):
    def way(exchanges, d_results, kept, weights, tables, valid):
        d_weights = []

        def experts(piece: int, d_rows: Travelling) -> Travelling:
            # Kernels compute what they need again, so that only rows are kept, which are equal in all ways.
            _, pull = jax.vjp(_experts(compute, tables[piece], valid), *kept[piece], weights)
            d_token, d_copy, d_weight = pull(d_rows.token)
            d_weights.append(d_weight)
            return Travelling(d_token, d_copy)

        gradients = [Travelling(d_result, None) for d_result in d_results]
        d_values = _through(gradients, tables, exchanges, experts, scopes=("combine", "experts", "dispatch"))
        return tuple(d_values), jax.tree.map(lambda *parts: sum(parts), *d_weights)

    d_values, d_weights = _with_lengths(way, exchanges, residuals[2])(d_results, *residuals)
    return d_values, d_weights, None, None


run_pieces.defvjp(_forward, _backward)


def _with_lengths(
    way: Callable[..., Any], exchanges: tuple[Exchange, ...], tables: tuple[Tables, ...]
) -> Callable[..., Any]:
    """Return a way of whole layers with its exchanges.

    Fitted exchanges of pieces send as much of every lane as the longest of all hops and pieces needs. With one choice
    for the whole layer all its collectives are in one branch, where they are asynchronous, and the host waits once.
    """
    if len(tables) == 1 or exchanges[0].kind != "fitted":
        return functools.partial(way, exchanges)
    number = functools.reduce(
        jnp.maximum,
        (
            _least_part(exchange, hop)
            for table in tables
            for exchange, hop in zip(exchanges, _hops(table), strict=True)
            if exchange.kind == "fitted"
        ),
    )

    def with_part(part: int) -> tuple[Exchange, ...]:
        return tuple(
            dataclasses.replace(each, sixteenths=part) if each.kind == "fitted" else each
            for each in exchanges
        )

    ways = [functools.partial(way, with_part(part)) for part in LAYER_SIXTEENTHS]
    return functools.partial(jax.lax.switch, number, ways)


def _least_part(exchange: Exchange, hop: Hop) -> jax.Array:
    """Return the number of the least of `LAYER_SIXTEENTHS` that suffices for a hop."""
    lengths = [dataclasses.replace(exchange, sixteenths=part).chosen_length for part in LAYER_SIXTEENTHS]
    longest = jnp.array(exchange.lengths, jnp.int32)[hop.lanes.length]
    return jnp.searchsorted(jnp.array(lengths, jnp.int32), longest).astype(jnp.int32)


def _hops(tables: Tables) -> tuple[Hop, ...]:
    assert not isinstance(tables, SlotDispatch), "NCCL EP has no lanes"
    return (tables.hop, tables.inside.hop) if isinstance(tables, NodeDispatch) else (tables.hop,)


def _experts(compute: Compute, tables: Tables, valid: jax.Array) -> Callable[..., jax.Array]:
    """Return the function of rows, their gates, and weights."""
    sizes = jnp.where(valid, group_sizes(tables), 1)
    return lambda rows, scale, weights: compute(rows, weights, sizes, scale * one_or_nan(valid, scale))


def _through(
    values: Sequence[Travelling],
    tables: Sequence[Tables],
    exchanges: tuple[Exchange, ...],
    experts: Callable[[int, Travelling], Travelling],
    *,
    scopes: tuple[str, str, str],
) -> list[Travelling]:
    """Send all pieces to the experts, run these, and return the results; each step has its named scope."""
    out, inside, back = scopes
    computed: list[Travelling] = []
    packed: tuple[jax.Array, ...] | None = None
    with jax.named_scope(out):
        tables = [open_tables(*each, exchanges) for each in zip(values, tables, strict=True)]
    for piece, (value, table) in enumerate(zip(values, tables, strict=True)):
        with jax.named_scope(out):
            if computed:
                assert not isinstance(table, SlotDispatch), "NCCL EP runs a layer in one piece"
                arrival, computed[-1] = jax.lax.optimization_barrier((table.hop.arrival, computed[-1]))
                table = table._replace(hop=table.hop._replace(arrival=arrival))
            rows = send_tokens(value, table, exchanges, packed)
            if piece + 1 < len(values):
                packed = pack_tokens(values[piece + 1], tables[piece + 1], exchanges)
                rows, packed = jax.lax.optimization_barrier((rows, packed))
        with jax.named_scope(inside):
            computed.append(experts(piece, rows))
    with jax.named_scope(back):
        return [return_tokens(rows, table, exchanges) for rows, table in zip(computed, tables, strict=True)]
