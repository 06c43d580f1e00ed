"""Tables for the replica fetch of one layer of one micro-batch, computed before the training step.

They say which experts a rank exports as replicas, and where the replicas arrive. Everything here runs on one rank,
inside shard_map. `relibra_jax.execution.replicas` uses the tables.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.contract.plan import copy_source
from relibra_jax.contract.types import EMPTY, LayerPlan, Topology
from relibra_jax.execution.exchange import Exchange, Lanes, updates
from relibra_jax.execution.gather import inverse_index
from relibra_jax.execution.mesh import NODE
from relibra_jax.routing.host_share import HostSizes
from relibra_jax.routing.segments import in_lanes, places, starts
from relibra_jax.routing.sizes import export_count, exported_slots

PULLED: Final = ("remote", "remote_emulated")
"""The kinds of fetch in which every rank reads its replicas from the memory of other ranks."""
INSIDE_NODES: Final = ("ragged", *PULLED)
"""The kinds of fetch that do not cross between nodes."""
FETCHES: Final = ("padded", "ragged", "emulated", *PULLED)
"""All kinds of fetch: see `relibra_jax.execution.replicas`."""


class RemoteRows(NamedTuple):
    """The places from which a rank pulls its replicas."""

    rank: Int[jax.Array, "*stack R"]
    """The rank of the domain that exports the expert of each replica slot; EMPTY for empty slots."""
    row: Int[jax.Array, "*stack R"]
    """The row of the expert among the exports of that rank; EMPTY for empty slots."""


class FetchTables(NamedTuple):
    """The tables that send replicas between the P ranks of a domain. The indices are int32."""

    exports: Int[jax.Array, "*stack X"]
    """The home or resident slot of each expert that this rank exports; EMPTY for none."""
    updates: Lanes | None
    """The updates of a ragged exchange, in experts. None if experts travel in pieces: in the padded exchange, and for
    the gradients of pulled replicas."""
    source: Int[jax.Array, "*stack arrived"]
    """In a ragged exchange, the received row of each replica slot of this rank. In a padded exchange, for the R slots
    of every rank, the row among the pieces of all ranks' X exports. EMPTY for empty slots."""
    places: Int[jax.Array, "*stack rows uses"]
    """The slots that take each row, the inverse of ``source``; EMPTY for none."""
    fits: Bool[jax.Array, "*stack"]
    """Whether the buffers are large enough for the exports of all ranks."""
    remote: RemoteRows | None = None
    """The places from which replicas are pulled; None for exchanges."""


class HostTables(NamedTuple):
    """The tables of a layer some of whose replicas come from host memory (`relibra_jax.execution.host_replicas`)."""

    slot: Int[jax.Array, "*stack C"]
    """The kept expert that each of the rank's copies reads, a slot of its K; EMPTY for none."""
    place: Int[jax.Array, "*stack arriving"]
    """The replica slot of each copy, and then of each replica that other ranks still send; EMPTY for none."""
    links: FetchTables | None
    """The tables of the replicas that other ranks still send; None if all come from the host."""
    sizes: HostSizes
    """The sizes for which the tables were computed."""

    def layer(self, index: Any) -> "HostTables":
        """Return element ``index`` of the first stacked axis."""
        return jax.tree.map(lambda leaf: leaf[index], self)


