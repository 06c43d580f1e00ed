"""Experts change their homes between batches: parameters and the optimizer state that belongs to them, bit for bit.

Only experts that leave their rank travel. Every one is cut into P pieces, one for each rank, and the pieces are
exchanged twice: rank p collects piece p of all experts on the move, puts them in the order of their new homes, and
sends them on. Both exchanges have equal parts for every pair of ranks, whatever the homes are, so the homes are
data to the compiled program. A rank sends twice what it gives away and never holds more than its own share; a
padded exchange straight from home to home would need room for the worst pair of ranks, P times.

One compiled size is left, the number of experts that leave a rank (the largest of the layer), rounded up to a power
of two: at most ``ceil(log2(H)) + 2`` programs for each kind of leaf.

Layers move one at a time in donated buffers, in a few chunks along a feature dimension: temporary memory is about
one rank's share of one layer. A leaf in host memory stays there; the layers pass through device memory.
"""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Num, PyTree, Shaped

from relibra_jax.execution.expert_labels import ExpertLeaf, expert_leaves, leaf_name, slot_spec
from relibra_jax.execution.mesh import RANKS
from relibra_jax.plan_check import check_homes
from relibra_jax.types import Array, Topology

CHUNKS: Final = 4
"""Parts of a layer that travel one after another."""


class MoveTables(NamedTuple):
    """Where the experts of one layer go: P ranks of H home slots, at most m experts leave a rank."""

    leave: Int[Array, "P m"]
    """The slots whose experts leave; any slot as padding."""
    order: Int[Array, " P*m"]
    """For each arrival, by rank: which departure it is, counted over all ranks."""
    source: Int[Array, "P H"]
    """What each slot holds afterwards: one of the rank's slots, or H + one of its arrivals."""


def migrate_experts(
    tree: PyTree,
    old_home: Num[Array, "..."],
    new_home: Num[Array, "..."],
    *,
    layers: PyTree,
    mesh: Mesh,
    topology: Topology,
) -> PyTree:
    """Move experts from the slots of ``old_home`` to those of ``new_home``: between batches, outside jit.

    The leaves that move are donated: go on with the result. Shardings and memory kinds stay, and so do the bits. On
    several processes, all call it with the same homes.

    Args:
        tree: parameters, optimizer state or both. A leaf with experts is ``[N, G, H, ...]``, or ``[l, N, G, H, ...]``
            for l stacked layers, sharded over node and local, by choice over further mesh axes behind H; in device
            or in ``pinned_host`` memory.
        old_home: ``[L, E]``, flat home slot of each expert so far.
        new_home: ``[L, E]``, flat home slot of each expert from now on (``Plan.home``).
        layers: the layer of each leaf, a prefix of ``tree``: an int, a range for a stacked leaf, or None for a leaf
            that holds no experts. For optimizer state see `optimizer_layers`.
        mesh: the device mesh, with the axes node and local.
        topology: the expert-parallel group, which gives N, G, H and E.

    Returns:
        ``tree`` with its experts in their new homes.

    Raises:
        ValueError: if homes are no permutations, the mesh is another, or a leaf has no label or another layout; before
            anything is compiled or moved.

    >>> from relibra_jax.execution.mesh import expert_mesh, rank_sharding
    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=3, replica_slots=0)
    >>> mesh = expert_mesh(topology, devices=jax.devices()[:1])
    >>> tree = {"experts": jax.device_put(jnp.array([[[5.0, 6.0, 7.0]]]), rank_sharding(mesh)), "router": 1}
    >>> old, new = np.array([[0, 1, 2]]), np.array([[2, 0, 1]])
    >>> migrate_experts(tree, old, new, layers={"experts": 0, "router": None}, mesh=mesh, topology=topology)
    {'experts': Array([[[6., 7., 5.]]], dtype=float32), 'router': 1}
    """
    old, new = (
        check_homes(home, topology.num_experts, name)
        for home, name in ((old_home, "old_home"), (new_home, "new_home"))
    )
    if len(old) != len(new):
        raise ValueError(f"old_home has {len(old)} layers, new_home {len(new)}")
    leaves = expert_leaves(tree, layers, num_layers=len(old), mesh=mesh, topology=topology)
    _refuse_aliases(leaves)
    tables = {
        layer: move_tables(old[layer], new[layer], topology)
        for layer in range(len(old))
        if (old[layer] != new[layer]).any()
    }
    moved = [leaf.array if leaf.layers is None else _migrate(leaf, tables) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), moved)


@functools.cache
def migration_step(sharding: NamedSharding, *, stacked: bool) -> Callable[..., jax.Array]:
    """The jitted function that moves the experts of one layer of a leaf; `migrate_experts` calls nothing else.

    Args:
        sharding: the sharding of the leaf, which is donated, and of the result; every mesh axis is manual.
        stacked: whether the leaf has a leading dimension of layers.

    Returns:
        ``step(leaf, layer, tables)``; ``layer``, an int32 scalar, is an index into a stacked leaf and 0 otherwise. Both
        are data. To look at its program: ``migration_step(s, stacked=False).lower(leaf, 0, tables).compile()``.
    """
    in_device_memory = sharding.memory_kind in (None, "device")

    def move(leaf, layer, tables):
        spec = slot_spec(sharding, stacked=stacked)
        part = functools.partial(_move_part, stacked=stacked)
        return jax.shard_map(
            part, mesh=sharding.mesh, in_specs=(spec, PartitionSpec(), PartitionSpec()), out_specs=spec
        )(leaf, layer, tables)

    def move_experts(leaf, layer, tables):
        if in_device_memory:
            return move(leaf, layer, tables)
        rows = jax.lax.dynamic_slice_in_dim(leaf, layer, 1) if stacked else leaf
        rows = jax.device_put(rows, sharding.with_memory_kind("device"))
        rows = jax.device_put(move(rows, jnp.int32(0), tables), sharding)
        return jax.lax.dynamic_update_slice_in_dim(leaf, rows, layer, 0) if stacked else rows

    return jax.jit(move_experts, donate_argnums=0, out_shardings=sharding)


