"""Which experts a rank gives away as replicas in one layer of one micro-batch, and where they arrive: tables that are
made before the step. `relibra_jax.execution.replica_exchange` follows them.

Everything here runs on one rank, inside shard_map.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.capacity import export_count, exported_slots
from relibra_jax.execution.exchange import KINDS, Exchange, Lanes
from relibra_jax.execution.gather import inverse_index
from relibra_jax.execution.mesh import NODE
from relibra_jax.plan import copy_source
from relibra_jax.segments import in_lanes, places, starts
from relibra_jax.types import EMPTY, LayerPlan, Topology

PULLED: Final = ("remote", "remote_emulated")
"""The kinds of fetch that every rank does for itself."""
FETCHES: Final = (*KINDS, *PULLED)
"""All kinds of fetch: see `relibra_jax.execution.replica_exchange`."""


class RemoteRows(NamedTuple):
    """Where the replicas of a rank are pulled from."""

    rank: Int[jax.Array, "*stack R"]
    """The rank of the domain that gives away the expert of each replica slot; EMPTY for empty slots."""
    row: Int[jax.Array, "*stack R"]
    """Its row among the exports of that rank; EMPTY for empty slots."""


class FetchTables(NamedTuple):
    """The way of replicas between the P ranks of a domain. All int32 but the last."""

    exports: Int[jax.Array, "*stack X"]
    """The home or resident slot of each expert that this rank gives away; EMPTY for none."""
    lanes: Lanes | None
    """Experts for and from each rank, of the ragged exchange; None where pieces are sent: padded, and for the
    gradients of what was pulled."""
    source: Int[jax.Array, "*stack arrived"]
    """Ragged: the received row of each replica slot. Padded: of the R slots of each rank, the row among the pieces of
    the X exports of each rank. EMPTY for empty slots."""
    places: Int[jax.Array, "*stack rows copies"]
    """The inverse of ``source``: the slots that take each row."""
    fits: Bool[jax.Array, "*stack"]
    """Whether the buffers hold the exports of all ranks."""
    remote: RemoteRows | None = None
    """Where replicas are pulled from; None for exchanges."""


def make_fetch(
    plan: LayerPlan, exchange: Exchange, exports: int, topology: Topology, *, across_nodes: bool
) -> FetchTables:
    """The tables of this rank.

    Args:
        plan: the plan of one layer and micro-batch; slots and homes are read.
        exchange: the exchange between the ranks of the domain.
        exports: rows for the experts that a rank gives away.
        topology: the expert-parallel group.
        across_nodes: whether the domain is all ranks, and not those of a node.
    """
    held, ranks, slots = topology.held_slots, exchange.ranks, topology.replica_slots
    node = jnp.int32(0) if across_nodes else jax.lax.axis_index(NODE).astype(jnp.int32)
    first = node * topology.ranks_per_node
    source = copy_source(plan, topology).reshape(-1, slots)
    source = jax.lax.dynamic_slice_in_dim(source, first, ranks)
    # The sources of a valid plan are ranks of the domain; those of another one are no place at all.
    source = jnp.where(source == EMPTY, EMPTY, source - first * held)
    source = jnp.where((source < 0) | (source >= ranks * held), EMPTY, source)
    if travels_in_pieces(exchange):
        exported = exported_slots(plan, topology)
        fits = exported.sum(1).max() <= exports
        exported = jax.lax.dynamic_slice_in_dim(exported, first, ranks)
        return _in_pieces(source, exported, exports, fits, exchange)
    fits = export_count(plan, topology).max() <= exports
    return _in_lanes(source, exports, fits, held, exchange)


def travels_in_pieces(exchange: Exchange) -> bool:
    """Whether replicas, or their gradients at least, travel in pieces (`relibra_jax.execution.expert_pieces`)."""
    return exchange.kind == "padded" or exchange.kind in PULLED


def remote_rows(rows: Int[jax.Array, " R"], exports: int, ranks: int) -> RemoteRows:
    """Where a rank pulls its replicas from.

    Args:
        rows: the row of each replica slot among the exports of all ranks, those of each rank together; EMPTY for empty
            slots. Rows that are no place at all, because the exports do not fit, become empty too: a kernel would wait
            for them for ever.
        exports: rows for the exports of a rank.
        ranks: the ranks of the domain.

    >>> remote_rows(jnp.array([5, EMPTY, 8]), exports=4, ranks=2)
    RemoteRows(rank=Array([ 1, -1, -1], dtype=int32), row=Array([ 1, -1, -1], dtype=int32))
    """
    here = (rows >= 0) & (rows < ranks * exports)
    return RemoteRows(jnp.where(here, rows // exports, EMPTY), jnp.where(here, rows % exports, EMPTY))


def _in_pieces(source, exported, exports: int, fits, exchange: Exchange) -> FetchTables:
    me = jax.lax.axis_index(exchange.axes)
    place = places(exported)
    rows = jnp.where(source == EMPTY, EMPTY, in_lanes(place, exports).ravel()[source])
    inverse = jax.vmap(lambda index: inverse_index(index, exchange.ranks * exports))(rows)
    # Slots are counted over all ranks.
    slot = in_lanes(inverse, rows.shape[1])
    remote = None
    if exchange.kind in PULLED:
        remote = remote_rows(rows[me], exports, exchange.ranks)
    return FetchTables(inverse_index(place[me], exports), None, rows.ravel(), slot.T, fits, remote)


def _in_lanes(source, exports: int, fits, held: int, exchange: Exchange) -> FetchTables:
    me, ranks = jax.lax.axis_index(exchange.axes), exchange.ranks
    owner = jnp.where(source == EMPTY, ranks, source // held)
    # [owner, taker], in the order of the takers' slots.
    given = owner[None] == jnp.arange(ranks, dtype=jnp.int32)[:, None, None]
    lanes = exchange.lanes(given.sum(-1, dtype=jnp.int32))
    taken = inverse_index(places(given[me].ravel()), exchange.send_rows)
    slot = jnp.where(taken == EMPTY, EMPTY, source.ravel()[taken] % held)
    # A slot's row is behind those of the same owner that stand in earlier slots.
    mine = given[:, me]
    row = lanes.receive_start[:, None] + starts(mine.astype(jnp.int32))
    row = jnp.where(mine, row, 0).sum(0, dtype=jnp.int32)
    row = jnp.where(source[me] == EMPTY, EMPTY, row)
    return FetchTables(slot, lanes, row, inverse_index(row, exchange.receive_rows)[:, None], fits)
