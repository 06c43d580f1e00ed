"""The exchange that brings experts to resident slots, as one rank sees it, inside shard_map: three hops, in pieces.

`relibra_jax.resident_push` says who sends what, and why. JAX transposes it: gradients are summed where pieces were
copied, in a fixed order.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float

from relibra_jax.execution.exchange import swap_lanes
from relibra_jax.execution.expert_pieces import assemble, scatter_pieces
from relibra_jax.execution.gather import gather_rows, inverse_index
from relibra_jax.execution.mesh import LOCAL, NODE
from relibra_jax.resident_push import PushSizes, PushTables
from relibra_jax.segments import in_lanes
from relibra_jax.types import EMPTY, Topology


def exchange_residents(
    experts: Float[jax.Array, "homes *expert"], tables: PushTables, topology: Topology, sizes: PushSizes
) -> Float[jax.Array, "slots *expert"]:
    """The experts of this rank's resident slots in all layers, zeros in empty ones.

    Args:
        experts: this rank's home experts of all layers, or the same part of each of them.
        tables: where experts stand on their way.
        topology: the expert-parallel group.
        sizes: the sizes of the buffers.
    """
    nodes, local = topology.num_nodes, topology.ranks_per_node
    node = jax.lax.axis_index(NODE)
    me = node * local + jax.lax.axis_index(LOCAL)

    # Inside the home's node: from each rank its exports, a piece of them to each.
    place = tables.export[me]
    exports = gather_rows(experts, inverse_index(place, sizes.exports), place[:, None])
    pieces = scatter_pieces(exports, (LOCAL,), local)

    # To the nodes: a piece of each expert that they need.
    row = in_lanes(tables.export.reshape(nodes, local, -1)[node], sizes.exports).ravel()
    to = jnp.arange(nodes, dtype=jnp.int32)
    lane = in_lanes(tables.crossing[node], sizes.pair, jnp.where(to == node, nodes, to))
    arriving = nodes * sizes.pair + sizes.own
    slot = inverse_index(lane.ravel(), arriving)
    source = jnp.where(slot == EMPTY, EMPTY, row[slot % row.size])
    slot = inverse_index(row, local * sizes.exports)
    crossing = gather_rows(pieces, source, jnp.where((slot == EMPTY)[:, None], EMPTY, lane.T[slot]))
    crossing = swap_lanes(crossing, (NODE,), nodes, sizes.pair)

    # Inside this node: pieces to the ranks that hold the expert.
    wanted = tables.wanted.reshape(nodes, local, -1)[node]
    takers = jax.vmap(lambda rows: inverse_index(rows, arriving))(wanted)
    taken = gather_rows(crossing, wanted.ravel(), in_lanes(takers, wanted.shape[1]).T)
    return assemble(taken, (LOCAL,), local, experts.shape[1:])


def in_chunks[Carry](
    fill: Callable[[jax.Array | int, int, Carry], Carry], carry: Carry, columns: int, width: int
) -> Carry:
    """``fill(start, width, carry)`` for one chunk of columns after another, so that no more than one is on its way."""
    if width >= columns:
        return fill(0, columns, carry)
    whole, rest = divmod(columns, width)
    carry = jax.lax.fori_loop(0, whole, lambda i, carry: fill(i * width, width, carry), carry)
    return fill(whole * width, rest, carry) if rest else carry
