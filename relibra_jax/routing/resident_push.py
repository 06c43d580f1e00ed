"""The route of residents' weights from their homes to the ranks that hold them, and of their gradients back.

An expert crosses the slow network once for every node that needs it, however many of its ranks hold it. It crosses in
pieces, so that no rank has to send it alone:

1. inside the node of its home it is cut into G pieces, one for each local rank;
2. every rank sends its piece to the rank of the same local index in each node that needs the expert;
3. inside that node the pieces go to the ranks that hold the expert.

So all links of a node are equally busy, and an expert that every node needs leaves the rank of its home only once.
All layers are sent together, and buffer sizes are sums over layers. The position of each row follows from homes and
residents alone, so every rank can compute it.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.contract.types import EMPTY, Array, Topology
from relibra_jax.routing.segments import places


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PushSizes:
    """Buffer sizes of a push, in experts of all layers together."""

    exports: int
    """The most experts of one rank that are residents somewhere."""
    pair: int
    """The most experts that one node needs from one other node."""
    own: int
    """The most experts that one node needs from itself, which do not cross."""


class PushTables(NamedTuple):
    """Positions of the experts in the buffers of a push, equal on all ranks; int32, EMPTY for none."""

    export: Int[jax.Array, "P slots"]
    """For each of a rank's L * H home slots, the position of its expert among the experts that the rank exports."""
    crossing: Int[jax.Array, "N N slots"]
    """``[from, to]``: for each of a node's G * L * H home slots, the position of its expert among the experts that the
    other node needs."""
    arrival: Int[jax.Array, "P slots"]
    """For each of a rank's L * B resident slots, the row of its expert among the experts that arrive in the node. The
    rows are ordered by the node of the home, and those of the rank's own node come last."""


def push_tables(
    home: Int[Array, "L E"], resident: Int[Array, "L N G B"], topology: Topology, sizes: PushSizes
) -> PushTables:
    """Compute the tables of one push.

    Args:
        home: flat home slot of each expert.
        resident: the expert in each resident slot; EMPTY for none.
        topology: the expert-parallel group.
        sizes: the buffer sizes, which must suffice; `push_fits` checks that.
    """
    nodes, local, homes = topology.num_nodes, topology.ranks_per_node, topology.home_slots
    needed = _needed(home, resident, topology)
    # [node of the home, local rank, L, H], for each node that may need it.
    by_rank = jnp.moveaxis(needed.reshape(nodes, -1, nodes, local, homes), 1, 3)
    exported = by_rank.any(0).reshape(topology.num_ranks, -1)
    crossing = jnp.swapaxes(by_rank.reshape(nodes, nodes, -1), 0, 1)
    place = places(crossing)

    layer = jnp.arange(len(home), dtype=jnp.int32)[:, None, None, None]
    slot = jnp.asarray(home, jnp.int32)[layer, jnp.maximum(resident, 0)]
    rank = slot // homes
    node, here = rank // local, jnp.arange(nodes, dtype=jnp.int32)[None, :, None, None]
    flat = ((rank % local) * len(home) + layer) * homes + slot % homes
    lane = jnp.where(node == here, nodes, node) * sizes.pair
    arrival = jnp.where(resident == EMPTY, EMPTY, lane + place[node, here, flat])
    arrival = jnp.moveaxis(arrival, 0, 2).reshape(topology.num_ranks, -1)
    return PushTables(places(exported), place, arrival)


@functools.partial(jax.jit, static_argnames="topology")
def push_counts(
    home: Int[Array, "L E"], resident: Int[Array, "L N G B"], topology: Topology
) -> tuple[Int[jax.Array, " P"], Int[jax.Array, "N N"]]:
    """Count the experts that each rank exports, and those that each node sends to each node, in one push of all layers.

    Args:
        home: flat home slot of each expert.
        resident: the expert in each resident slot; EMPTY for none.
        topology: the expert-parallel group.

    Returns:
        The counts of the ranks, and the counts of pairs of nodes, ``[from, to]``.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0, resident_slots=1)
    >>> [counts.tolist() for counts in push_counts(jnp.array([[0, 1]]), jnp.array([[[[1]], [[-1]]]]), topology)]
    [[0, 1], [[0, 0], [1, 0]]]
    """
    needed = _needed(home, resident, topology)
    by_rank = needed.reshape(topology.num_nodes, len(home), topology.num_ranks, -1)
    exports = by_rank.any(0).sum((0, 2), dtype=jnp.int32)
    pairs = by_rank.sum((1, 3), dtype=jnp.int32).reshape(topology.num_nodes, topology.num_nodes, -1)
    return exports, pairs.sum(-1, dtype=jnp.int32).T


def push_sizes(
    home: Int[Array, "L E"], resident: Int[Array, "L N G B"], topology: Topology
) -> dict[str, Int[jax.Array, ""]]:
    """Return the smallest `PushSizes` that suffice for a push, by field name, under jit as well."""
    exports, pairs = push_counts(home, resident, topology)
    own = jnp.eye(topology.num_nodes, dtype=bool)
    inside, away = jnp.where(own, pairs, 0), jnp.where(own, 0, pairs)
    return {"exports": exports.max(), "pair": away.max(), "own": inside.max()}


def push_fits(
    home: Int[Array, "L E"], resident: Int[Array, "L N G B"], topology: Topology, sizes: PushSizes
) -> Bool[jax.Array, ""]:
    """Return whether buffers of these sizes suffice for a push."""
    most = push_sizes(home, resident, topology)
    return jnp.stack([most[name] <= size for name, size in dataclasses.asdict(sizes).items()]).all()


def _needed(home, resident, topology: Topology) -> Bool[jax.Array, "N L slots"]:
    """Mark, for every node, the home slots whose experts are residents of the node."""
    nodes, experts = topology.num_nodes, topology.num_experts
    layers = len(home)
    home, resident = jnp.asarray(home, jnp.int32), jnp.asarray(resident, jnp.int32)
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None, None, None]
    node = jnp.arange(nodes, dtype=jnp.int32)[None, :, None, None]
    # One more column, for empty slots.
    slot = jnp.where(resident == EMPTY, experts, home[layer, jnp.maximum(resident, 0)])
    return jnp.zeros((nodes, layers, experts + 1), bool).at[node, layer, slot].set(True)[..., :experts]
