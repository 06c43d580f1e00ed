"""Transfer of experts in pieces, one for each rank, so that every rank sends as much as it receives under any plan.

If a rank sent whole experts, it would send its hottest expert once for every replica, and an exchange with equal lanes
would make all ranks equally slow. Instead each expert is cut into one piece per rank, and leaves its rank once: rank p
collects piece p of all exported experts, and sends it on to the ranks with replicas, which assemble the pieces. Both
exchanges have equal lanes by construction. Replicas travel in this way, and residents in three hops
(`relibra_jax.routing.resident_push` describes who sends what, and why). Migration of homes uses the same idea
(`relibra_jax.execution.migration`).

Everything here runs on one rank, inside shard_map. JAX can transpose it, which sums gradients where pieces were copied,
in a fixed order.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.execution.exchange import swap_lanes
from relibra_jax.execution.gather import gather_rows, inverse_index
from relibra_jax.execution.mesh import LOCAL, NODE
from relibra_jax.routing.resident_push import PushSizes, PushTables
from relibra_jax.routing.segments import in_lanes


def scatter_pieces(
    experts: Num[jax.Array, "X *expert"], axes: tuple[str, ...], ranks: int
) -> Num[jax.Array, "PX piece"]:
    """Send pieces of this rank's exported experts to all ranks, and receive this rank's piece of all exported experts.

    Args:
        experts: the X experts that this rank exports.
        axes: the mesh axes of the ranks.
        ranks: P, the number of ranks.

    Returns:
        This rank's piece of the exports of all ranks, grouped by rank.
    """
    count, size = len(experts), math.prod(experts.shape[1:])
    flat = experts.reshape(count, size)
    if size % ranks:
        flat = jnp.pad(flat, ((0, 0), (0, -size % ranks)))
    pieces = jnp.swapaxes(flat.reshape(count, ranks, -1), 0, 1)
    # The all-to-all splits and joins along the same array axis, because JAX 0.11 cannot transpose it between two axes.
    return jax.lax.all_to_all(pieces, axes, 0, 0, tiled=True).reshape(ranks * count, -1)


def assemble(
    pieces: Num[jax.Array, "PR piece"], axes: tuple[str, ...], ranks: int, expert: tuple[int, ...]
) -> Num[jax.Array, "R *expert"]:
    """Send pieces to the ranks that need them, and assemble the experts that this rank needs.

    Args:
        pieces: this rank's pieces of the R experts that each rank needs, grouped by rank.
        axes: the mesh axes of the ranks.
        ranks: P, the number of ranks.
        expert: the shape of an expert.

    Returns:
        The R experts that this rank needs.
    """
    pieces_by_rank = pieces.reshape(ranks, -1, pieces.shape[1])
    experts = jnp.swapaxes(jax.lax.all_to_all(pieces_by_rank, axes, 0, 0, tiled=True), 0, 1)
    return experts.reshape(pieces_by_rank.shape[1], -1)[:, : math.prod(expert)].reshape(-1, *expert)


def exchange_residents(
    experts: Float[jax.Array, "homes *expert"], tables: PushTables, topology: Topology, sizes: PushSizes
) -> Float[jax.Array, "slots *expert"]:
    """Push experts from their homes to the resident slots of all ranks, in all layers.

    Args:
        experts: this rank's home experts of all layers, or the same part of each of them.
        tables: the place of every expert in the buffers of each hop.
        topology: the expert-parallel group.
        sizes: the sizes of the buffers.

    Returns:
        The experts of this rank's resident slots in all layers, with zeros in empty slots.
    """
    nodes, local = topology.num_nodes, topology.ranks_per_node
    node = jax.lax.axis_index(NODE)
    rank = node * local + jax.lax.axis_index(LOCAL)

    # Hop 1, inside the home's node: each rank sends a piece of each of its exports to each rank.
    place = tables.export[rank]
    exports = gather_rows(experts, inverse_index(place, sizes.exports), place[:, None])
    pieces = scatter_pieces(exports, (LOCAL,), local)

    # Hop 2, between nodes: a piece of each expert goes to every node that needs it.
    row = in_lanes(tables.export.reshape(nodes, local, -1)[node], sizes.exports).ravel()
    target = jnp.arange(nodes, dtype=jnp.int32)
    lane = in_lanes(tables.crossing[node], sizes.pair, jnp.where(target == node, nodes, target))
    arriving_rows = nodes * sizes.pair + sizes.own
    slot = inverse_index(lane.ravel(), arriving_rows)
    source = jnp.where(slot == EMPTY, EMPTY, row[slot % row.size])
    slot = inverse_index(row, local * sizes.exports)
    crossing = gather_rows(pieces, source, jnp.where((slot == EMPTY)[:, None], EMPTY, lane.T[slot]))
    crossing = swap_lanes(crossing, (NODE,), nodes, sizes.pair)

    # Hop 3, inside this node: the pieces go to the ranks with the resident.
    source = tables.arrival.reshape(nodes, local, -1)[node]
    slots = jax.vmap(lambda rows: inverse_index(rows, arriving_rows))(source)
    pieces = gather_rows(crossing, source.ravel(), in_lanes(slots, source.shape[1]).T)
    return assemble(pieces, (LOCAL,), local, experts.shape[1:])


def in_chunks[Carry](
    fill: Callable[[jax.Array | int, int, Carry], Carry], carry: Carry, columns: int, width: int
) -> Carry:
    """Call ``fill(start, width, carry)`` for one chunk of columns after another, so that only one is sent at a time."""
    if width >= columns:
        return fill(0, columns, carry)
    whole, rest = divmod(columns, width)
    carry = jax.lax.fori_loop(0, whole, lambda i, carry: fill(i * width, width, carry), carry)
    return fill(whole * width, rest, carry) if rest else carry
