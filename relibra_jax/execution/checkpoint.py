"""Checkpoints in logical expert order, so that a run can resume with a different number of ranks, nodes or slots.

On disk an expert leaf is ``[E, ...]`` (stacked ``[l, E, ...]``) in the order of the expert ids, independent of their
homes. All other leaves are saved unchanged. A save copies the experts to host memory and migrates them there to the
identity placement, layer by layer through device memory, so the caller may donate the live arrays at once. A restore
reads on each rank the experts of its slots under the identity placement, and migrates them to the requested homes.

A step has two Orbax items: ``state``, a flat dict of arrays by name, and ``layout``, JSON with the topology, the homes
and the name, dtype, shape and digest of every array. Orbax writes a step into a separate directory and makes it visible
when it is complete, so an interrupted save leaves the previous step intact. Nothing is pickled.

A save computes digests of the live arrays before it copies anything. A restore compares them with the digests of the
restored live arrays. This detects changes by the disk, a copy or a migration. Orbax (0.12) detects only damage to its
own metadata, because neither Zarr format that it writes has a checksum of the values.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Int, Num, PyTree

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.types import Array, Topology
from relibra_jax.execution.checkpoint_layout import CheckpointLayout, check_arrays, describe, layout_json
from relibra_jax.execution.checkpoint_steps import find_step, raise_together, read_layout, read_state
from relibra_jax.execution.digests import logical_digests
from relibra_jax.execution.expert_labels import ExpertLeaf, expert_leaves
from relibra_jax.execution.logical_order import (
    identity_homes,
    logical_shape,
    logical_sharding,
    regroup,
)
from relibra_jax.execution.migration import migrate_experts
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.random_keys import is_key


class Restored(NamedTuple):
    """A restored checkpoint."""

    step: int
    """The step number of the checkpoint."""
    tree: PyTree
    """The saved tree, with its experts in the slots of ``home``."""
    home: Int[np.ndarray, "L E"]
    """Flat home slot of each expert."""


@checks_arguments
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
    """Save a tree in logical expert order.

    The manager's options decide whether it writes in the background. The caller may donate or change the arrays as soon
    as this function returns. Until the write is done, a copy of the experts takes host memory (``pinned_host``). If
    there are several processes, every process must call it.

    Args:
        manager: an Orbax checkpoint manager created without item names or handlers. Its step names must end in the step
            number.
        step: the step number of the checkpoint.
        tree: parameters, optimizer state, planner state and counters, as arrays, typed keys and Python numbers.
        home: ``[L, E]``, the current flat home slot of each expert.
        layers: the layer of each leaf, as for `migrate_experts`: a prefix of ``tree``, with None for leaves without
            experts.
        mesh: the device mesh, with the axes node and local.
        topology: the expert-parallel group, with N, G, H and E.

    Returns:
        True if the manager saved a checkpoint; False if its policy skips this step.

    Raises:
        ValueError: if two leaves have the same name, or under the conditions of `migrate_experts`.
    """
    homes = check_homes(home, topology.num_experts)
    leaves = _by_name(expert_leaves(tree, layers, num_layers=len(homes), mesh=mesh, topology=topology))
    if not manager.should_save(step):
        return False
    leaves = _saved_leaves(leaves)
    digests = logical_digests(leaves, homes)
    experts = {name: leaf for name, leaf in leaves.items() if leaf.layers is not None}
    logical = migrate_experts(
        {name: _host_copy(leaf.array) for name, leaf in experts.items()},
        homes,
        identity_homes(homes),
        layers={name: leaf.layers for name, leaf in experts.items()},
        mesh=mesh,
        topology=topology,
    )
    state = {
        name: regroup(logical.pop(name), leaf, merge=True) if name in experts else leaf.array
        for name, leaf in leaves.items()
    }
    arrays = {name: describe(array) for name, array in state.items()}
    layout = layout_json(CheckpointLayout(topology, homes, arrays, digests))
    args = ocp.args.Composite(state=ocp.args.StandardSave(state), layout=ocp.args.JsonSave(layout))
    return manager.save(step, args=args)


@checks_arguments
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
    """Restore a checkpoint onto a mesh, which may differ from the mesh that saved it.

    If there are several processes, every process must call it. If one process fails, all of them raise.

    Args:
        manager: the Orbax checkpoint manager of the directory.
        like: a tree with the saved structure for this mesh: arrays, which are not changed, or `jax.ShapeDtypeStruct`
            with shardings. Restored arrays have the `NamedSharding` of their leaf, or else are replicated over the
            mesh. NumPy arrays and Python numbers keep their types.
        layers: the layer of each leaf, as for `migrate_experts`: a prefix of ``like``, with None for leaves without
            experts.
        mesh: the device mesh, with the axes node and local.
        topology: the expert-parallel group of the resumed run.
        home: ``[L, E]``, the homes of the restored experts. None takes the saved ones. Saved flat home slots are a
            valid placement for a different number of ranks too, and the next batch improves it.
        step: the step number of the checkpoint. None takes the latest.
        verify: whether to compare every array with its saved digest.

    Returns:
        The step number, the tree and the homes of its experts.

    Raises:
        ValueError: if there is no checkpoint of this step, it belongs to another model, the homes of a layer are not a
            permutation, or leaves have a different layout. Also if the checkpoint cannot be read or has changed since
            it was saved: the message has the array, if it is known, and the newest earlier step.
    """
    step = find_step(manager, step)
    layout = read_layout(manager, step, verify=verify)
    num_experts = layout.topology.num_experts
    if num_experts != topology.num_experts:
        raise ValueError(
            f"step {step} has {num_experts} experts, but the model has num_experts={topology.num_experts}"
        )
    identity = identity_homes(layout.home)
    homes = check_homes(layout.home if home is None else home, topology.num_experts)
    if len(homes) != len(identity):
        raise ValueError(
            f"step {step} has homes for {len(identity)} layers, but home has {len(homes)} layers"
        )

    leaves = _by_name(expert_leaves(like, layers, num_layers=len(homes), mesh=mesh, topology=topology))
    arrays = {name: _saved_form(leaf, mesh) for name, leaf in leaves.items()}
    check_arrays(step, layout.arrays, arrays)
    state = read_state(manager, step, arrays)
    values = [_live_form(state.pop(name), leaf) for name, leaf in leaves.items()]
    tree = jax.tree.unflatten(jax.tree.structure(like), values)
    tree = migrate_experts(tree, identity, homes, layers=layers, mesh=mesh, topology=topology)
    if verify:
        leaves = _by_name(expert_leaves(tree, layers, num_layers=len(homes), mesh=mesh, topology=topology))
        digests = logical_digests(_saved_leaves(leaves), homes)
        changed = [name for name in digests if digests[name] != layout.digests[name]]
        raise_together(manager, step, _describe_changes(changed))
    return Restored(step, tree, homes)


def _by_name(leaves: list[ExpertLeaf]) -> dict[str, ExpertLeaf]:
    """Index leaves by their names on disk, such as ``params.layers.0.experts``."""
    by_name: dict[str, ExpertLeaf] = {}
    for leaf in leaves:
        name = jax.tree_util.keystr(leaf.path, simple=True, separator=".") or "tree"
        if name in by_name:
            raise ValueError(f"two leaves of the tree have the name {name!r}: rename one of them")
        by_name[name] = leaf
    return by_name


def _host_copy(array: jax.Array) -> jax.Array:
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"), may_alias=False)


def _saved_leaves(leaves: dict[str, ExpertLeaf]) -> dict[str, ExpertLeaf]:
    """Convert the leaves without experts to the arrays that a checkpoint saves."""
    return {
        name: leaf if leaf.layers is not None else leaf._replace(array=_saved_array(leaf.array))
        for name, leaf in leaves.items()
    }


def _saved_array(value: Any) -> jax.Array | np.ndarray:
    """Return the array that a checkpoint saves for a leaf without experts."""
    # Orbax copies global arrays to the host before its save returns. Other arrays are copied here.
    if is_key(value):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not isinstance(value.sharding, SingleDeviceSharding):
        return value
    return np.array(value)


def _saved_form(leaf: ExpertLeaf, mesh: Mesh) -> jax.ShapeDtypeStruct | np.ndarray:
    """Return the shape, dtype and sharding of a leaf on disk."""
    array = leaf.array
    if leaf.layers is not None:
        sharding = logical_sharding(array.sharding, leaf)
        return jax.ShapeDtypeStruct(logical_shape(leaf), array.dtype, sharding=sharding)
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        return np.asarray(array)
    sharding = (
        array.sharding if isinstance(array.sharding, NamedSharding) else NamedSharding(mesh, PartitionSpec())
    )
    data = jax.eval_shape(jax.random.key_data, array) if is_key(array) else array
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _live_form(value: Any, leaf: ExpertLeaf) -> Any:
    if leaf.layers is not None:
        return regroup(value, leaf, merge=False)
    if is_key(leaf.array):
        impl: list[Any] = []
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf.array)
        return jax.random.wrap_key_data(value, impl=impl[0])
    if isinstance(leaf.array, bool | int | float | complex):
        return type(leaf.array)(value)
    return value


def _describe_changes(names: list[str]) -> str | None:
    count = f" (the first of {len(names)} such arrays)" if len(names) > 1 else ""
    return f"array {names[0]!r} has changed since it was saved{count}" if names else None
