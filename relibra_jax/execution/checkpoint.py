"""Checkpoints in logical expert order, so that a run goes on with another number of ranks, nodes or slots.

On disk an expert leaf is ``[E, ...]`` (stacked ``[l, E, ...]``), expert by expert as the model counts them, whatever
homes were in force; all else is saved as it is. To save, experts are copied to host memory and migrated there to the
identity placement, layer by layer through device memory, so the live arrays are free to be donated at once. To
restore, each rank reads the experts of its slots under the identity and they migrate to the wanted homes.

A step is two Orbax items: ``state``, a flat dict of arrays by name, and ``layout``, JSON with the topology, the homes
and the name, dtype, shape and digest of every array. Orbax writes a step into a directory of its own and makes it
visible when it is complete: an interrupted save leaves the last good step alone. Nothing is pickled.

Digests are taken from the live arrays before anything is copied, and compared with those of the live arrays after a
restore: what a disk, a copy or a migration has altered on the way is noticed. Orbax (0.12) notices damage to its own
metadata alone: neither Zarr format that it writes has a checksum of the values.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Int, Num, PyTree

from relibra_jax.execution.checkpoint_layout import Layout, check_arrays, describe, layout_json
from relibra_jax.execution.checkpoint_steps import find_step, raise_together, read_layout, read_state
from relibra_jax.execution.digests import logical_digests
from relibra_jax.execution.expert_labels import ExpertLeaf, expert_leaves, slot_spec
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.migration import migrate_experts
from relibra_jax.plan_check import check_homes
from relibra_jax.types import Array, Topology


class Restored(NamedTuple):
    """A checkpoint in memory."""

    step: int
    """The step it was saved at."""
    tree: PyTree
    """What was saved, its experts in the slots of ``home``."""
    home: Int[np.ndarray, "L E"]
    """Flat home slot of each expert."""


def save_checkpoint(
    manager: ocp.CheckpointManager,
    step: int,
    tree: PyTree,
    home: Num[Array, "..."],
    *,
    layers: PyTree,
    mesh: Mesh,
    topology: Topology,
) -> bool:
    """Save ``tree`` as it is now; the manager's options say whether writing goes on in the background.

    What is saved is what was there when this was called: the arrays may be donated or changed right afterwards. In
    host memory (``pinned_host``) it takes a copy of the experts until the write is done. On several processes, all
    call it.

    Args:
        manager: an Orbax manager made without item names or handlers; the names of its steps end in their numbers.
        step: the number to save under.
        tree: parameters, optimizer state, planner state, counters: arrays, typed keys and Python numbers.
        home: ``[L, E]``, flat home slot of each expert, in force.
        layers: the layer of each expert leaf, None for others, a prefix of ``tree``, as for `migrate_experts`.
        mesh: the device mesh, with the axes node and local.
        topology: the expert-parallel group, which gives N, G, H and E.

    Returns:
        Whether the manager wanted a checkpoint of this step, as ``manager.save``.

    Raises:
        ValueError: if two leaves have one name, or as `migrate_experts` says.
    """
    homes = check_homes(home, topology.num_experts)
    leaves = _named(expert_leaves(tree, layers, num_layers=len(homes), mesh=mesh, topology=topology))
    if not manager.should_save(step):
        return False
    leaves = _plain(leaves)
    digests = logical_digests(leaves, homes)
    experts = {name: leaf for name, leaf in leaves.items() if leaf.layers is not None}
    logical = migrate_experts(
        {name: _host_copy(leaf.array) for name, leaf in experts.items()},
        homes,
        _identity(homes),
        layers={name: leaf.layers for name, leaf in experts.items()},
        mesh=mesh,
        topology=topology,
    )
    state = {
        name: _regroup(logical.pop(name), leaf, merge=True) if name in experts else leaf.array
        for name, leaf in leaves.items()
    }
    arrays = {name: describe(array) for name, array in state.items()}
    layout = layout_json(Layout(topology, homes, arrays, digests))
    args = ocp.args.Composite(state=ocp.args.StandardSave(state), layout=ocp.args.JsonSave(layout))
    return manager.save(step, args=args)


def restore_checkpoint(
    manager: ocp.CheckpointManager,
    like: PyTree,
    *,
    layers: PyTree,
    mesh: Mesh,
    topology: Topology,
    home: Num[Array, "..."] | None = None,
    step: int | None = None,
    verify: bool = True,
) -> Restored:
    """Restore a checkpoint onto ``mesh``, which need not be the one it was saved from.

    On several processes, all call it, and all raise where one of them cannot go on.

    Args:
        manager: the Orbax manager of the directory that it was saved to.
        like: a tree of the saved structure for this mesh: arrays, which stay as they are, or `jax.ShapeDtypeStruct`
            with shardings. Arrays come back with their `NamedSharding`, or else replicated over the mesh; NumPy arrays
            and Python numbers as such.
        layers: the layer of each expert leaf, None for others, a prefix of ``like``, as for `migrate_experts`.
        mesh: the device mesh, with the axes node and local.
        topology: the expert-parallel group of the run that goes on.
        home: ``[L, E]``, the wanted homes; the saved ones when None. Flat home slots mean a placement on other ranks
            too, which the next batch improves.
        step: the latest one when None.
        verify: whether to compare every array with the digest that was saved with it.

    Returns:
        Step, tree and the homes in force.

    Raises:
        ValueError: if there is no such step, the checkpoint is of another model (both sides are named), homes are no
            permutations, or leaves have another layout; if the checkpoint cannot be read or is not what was saved, in
            one line that names the array, where that is known, and the newest step before it.
    """
    step = find_step(manager, step)
    layout = read_layout(manager, step, verify=verify)
    num_experts = layout.topology.num_experts
    if num_experts != topology.num_experts:
        raise ValueError(f"step {step} has {num_experts} experts, the model {topology.num_experts}")
    identity = _identity(layout.home)
    homes = check_homes(layout.home if home is None else home, topology.num_experts)
    if len(homes) != len(identity):
        raise ValueError(f"step {step} has homes of {len(identity)} layers, home has {len(homes)}")

    leaves = _named(expert_leaves(like, layers, num_layers=len(homes), mesh=mesh, topology=topology))
    wanted = {name: _saved_form(leaf, mesh) for name, leaf in leaves.items()}
    check_arrays(step, layout.arrays, wanted)
    state = read_state(manager, step, wanted)
    values = [_live_form(state.pop(name), leaf) for name, leaf in leaves.items()]
    tree = jax.tree.unflatten(jax.tree.structure(like), values)
    tree = migrate_experts(tree, identity, homes, layers=layers, mesh=mesh, topology=topology)
    if verify:
        leaves = _named(expert_leaves(tree, layers, num_layers=len(homes), mesh=mesh, topology=topology))
        found = logical_digests(_plain(leaves), homes)
        altered = [name for name in found if found[name] != layout.digests[name]]
        raise_together(manager, step, _name_altered(altered))
    return Restored(step, tree, homes)


def _named(leaves: list[ExpertLeaf]) -> dict[str, ExpertLeaf]:
    """Leaves by the names that they have on disk: ``params.layers.0.experts``."""
    named: dict[str, ExpertLeaf] = {}
    for leaf in leaves:
        name = jax.tree_util.keystr(leaf.path, simple=True, separator=".") or "tree"
        if name in named:
            raise ValueError(f"two leaves have the name {name!r}")
        named[name] = leaf
    return named


def _identity(home: Int[np.ndarray, "L E"]) -> Int[np.ndarray, "L E"]:
    return np.broadcast_to(np.arange(home.shape[1], dtype=np.int32), home.shape)


def _host_copy(array: jax.Array) -> jax.Array:
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"), may_alias=False)


def _regroup(array: jax.Array, leaf: ExpertLeaf, *, merge: bool) -> jax.Array:
    """``[N, G, H, ...]`` to ``[E, ...]``, or back: the same bytes on each rank. ``array`` is donated."""
    slots = leaf.array.sharding.with_memory_kind(array.sharding.memory_kind)
    logical = _logical_sharding(slots, leaf)
    return _regrouping(slots, logical, stacked=leaf.stacked, merge=merge)(array)


@functools.cache
def _regrouping(
    slots: NamedSharding, logical: NamedSharding, *, stacked: bool, merge: bool
) -> Callable[[jax.Array], jax.Array]:
    specs, shardings = (slot_spec(slots, stacked=stacked), logical.spec), (slots, logical)
    old, new = (0, 1) if merge else (1, 0)
    part = functools.partial(jnp.squeeze if merge else jnp.expand_dims, axis=(stacked, stacked + 1))
    view = jax.shard_map(part, mesh=slots.mesh, in_specs=specs[old], out_specs=specs[new])
    return jax.jit(view, donate_argnums=0, out_shardings=shardings[new])


def _logical_sharding(slots: NamedSharding, leaf: ExpertLeaf) -> NamedSharding:
    stack = (None,) * leaf.stacked
    return slots.update(spec=PartitionSpec(*stack, RANKS, *slots.spec[len(stack) + 3 :]))


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def _plain(leaves: dict[str, ExpertLeaf]) -> dict[str, ExpertLeaf]:
    """``leaves``, those without experts as they are saved."""
    return {
        name: leaf if leaf.layers is not None else leaf._replace(array=_plain_array(leaf.array))
        for name, leaf in leaves.items()
    }


def _plain_array(value: Any) -> jax.Array | np.ndarray:
    """What is saved of a leaf without experts; Orbax copies global arrays to the host before it returns."""
    if _is_key(value):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not isinstance(value.sharding, SingleDeviceSharding):
        return value
    return np.array(value)


def _saved_form(leaf: ExpertLeaf, mesh: Mesh) -> jax.ShapeDtypeStruct | np.ndarray:
    """Shape, dtype and sharding of a leaf as it is on disk."""
    array = leaf.array
    if leaf.layers is not None:
        at = int(leaf.stacked)
        shape = (*array.shape[:at], math.prod(array.shape[at : at + 3]), *array.shape[at + 3 :])
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=_logical_sharding(array.sharding, leaf))
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        return np.asarray(array)
    sharding = (
        array.sharding if isinstance(array.sharding, NamedSharding) else NamedSharding(mesh, PartitionSpec())
    )
    data = jax.eval_shape(jax.random.key_data, array) if _is_key(array) else array
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _live_form(value: Any, leaf: ExpertLeaf) -> Any:
    if leaf.layers is not None:
        return _regroup(value, leaf, merge=False)
    if _is_key(leaf.array):
        impl: list[Any] = []
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf.array)
        return jax.random.wrap_key_data(value, impl=impl[0])
    if isinstance(leaf.array, bool | int | float | complex):
        return type(leaf.array)(value)
    return value


def _name_altered(names: list[str]) -> str | None:
    more = f", the first of {len(names)}" if len(names) > 1 else ""
    return f"array {names[0]!r} is not what was saved{more}" if names else None