def move_tables(
    old_home: Int[np.ndarray, " E"], new_home: Int[np.ndarray, " E"], topology: Topology
) -> MoveTables:
    """The tables by which the experts of one layer find their way, NumPy arrays made on the host.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> [table.tolist() for table in move_tables(np.array([0, 1, 2, 3]), np.array([1, 2, 0, 3]), topology)]
    [[[1], [0]], [1, 0], [[2, 0], [2, 1]]]
    """
    num_ranks, home_slots = topology.num_ranks, topology.home_slots
    start, end = old_home // home_slots, new_home // home_slots
    away = start != end
    most = int(np.bincount(start[away], minlength=num_ranks).max())
    count = min(home_slots, 1 << (most - 1).bit_length()) if most else 0
    start, end, old_slot, new_slot = start[away], end[away], old_home[away] % home_slots, new_home[away]
    departure, arrival = start * count + _occurrence(start), end * count + _occurrence(end)
    leave, order = np.zeros((2, num_ranks * count), np.int32)
    leave[departure], order[arrival] = old_slot, departure
    source = np.zeros(topology.num_experts, np.int32)
    source[new_home] = old_home % home_slots
    source[new_slot] = home_slots + arrival - end * count
    return MoveTables(leave.reshape(num_ranks, count), order, source.reshape(num_ranks, home_slots))


def _refuse_aliases(leaves: list[ExpertLeaf]) -> None:
    """An array that stands at two places cannot be donated twice."""
    first: dict[int, ExpertLeaf] = {}
    for leaf in leaves:
        twin = first.setdefault(id(leaf.array), leaf)
        if twin is not leaf and (leaf.layers, twin.layers) != (None, None):
            raise ValueError(
                f"tree{leaf_name(twin.path)} and tree{leaf_name(leaf.path)} are one array: copy one"
            )


def _migrate(leaf: ExpertLeaf, tables: dict[int, MoveTables]) -> jax.Array:
    array = leaf.array
    for index, layer in enumerate(leaf.rows):
        if layer in tables:
            array = migration_step(array.sharding, stacked=leaf.stacked)(
                array, np.int32(index), tables[layer]
            )
    return array


def _move_part(
    leaf: Shaped[jax.Array, "..."], layer: jax.Array, tables: MoveTables, *, stacked: bool
) -> jax.Array:
    """This rank's part of a leaf, ``[(l,) 1, 1, H, ...]``, with the experts of one layer moved."""
    leading = 3 + stacked
    if leaf.ndim == leading:
        return _move_part(leaf[..., None], layer, tables, stacked=stacked)[..., 0]
    # Reshaping the whole part instead of each chunk would make XLA copy it.
    axis = max(range(leading, leaf.ndim), key=lambda dimension: leaf.shape[dimension])
    width = -(-leaf.shape[axis] // CHUNKS)

    def move_chunk(leaf, start, width):
        shape, at = list(leaf.shape), [jnp.int32(0)] * leaf.ndim
        shape[axis], at[axis] = width, jnp.int32(start)
        if stacked:
            shape[0], at[0] = 1, layer
        rows = _to_bits(jax.lax.dynamic_slice(leaf, at, shape)).reshape(tables.source.shape[1], -1)
        rows = _from_bits(_exchange(rows, tables).reshape(shape), leaf.dtype)
        return jax.lax.dynamic_update_slice(leaf, rows, at)

    whole, rest = divmod(leaf.shape[axis], width)
    leaf = jax.lax.fori_loop(0, whole, lambda i, leaf: move_chunk(leaf, i * width, width), leaf)
    return move_chunk(leaf, whole * width, rest) if rest else leaf


def _exchange(rows: Shaped[jax.Array, "H f"], tables: MoveTables) -> Shaped[jax.Array, "H f"]:
    """One row a slot before, one row a slot after."""
    me = jax.lax.axis_index(RANKS)
    ranks, count = tables.leave.shape
    if count:
        leaving = jnp.pad(rows[tables.leave[me]], ((0, 0), (0, -rows.shape[1] % ranks)))
        pieces = jax.lax.all_to_all(leaving.reshape(count, ranks, -1), RANKS, 1, 0)
        ordered = pieces.reshape(ranks * count, -1)[tables.order].reshape(pieces.shape)
        arrived = jax.lax.all_to_all(ordered, RANKS, 0, 1).reshape(count, -1)
        rows = jnp.concatenate([rows, arrived[:, : rows.shape[1]]])
    return rows[tables.source[me]]


def _to_bits(values: jax.Array) -> jax.Array:
    """Floats as integers of their width, since a backend may carry small floats as larger ones, NaNs changed."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values
    return jax.lax.bitcast_convert_type(values, f"uint{jnp.finfo(values.dtype).bits}")


def _from_bits(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype) if jnp.issubdtype(dtype, jnp.floating) else bits


def _occurrence(values: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """How often each value has come before: ``[7, 8, 7]`` gives ``[0, 0, 1]``."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    counted = np.empty_like(order)
    counted[order] = np.arange(len(values)) - np.searchsorted(ascending, ascending)
    return counted
