"""Where every token copy of a rank goes: tables made once a batch, so that layers only gather and send.

Sorting token copies by expert and slots by expert lines the two up (`relibra_jax.copy_slots`): the first
``sent[slot]`` copies of an expert go to its first slot, and so on. One argsort places every copy of a rank, and
receivers sort nothing, since what lies where follows from the counts alone.

Everything here runs on one rank, inside shard_map; `relibra_jax.execution.dispatch` follows the tables.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.copy_slots import line_up
from relibra_jax.execution.exchange import Exchange, Lanes, send
from relibra_jax.execution.gather import inverse_index
from relibra_jax.segments import segment_rows, starts
from relibra_jax.types import EMPTY


class Dispatch(NamedTuple):
    """The way of a rank's token copies to the slots that compute them; combine takes it backwards. All int32."""

    copy: Int[jax.Array, "*stack send"]
    """The token copy in each row that is sent, counted ``token * K + k``; EMPTY for none."""
    place: Int[jax.Array, "*stack t K"]
    """The row of each copy in what is sent; EMPTY for no copy."""
    lanes: Lanes
    """Rows that go to each rank and come from each."""
    arrival: Int[jax.Array, "*stack rows"]
    """The received row of each computed row, those of each slot together; EMPTY behind them."""
    computed: Int[jax.Array, "*stack receive"]
    """The computed row of each received row; EMPTY for none."""
    group_sizes: Int[jax.Array, "*stack S"]
    """Rows of each slot."""


class NodeDispatch(NamedTuple):
    """The way in two hops: each token once to every node that serves it, then its copies inside that node."""

    token: Int[jax.Array, "*stack send"]
    """The token in each row that crosses; EMPTY for none."""
    place: Int[jax.Array, "*stack t N"]
    """The row of each token in what is sent to each node; EMPTY where it does not go."""
    lanes: Lanes
    """Tokens that go to the rank of the same index in each node, and come from there."""
    inside: Dispatch
    """The way of the arrived tokens' copies inside the node."""


def make_dispatch(
    key: Int[jax.Array, "t K"],
    slot_key: Int[jax.Array, "P S"],
    sent: Int[jax.Array, "P P S"],
    exchange: Exchange,
    *,
    rows: int,
) -> tuple[Dispatch, Bool[jax.Array, ""]]:
    """The way of each token copy over one exchange to the slots that hold its key.

    Args:
        key: the expert of each token copy, which says what slots may serve it; EMPTY for no copy.
        slot_key: the expert in each slot of all ranks; EMPTY for none.
        sent: copies from each rank to each slot, the same on all ranks; those of one key sum to its copies here.
        exchange: the exchange between the P ranks.
        rows: the rows that a rank computes.

    Returns:
        The tables, and whether the buffers hold what the counts ask for; tables are meaningless where they do not.
    """
    me = jax.lax.axis_index(exchange.axes)
    counts, received = sent.sum(-1, dtype=sent.dtype), sent[:, me]
    lanes = exchange.lanes(counts)
    slot_start = lanes.send_start[:, None] + starts(sent[me])
    copy = _copies_in_lanes(key, slot_key, sent[me], slot_start, exchange)
    # Received rows lie by rank, then slot; computed rows by slot, then rank.
    lane = lanes.receive_start[:, None] + starts(received)
    arrival = segment_rows(rows, starts(received.T.ravel()), received.T.ravel(), lane.T.ravel())
    tables = Dispatch(
        copy=copy,
        place=inverse_index(copy, key.size).reshape(key.shape),
        lanes=lanes,
        arrival=arrival,
        computed=inverse_index(arrival, exchange.receive_rows),
        group_sizes=received.sum(0, dtype=sent.dtype),
    )
    return tables, _fits(exchange, counts, rows)


def make_node_dispatch(
    slot: Int[jax.Array, "t K"],
    sent: Int[jax.Array, "N G N G S"],
    between: Exchange,
    inside: Exchange,
    *,
    rows: int,
) -> tuple[NodeDispatch, Bool[jax.Array, ""]]:
    """`make_dispatch` in two hops.

    Args:
        slot: the flat slot that serves each copy (`relibra_jax.copy_slots.copy_slots`); EMPTY for no copy.
        sent: copies from each rank to each slot, the same on all ranks.
        between: the exchange between the nodes' ranks of one local index.
        inside: the exchange inside a node.
        rows: the rows that a rank computes.
    """
    nodes, local, slots = sent.shape[2:]
    node, top_k = jax.lax.axis_index(between.axes), slot.shape[1]
    wanted = slot[:, None] // (local * slots) == jnp.arange(nodes, dtype=jnp.int32)[None, :, None]
    wanted &= (slot != EMPTY)[:, None]
    visit = wanted.any(-1)
    counts = jax.lax.all_gather(visit.sum(0, dtype=jnp.int32), between.axes)
    lanes = between.lanes(counts)
    place = jnp.where(visit, lanes.send_start[None] + starts(visit.astype(jnp.int32), 0), EMPTY)
    source = inverse_index(place.ravel(), between.send_rows)

    # The slot inside its node of each copy, from 1, so that the zeros between lanes mean none.
    inner = jnp.where(wanted, slot[:, None] % (local * slots) + 1, 0)
    inner_rows = jnp.where(source == EMPTY, visit.size, source)
    inner_rows = inner.reshape(-1, top_k).at[inner_rows].get(mode="fill", fill_value=0)
    spread, fits = make_dispatch(
        send(inner_rows, lanes, between) - 1,
        jnp.arange(local * slots, dtype=jnp.int32).reshape(local, slots),
        sent[:, :, node].sum(0, dtype=sent.dtype),
        inside,
        rows=rows,
    )
    token = jnp.where(source == EMPTY, EMPTY, source // nodes)
    # What overflows on any node was sent from all of them.
    fits &= jax.vmap(lambda counts: _fits(inside, counts, rows), 1)(sent.sum((0, -1), dtype=sent.dtype)).all()
    return NodeDispatch(token, place, lanes, spread), fits & between.fits(counts)


def _fits(exchange: Exchange, counts, rows: int):
    return exchange.fits(counts) & (counts.sum(0).max() <= rows)


def _copies_in_lanes(key, slot_key, mine, slot_start, exchange: Exchange):
    """The copy in each row of the send buffer."""
    order, slots, begin = line_up(key, slot_key, mine)
    first = jnp.zeros_like(begin).at[slots].set(begin, unique_indices=True).reshape(mine.shape)
    # Segments have to ascend; by lanes and not by where they start, which an empty one may share with another lane's.
    lanes = exchange.lane_order()
    rank = segment_rows(exchange.send_rows, *(each[lanes].ravel() for each in (slot_start, mine, first)))
    return jnp.where(rank == EMPTY, EMPTY, order[rank].astype(jnp.int32))