def make_fetch(
    plan: LayerPlan, exchange: Exchange, exports: int, topology: Topology, *, across_nodes: bool
) -> FetchTables:
    """Compute the fetch tables of this rank.

    Args:
        plan: the plan of one layer and micro-batch, of which only slots and homes are read.
        exchange: the exchange between the ranks of the domain.
        exports: the number of rows for the experts that a rank exports.
        topology: the expert-parallel group.
        across_nodes: whether the domain is all ranks instead of the ranks of a node.
    """
    held_slots, ranks, slots = topology.held_slots, exchange.ranks, topology.replica_slots
    node = jnp.int32(0) if across_nodes else jax.lax.axis_index(NODE).astype(jnp.int32)
    first = node * topology.ranks_per_node
    source = copy_source(plan, topology).reshape(-1, slots)
    source = jax.lax.dynamic_slice_in_dim(source, first, ranks)
    # In a valid plan every source is a rank of the domain. Sources outside the domain become EMPTY.
    source = jnp.where(source == EMPTY, EMPTY, source - first * held_slots)
    source = jnp.where((source < 0) | (source >= ranks * held_slots), EMPTY, source)
    if travels_in_pieces(exchange):
        exported = exported_slots(plan, topology)
        fits = exported.sum(1).max() <= exports
        exported = jax.lax.dynamic_slice_in_dim(exported, first, ranks)
        return _in_pieces(source, exported, exports, fits, exchange)
    fits = export_count(plan, topology).max() <= exports
    return _in_lanes(source, exports, fits, held_slots, exchange)


def travels_in_pieces(exchange: Exchange) -> bool:
    """Return whether replicas or their gradients travel in pieces (`relibra_jax.execution.expert_pieces`)."""
    return exchange.kind == "padded" or exchange.kind in PULLED


def remote_rows(rows: Int[jax.Array, " R"], exports: int, ranks: int) -> RemoteRows:
    """Split rows among the exports of all ranks into the rank and the row from which a replica is pulled.

    Args:
        rows: the row of each replica slot among the exports of all ranks, grouped by rank; EMPTY for empty slots. Rows
            outside the buffers, which occur if the exports do not fit, become EMPTY, because a kernel would wait for
            them forever.
        exports: the number of rows for the exports of a rank.
        ranks: the number of ranks of the domain.

    >>> remote_rows(jnp.array([5, EMPTY, 8]), exports=4, ranks=2)
    RemoteRows(rank=Array([ 1, -1, -1], dtype=int32), row=Array([ 1, -1, -1], dtype=int32))
    """
    valid = (rows >= 0) & (rows < ranks * exports)
    return RemoteRows(jnp.where(valid, rows // exports, EMPTY), jnp.where(valid, rows % exports, EMPTY))


def _in_pieces(source, exported, exports: int, fits, exchange: Exchange) -> FetchTables:
    rank = jax.lax.axis_index(exchange.axes)
    place = places(exported)
    rows = jnp.where(source == EMPTY, EMPTY, in_lanes(place, exports).ravel()[source])
    inverse = jax.vmap(lambda index: inverse_index(index, exchange.ranks * exports))(rows)
    # Slots are numbered over all ranks.
    slot = in_lanes(inverse, rows.shape[1])
    remote = None
    if exchange.kind in PULLED:
        remote = remote_rows(rows[rank], exports, exchange.ranks)
    return FetchTables(inverse_index(place[rank], exports), None, rows.ravel(), slot.T, fits, remote)


def _in_lanes(source, exports: int, fits, held_slots: int, exchange: Exchange) -> FetchTables:
    rank, ranks = jax.lax.axis_index(exchange.axes), exchange.ranks
    owner = jnp.where(source == EMPTY, ranks, source // held_slots)
    # [owner, receiver], in the order of the receivers' slots.
    sends = owner[None] == jnp.arange(ranks, dtype=jnp.int32)[:, None, None]
    # XLA's kernels check no bounds: nothing is sent from beyond the exports.
    runs = exchange.runs(jnp.where(fits, sends.sum(-1, keepdims=True, dtype=jnp.int32), 0))
    send_slot = inverse_index(places(sends[rank].ravel()), exchange.send_rows)
    slot = jnp.where(send_slot == EMPTY, EMPTY, source.ravel()[send_slot] % held_slots)
    # The row of a slot comes after the rows of earlier slots with the same owner.
    receives = sends[:, rank]
    row = runs.receive_start + starts(receives.astype(jnp.int32))
    row = jnp.where(receives, row, 0).sum(0, dtype=jnp.int32)
    row = jnp.where(source[rank] == EMPTY, EMPTY, row)
    places_of_rows = inverse_index(row, exchange.receive_rows)[:, None]
    return FetchTables(slot, updates(runs), row, places_of_rows, fits)
