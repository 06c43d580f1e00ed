"""Migration of experts to new homes between batches: parameters and their optimizer state, bit for bit.

Only experts that leave their rank travel. Each is cut into P pieces, one for each rank, and the pieces go through two
exchanges. Rank p first collects piece p of all experts on the move, then sorts the pieces by new home and sends them
on. In both exchanges every pair of ranks exchanges equally much for any homes, so the homes are data to the compiled
program. A rank sends twice the bytes of its leaving experts and never holds more than its own share. A padded
exchange straight from home to home would need P times the memory of the worst pair of ranks.

The compiled program depends on one size: the largest number of experts that leave a rank, rounded up to a power of two.
There are at most ``ceil(log2(H)) + 2`` programs for each kind of leaf.

Layers move one at a time in donated buffers, in a few chunks along a feature dimension. Temporary memory is about one
rank's share of one layer. A leaf in host memory stays there, and its layers pass through device memory.

A move is a transaction. Signals wait until it ends. If a step of it fails, the steps before it are undone, and
`MoveError` has the tree with its experts in their old homes.
"""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Num, PyTree, Shaped

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.types import Array, Topology
from relibra_jax.execution.expert_labels import ExpertLeaf, expert_leaves, leaf_name, slot_spec
from relibra_jax.execution.mesh import RANKS
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.interrupts import signals_deferred

CHUNKS: Final = 4
"""The number of parts in which a layer travels, one after another."""


class MoveTables(NamedTuple):
    """The moves of one layer's experts between P ranks with H home slots each; at most m experts leave a rank."""

    leave: Int[Array, "P m"]
    """The slots of each rank whose experts leave; padding is any slot."""
    order: Int[Array, " P*m"]
    """The departure, numbered over all ranks, that becomes each arrival, rank by rank."""
    source: Int[Array, "P H"]
    """The source of each slot's new expert: one of the rank's slots h, or H + a for its arrival a."""


class MoveError(jax.errors.JaxRuntimeError):
    """A move of experts that failed. Its message begins with that of its cause.

    Attributes:
        tree: the tree with its experts in their old homes, which replaces the donated one. None if some were lost.
    """

    def __init__(self, cause: Exception, what: str, tree: PyTree | None):
        super().__init__(f"{' '.join(str(cause).split()) or type(cause).__name__}; {what}")
        self.tree = tree


@checks_arguments
def migrate_experts(
    tree: PyTree,
    old_home: Num[Array, "..."],
    new_home: Num[Array, "..."],
    *,
    layers: PyTree,
    mesh: Mesh,
    topology: Topology,
) -> PyTree:
    """Move experts from their old home slots to their new ones, between batches and outside jit.

    The function donates the leaves that move, so use only the result afterwards. Shardings, memory kinds and bits stay
    the same. If there are several processes, every process must call it with the same homes.

    Args:
        tree: parameters, optimizer state or both. A leaf with experts is ``[N, G, H, ...]``, or ``[l, N, G, H, ...]``
            for l stacked layers. It is sharded over node and local, and optionally over other mesh axes after H, in
            device or ``pinned_host`` memory.
        old_home: ``[L, E]``, the current flat home slot of each expert.
        new_home: ``[L, E]``, the new flat home slot of each expert (``Plan.home``).
        layers: the layer of each leaf, a prefix of ``tree``: an int, a range for a stacked leaf, or None for a leaf
            without experts. `optimizer_layers` gives it for optimizer state.
        mesh: the device mesh, with the axes node and local.
        topology: the expert-parallel group, with N, G, H and E.

    Returns:
        ``tree`` with its experts in their new homes.

    Raises:
        ValueError: before compilation and before any move, if the homes of a layer are not a permutation, the mesh does
            not fit the topology, or a leaf has no label or a different layout.
        MoveError: if a step fails, for example because memory runs out.

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
        raise ValueError(f"old_home has {len(old)} layers, but new_home has {len(new)}")
    leaves = expert_leaves(tree, layers, num_layers=len(old), mesh=mesh, topology=topology)
    _check_no_aliases(leaves)
    there, back = (
        {
            layer: move_tables(start[layer], end[layer], topology)
            for layer in np.flatnonzero((old != new).any(-1)).tolist()
        }
        for start, end in ((old, new), (new, old))
    )
    structure, moves = jax.tree.structure(tree), _Moves(leaves)
    with signals_deferred():
        try:
            moves.run(there)
        except Exception as error:
            what = f"moving experts failed at move {len(moves.done) + 1}"
            try:
                moves.undo(back)
            except Exception:
                raise MoveError(error, f"{what}, and some of them are lost", None) from error
            old = jax.tree.unflatten(structure, moves.arrays)
            raise MoveError(error, f"{what}; all of them are at their old homes again", old) from error
    return jax.tree.unflatten(structure, moves.arrays)


@functools.cache
def migration_step(sharding: NamedSharding, *, stacked: bool) -> Callable[..., jax.Array]:
    """Build the jitted function that moves the experts of one layer of a leaf, the only program of `migrate_experts`.

    Args:
        sharding: the sharding of the leaf, which the function donates, and of the result. Every mesh axis is manual.
        stacked: whether the leaf has a leading dimension of layers.

    Returns:
        ``step(leaf, layer, tables)``, where ``layer`` is an int32 scalar: an index into a stacked leaf, and 0
        otherwise. Layer and tables are data. ``migration_step(s, stacked=False).lower(leaf, 0, tables).compile()``
        shows the program.
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
    """Compute the moves of one layer's experts on the host, as NumPy arrays.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> [table.tolist() for table in move_tables(np.array([0, 1, 2, 3]), np.array([1, 2, 0, 3]), topology)]
    [[[1], [0]], [1, 0], [[2, 0], [2, 1]]]
    """
    num_ranks, home_slots = topology.num_ranks, topology.home_slots
    start, end = old_home // home_slots, new_home // home_slots
    leaves_rank = start != end
    largest = int(np.bincount(start[leaves_rank], minlength=num_ranks).max())
    count = min(home_slots, 1 << (largest - 1).bit_length()) if largest else 0
    start, end = start[leaves_rank], end[leaves_rank]
    old_slot, new_slot = old_home[leaves_rank] % home_slots, new_home[leaves_rank]
    departure, arrival = start * count + _occurrence(start), end * count + _occurrence(end)
    leave, order = np.zeros((2, num_ranks * count), np.int32)
    leave[departure], order[arrival] = old_slot, departure
    source = np.zeros(topology.num_experts, np.int32)
    source[new_home] = old_home % home_slots
    source[new_slot] = home_slots + arrival - end * count
    return MoveTables(leave.reshape(num_ranks, count), order, source.reshape(num_ranks, home_slots))


