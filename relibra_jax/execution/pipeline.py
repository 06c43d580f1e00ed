"""The way of tokens through experts in pieces: one piece travels while the experts of another run, in both directions.

The backward pass is the same way with other values: gradients of outputs go to the experts, and those of tokens and
gates come back. In both, a piece travels to other ranks beside the experts of the piece before it. XLA orders
collectives by its own estimates, which do not know the time of kernels. Therefore what has arrived of a piece is read
only after the experts of the piece before have run. Whether a piece returns beside other experts is left to XLA.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.execution.dispatch import (
    Dispatch,
    NodeDispatch,
    Travelling,
    inside_tables,
    return_tokens,
    send_tokens,
)
from relibra_jax.execution.exchange import Exchange
from relibra_jax.execution.plan_guard import one_or_nan

type Tables = Dispatch | NodeDispatch


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

    def experts(piece: int, rows: Travelling) -> Travelling:
        return Travelling(_experts(compute, tables[piece], valid)(rows.token, rows.copy, weights), None)

    results = _through(values, tables, exchanges, experts, scopes=("dispatch", "experts", "combine"))
    return tuple(result.token for result in results)  # type: ignore[misc]


def _forward(compute, exchanges, values, weights, tables, valid):
    pulls: list[Any] = []

    def experts(piece: int, rows: Travelling) -> Travelling:
        out, pull = jax.vjp(_experts(compute, tables[piece], valid), rows.token, rows.copy, weights)
        pulls.append(pull)
        return Travelling(out, None)

    results = _through(values, tables, exchanges, experts, scopes=("dispatch", "experts", "combine"))
    return tuple(result.token for result in results), (tuple(pulls), tables)


def _backward(compute, exchanges, kept, d_results):
    pulls, tables = kept
    d_weights = []

    def experts(piece: int, d_rows: Travelling) -> Travelling:
        d_token, d_copy, d_weight = pulls[piece](d_rows.token)
        d_weights.append(d_weight)
        return Travelling(d_token, d_copy)

    gradients = [Travelling(d_result, None) for d_result in d_results]
    d_values = _through(gradients, tables, exchanges, experts, scopes=("combine", "experts", "dispatch"))
    return tuple(d_values), jax.tree.map(lambda *parts: sum(parts), *d_weights), None, None


run_pieces.defvjp(_forward, _backward)


def _experts(compute: Compute, tables: Tables, valid: jax.Array) -> Callable[..., jax.Array]:
    """Return the function of rows, their gates, and weights."""
    group_sizes = jnp.where(valid, inside_tables(tables).group_sizes, 1)
    return lambda rows, scale, weights: compute(rows, weights, group_sizes, scale * one_or_nan(valid, scale))


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
    for piece, (value, table) in enumerate(zip(values, tables, strict=True)):
        with jax.named_scope(out):
            if computed:
                arrival, computed[-1] = jax.lax.optimization_barrier((table.hop.arrival, computed[-1]))
                table = table._replace(hop=table.hop._replace(arrival=arrival))
            rows = send_tokens(value, table, exchanges)
        with jax.named_scope(inside):
            computed.append(experts(piece, rows))
    with jax.named_scope(back):
        return [return_tokens(rows, table, exchanges) for rows, table in zip(computed, tables, strict=True)]
