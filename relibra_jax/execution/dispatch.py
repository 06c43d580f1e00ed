"""Dispatch and combine: token copies to their slots, and results back, weighted by their gates.

*Flat*: one exchange between all ranks. *Hierarchical*: a token crosses to a node once, to the rank of its own local
index, however many of its experts are there; then its copies spread inside the node. On the way back the node's
results are summed before they cross. Gates travel with the copies, so that the sum is the weighted one.

Where each row goes stands in tables that were made before the step (`relibra_jax.execution.dispatch_tables`): here
rows are gathered and sent, nothing else. Everything runs on one rank, inside shard_map.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from relibra_jax.execution.dispatch_tables import Dispatch, NodeDispatch
from relibra_jax.execution.exchange import Exchange, send, send_back
from relibra_jax.execution.gather import combine_rows, gather_rows
from relibra_jax.types import EMPTY


def send_tokens(
    x: Float[jax.Array, "t *D"], tables: Dispatch, exchange: Exchange
) -> Float[jax.Array, "rows *D"]:
    """A row of its token for every copy that this rank computes, those of each slot together; zeros behind them."""
    return _arrange(send(gather_rows(x, _sent_tokens(tables), tables.place), tables.lanes, exchange), tables)


def send_copies(
    values: Num[jax.Array, "t K"], tables: Dispatch, exchange: Exchange
) -> Num[jax.Array, " rows"]:
    """The value of its own for every copy that this rank computes: gates, or the copies' experts."""
    places = tables.place.reshape(-1, 1)
    return _arrange(send(gather_rows(values.ravel(), tables.copy, places), tables.lanes, exchange), tables)


def combine(
    computed: Float[jax.Array, "rows D"], tables: Dispatch, exchange: Exchange
) -> Float[jax.Array, "t D"]:
    """The sum of each token's computed copies, back where the token lies: the way of `send_tokens` backwards."""
    with jax.named_scope("combine"):
        rows = gather_rows(computed, tables.computed, tables.arrival[:, None])
        return combine_rows(send_back(rows, tables.lanes, exchange), _sent_tokens(tables), tables.place)


def cross(values: Num[jax.Array, "t *d"], tables: NodeDispatch, between: Exchange) -> jax.Array:
    """The first hop: the values of each token, once to every node that serves it; zeros between the lanes."""
    return send(gather_rows(values, tables.token, tables.place), tables.lanes, between)


def cross_back(
    sums: Float[jax.Array, "receive D"], tables: NodeDispatch, between: Exchange
) -> Float[jax.Array, "t D"]:
    """The last hop: every node's sum for a token goes back to where it lies, and they are added."""
    with jax.named_scope("combine"):
        return combine_rows(send_back(sums, tables.lanes, between), tables.token, tables.place)


def _sent_tokens(tables: Dispatch):
    """The token in each row that is sent; EMPTY for none."""
    return jnp.where(tables.copy == EMPTY, EMPTY, tables.copy // tables.place.shape[1])


def _arrange(arrived, tables: Dispatch):
    return gather_rows(arrived, tables.arrival, tables.computed[:, None])