def _check_no_aliases(leaves: list[ExpertLeaf]) -> None:
    """Raise ValueError if two expert leaves are the same array, which cannot be donated twice."""
    first: dict[int, ExpertLeaf] = {}
    for leaf in leaves:
        alias = first.setdefault(id(leaf.array), leaf)
        if alias is not leaf and (leaf.layers, alias.layers) != (None, None):
            raise ValueError(
                f"tree{leaf_name(alias.path)} and tree{leaf_name(leaf.path)} are the same array: copy one of them"
            )


class _Moves:
    """The moves of all leaves: one step for each layer of each leaf, in donated buffers."""

    def __init__(self, leaves: list[ExpertLeaf]):
        self.arrays = [leaf.array for leaf in leaves]
        self.done: list[tuple[int, int, int]] = []
        self._leaves = leaves

    def run(self, tables: dict[int, MoveTables]) -> None:
        """Run all steps whose layer has tables, and wait for them."""
        for number, leaf in enumerate(self._leaves):
            for index, layer in enumerate(leaf.layer_numbers):
                if layer in tables:
                    self._step(number, index, tables[layer])
                    self.done.append((number, index, layer))
        self._wait()

    def undo(self, tables: dict[int, MoveTables]) -> None:
        """Undo the steps that were done, with the tables of the moves back.

        Raises:
            RuntimeError: if there are several processes, of which others may have moved on.
        """
        if jax.process_count() > 1:
            raise RuntimeError("moves of several processes cannot be undone by one of them")
        for number, index, layer in reversed(self.done):
            self._step(number, index, tables[layer])
        self._wait()

    def _step(self, number: int, index: int, tables: MoveTables) -> None:
        array = self.arrays[number]
        step = migration_step(array.sharding, stacked=self._leaves[number].stacked)
        self.arrays[number] = step(array, np.int32(index), tables)

    def _wait(self) -> None:
        """Wait for the arrays. A lost array raises."""
        jax.block_until_ready(
            [array for array, leaf in zip(self.arrays, self._leaves, strict=True) if leaf.layers is not None]
        )


def _move_part(
    leaf: Shaped[jax.Array, "..."], layer: jax.Array, tables: MoveTables, *, stacked: bool
) -> jax.Array:
    """Move the experts of one layer in this rank's part of a leaf, ``[(l,) 1, 1, H, ...]``."""
    leading = 3 + stacked
    if leaf.ndim == leading:
        return _move_part(leaf[..., None], layer, tables, stacked=stacked)[..., 0]
    # Each chunk is reshaped by itself, because XLA would copy the whole part if that were reshaped.
    axis = max(range(leading, leaf.ndim), key=lambda dimension: leaf.shape[dimension])
    width = -(-leaf.shape[axis] // CHUNKS)

    def move_chunk(leaf, start, width):
        shape, index = list(leaf.shape), [jnp.int32(0)] * leaf.ndim
        shape[axis], index[axis] = width, jnp.int32(start)
        if stacked:
            shape[0], index[0] = 1, layer
        rows = _to_bits(jax.lax.dynamic_slice(leaf, index, shape)).reshape(tables.source.shape[1], -1)
        rows = _from_bits(_exchange(rows, tables).reshape(shape), leaf.dtype)
        return jax.lax.dynamic_update_slice(leaf, rows, index)

    whole, rest = divmod(leaf.shape[axis], width)
    leaf = jax.lax.fori_loop(0, whole, lambda i, leaf: move_chunk(leaf, i * width, width), leaf)
    return move_chunk(leaf, whole * width, rest) if rest else leaf


def _exchange(rows: Shaped[jax.Array, "H f"], tables: MoveTables) -> Shaped[jax.Array, "H f"]:
    """Exchange the rows of a rank's slots, one row per slot, so that every slot gets the row of its new expert."""
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
    """Convert floats to integers of their width, since a backend may widen small floats on the way and change NaNs."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values
    return jax.lax.bitcast_convert_type(values, f"uint{jnp.finfo(values.dtype).bits}")


def _from_bits(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype) if jnp.issubdtype(dtype, jnp.floating) else bits


def _occurrence(values: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Count how often each value occurred before its index: ``[7, 8, 7]`` gives ``[0, 0, 1]``."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    counts = np.empty_like(order)
    counts[order] = np.arange(len(values)) - np.searchsorted(ascending, ascending)
    return counts
