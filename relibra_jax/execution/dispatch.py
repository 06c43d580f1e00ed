"""Dispatch and combine: token copies to their slots, and results back, weighted by their gates.

*Flat* dispatch is one exchange between all ranks. In *hierarchical* dispatch a token crosses to a node once, however
many of its experts are there: it goes to the rank with the same local index, and its copies then spread inside the
node. On the way back each node sums its results before they cross. The gates travel with the copies, so that the sum is
weighted.

Tables computed before the step (`relibra_jax.execution.dispatch_tables`) say where each row goes. This module only
gathers and sends rows. Everything runs on one rank, inside shard_map.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.dispatch_tables import Dispatch, NodeDispatch
from relibra_jax.execution.exchange import Exchange, send, send_back
from relibra_jax.execution.gather import combine_rows, gather_rows


def send_tokens(
    x: Float[jax.Array, "t *D"], tables: Dispatch, exchange: Exchange
) -> Float[jax.Array, "rows *D"]:
    """Send tokens to experts; return one row for every copy that this rank computes, grouped by slot, then zeros."""
    return _arrange(send(gather_rows(x, _sent_tokens(tables), tables.place), tables.lanes, exchange), tables)


def send_copies(
    values: Num[jax.Array, "t K"], tables: Dispatch, exchange: Exchange
) -> Num[jax.Array, " rows"]:
    """Send one value per token copy, such as its gate, and return the values in the row order of `send_tokens`."""
    places = tables.place.reshape(-1, 1)
    return _arrange(send(gather_rows(values.ravel(), tables.copy, places), tables.lanes, exchange), tables)


def combine(
    computed: Float[jax.Array, "rows D"], tables: Dispatch, exchange: Exchange
) -> Float[jax.Array, "t D"]:
    """Send computed copies back to the ranks of their tokens, and sum them per token: the reverse of `send_tokens`."""
    with jax.named_scope("combine"):
        rows = gather_rows(computed, tables.computed, tables.arrival[:, None])
        return combine_rows(send_back(rows, tables.lanes, exchange), _sent_tokens(tables), tables.place)


def cross(values: Num[jax.Array, "t *d"], tables: NodeDispatch, between: Exchange) -> jax.Array:
    """Run the first hop: send the values of each token once to every node that serves it. Unused rows are zero."""
    return send(gather_rows(values, tables.token, tables.place), tables.lanes, between)


def cross_back(
    sums: Float[jax.Array, "receive D"], tables: NodeDispatch, between: Exchange
) -> Float[jax.Array, "t D"]:
    """Run the last hop: send every node's sum for a token back to the token's rank, and add the sums."""
    with jax.named_scope("combine"):
        return combine_rows(send_back(sums, tables.lanes, between), tables.token, tables.place)


def _sent_tokens(tables: Dispatch):
    """Return the token in each row of the send buffer; EMPTY for none."""
    return jnp.where(tables.copy == EMPTY, EMPTY, tables.copy // tables.place.shape[1])


def _arrange(arrived, tables: Dispatch):
    return gather_rows(arrived, tables.arrival, tables.computed[:, None])
