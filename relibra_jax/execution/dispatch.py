"""Dispatch and combine: token copies to the slots that the plan names, and results back, weighted by their gates.

Sorting token copies by expert and slots by expert lines the two up (`relibra_jax.copy_slots`): the first
``sent[slot]`` copies of an expert go to its first slot, and so on. One argsort places every copy of a rank, and
receivers sort nothing, since what lies where follows from the counts alone.

*Flat*: one exchange between all ranks. *Hierarchical*: a token crosses to a node once, to the rank of its own local
index, however many of its experts are there; then its copies spread inside the node. On the way back the node's
results are summed before they cross. Gates travel with the copies, so that the sum is the weighted one.

Everything here runs on one rank, inside shard_map.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from relibra_jax.copy_slots import line_up
from relibra_jax.execution.exchange import Exchange, send, send_back
from relibra_jax.execution.gather import combine_rows, gather_rows, inverse_index
from relibra_jax.segments import segment_rows, starts
from relibra_jax.types import EMPTY


class Dispatched(NamedTuple):
    """The token copies of one rank, sorted by slot, and the way back."""

    rows: Float[jax.Array, "rows D"]
    """Token copies, those of each slot together; zeros behind them."""
    scale: Float[jax.Array, " rows"]
    """The gate of each copy."""
    group_sizes: Int[jax.Array, " S"]
    """Copies of each slot."""
    fits: Bool[jax.Array, ""]
    """Whether the buffers hold what the counts ask for; results are meaningless where they do not."""
    combine: Callable[[jax.Array], jax.Array]
    """``[rows, D]`` computed rows -> ``[t, D]`` the sum of each token's copies."""


def dispatch(
    x: Float[jax.Array, "t D"],
    key: Int[jax.Array, "t K"],
    gates: Float[jax.Array, "t K"],
    slot_key: Int[jax.Array, "P S"],
    sent: Int[jax.Array, "P P S"],
    exchange: Exchange,
    *,
    rows: int,
) -> Dispatched:
    """Send the copies of each token over one exchange to the slots that hold their keys.

    Args:
        x: the tokens of this rank.
        key: the expert of each token copy, which says what slots may serve it; EMPTY for no copy.
        gates: the weight of each copy, float32.
        slot_key: the expert in each slot of all ranks; EMPTY for none.
        sent: copies from each rank to each slot, the same on all ranks; those of one key sum to its copies here.
        exchange: the exchange between the P ranks.
        rows: the rows of the result.
    """
    me = jax.lax.axis_index(exchange.axes)
    counts, received = sent.sum(-1, dtype=sent.dtype), sent[:, me]
    send_start, receive_start = exchange.lanes(counts)
    slot_start = send_start[:, None] + starts(sent[me])
    source = _copies_in_lanes(key, slot_key, sent[me], slot_start, exchange.send_rows)
    places = inverse_index(source, key.size)
    token, copies = jnp.where(source == EMPTY, EMPTY, source // key.shape[1]), places.reshape(key.shape)

    # Received rows lie by rank, then slot; computed rows by slot, then rank.
    lane = receive_start[:, None] + starts(received)
    by_slot = segment_rows(rows, starts(received.T.ravel()), received.T.ravel(), lane.T.ravel())
    by_rank = inverse_index(by_slot, exchange.receive_rows)

    def deliver(values, source, copies):
        arrived = send(gather_rows(values, source, copies), counts, exchange)
        return gather_rows(arrived, by_slot, by_rank[:, None])

    def combine(computed):
        with jax.named_scope("combine"):
            arrived = send_back(gather_rows(computed, by_rank, by_slot[:, None]), counts, exchange)
            return combine_rows(arrived, token, copies)

    with jax.named_scope("dispatch"):
        return Dispatched(
            rows=deliver(x, token, copies),
            scale=deliver(gates.ravel(), source, places[:, None]),
            group_sizes=received.sum(0, dtype=sent.dtype),
            fits=_fits(exchange, counts, rows),
            combine=combine,
        )


def dispatch_by_node(
    x: Float[jax.Array, "t D"],
    slot: Int[jax.Array, "t K"],
    gates: Float[jax.Array, "t K"],
    sent: Int[jax.Array, "N G N G S"],
    between: Exchange,
    inside: Exchange,
    *,
    rows: int,
) -> Dispatched:
    """`dispatch` in two hops: each token once to every node that serves it, then its copies inside that node.

    Args:
        x, gates, rows: as in `dispatch`.
        slot: the flat slot that serves each copy (`relibra_jax.copy_slots.copy_slots`); EMPTY for no copy.
        sent: copies from each rank to each slot.
        between: the exchange between the nodes' ranks of one local index.
        inside: the exchange inside a node.
    """
    nodes, local, slots = sent.shape[2:]
    node, top_k = jax.lax.axis_index(between.axes), slot.shape[1]
    wanted = slot[:, None] // (local * slots) == jnp.arange(nodes)[None, :, None]
    wanted &= (slot != EMPTY)[:, None]
    visit = wanted.any(-1)
    counts = jax.lax.all_gather(visit.sum(0, dtype=jnp.int32), between.axes)
    send_start, _ = between.lanes(counts)
    places = jnp.where(visit, send_start[None] + starts(visit.astype(jnp.int32), 0), EMPTY)
    source = inverse_index(places.ravel(), between.send_rows)
    token = jnp.where(source == EMPTY, EMPTY, source // nodes)

    def cross(values):
        return send(gather_rows(values, token, places), counts, between)

    # The slot inside its node of each copy, from 1, so that the zeros between lanes mean none.
    inner = jnp.where(wanted, slot[:, None] % (local * slots) + 1, 0)
    inner_rows = jnp.where(source == EMPTY, inner.size, source)
    inner_rows = inner.reshape(-1, top_k).at[inner_rows].get(mode="fill", fill_value=0)
    with jax.named_scope("dispatch"):
        visitors, gates_here = cross(x), cross(gates)
        keys_here = send(inner_rows, counts, between) - 1

    spread = dispatch(
        visitors,
        keys_here,
        gates_here,
        jnp.arange(local * slots).reshape(local, slots),
        sent[:, :, node].sum(0, dtype=sent.dtype),
        inside,
        rows=rows,
    )

    def combine(computed):
        arrived = spread.combine(computed)
        with jax.named_scope("combine"):
            return combine_rows(send_back(arrived, counts, between), token, places)

    # What overflows on any node was sent from all of them.
    fits = jax.vmap(lambda counts: _fits(inside, counts, rows), 1)(sent.sum((0, -1))).all()
    return spread._replace(fits=fits & between.fits(counts), combine=combine)


def _fits(exchange: Exchange, counts, rows: int):
    return exchange.fits(counts) & (counts.sum(0).max() <= rows)


def _copies_in_lanes(key, slot_key, mine, slot_start, send_rows):
    """The copy in each row of the send buffer."""
    order, slots, begin = line_up(key, slot_key, mine)
    first = jnp.zeros_like(begin).at[slots].set(begin, unique_indices=True)
    rank = segment_rows(send_rows, slot_start.ravel(), mine.ravel(), first)
    return jnp.where(rank == EMPTY, EMPTY, order[rank])
