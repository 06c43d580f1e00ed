"""Distribution of model and optimizer arrays over the mesh, for arrays that are not there yet.

Parameters go where their sharding metadata says, and optimizer state goes where its parameters are. A model may be
built without a mesh. The counters of an optimizer always start on one device; the first step would leave them on all
devices, and the second step would then compile again.
"""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relibra_jax.execution.expert_labels import labelled_leaves, optimizer_layers
from relibra_jax.nnx.homes import expert_labels
from relibra_jax.nnx.variables import ExpertParam, is_variable
from relibra_jax.support.random_keys import is_key


def put_on_mesh(model: nnx.Module, optimizer: nnx.Optimizer | None, mesh: Mesh) -> None:
    """Distribute the arrays of a model and its optimizer that are not on the mesh yet, in place.

    Args:
        model: the module. ``nnx.get_partition_spec`` gives the sharding of its variables.
        optimizer: the optimizer of the model, or None. The optimizer state of experts is sharded like the experts, and
            all other state is replicated.
        mesh: the device mesh.
    """
    state = nnx.state(model)
    if not all(_on_mesh(array, mesh) for array in jax.tree.leaves(state)):
        specs = [spec.get_raw_value() for spec in _variables(nnx.get_partition_spec(state))]
        arrays, structure = jax.tree.flatten(state)
        arrays = [_put(array, mesh, spec) for array, spec in zip(arrays, specs, strict=True)]
        nnx.update(model, jax.tree.unflatten(structure, arrays))
    if optimizer is None or all(_on_mesh(leaf, mesh) for leaf in jax.tree.leaves(nnx.state(optimizer))):
        return
    trained = nnx.state(model, optimizer.wrt)
    experts = [leaf.get_raw_value() for leaf in _variables(trained) if isinstance(leaf, ExpertParam)]
    spec = {array.ndim: array.sharding.spec for array in experts}
    labels = optimizer_layers(optimizer.tx, optimizer.opt_state, expert_labels(trained))
    # Optimizer state of experts in a different layout than the experts is replicated here; migration rejects it by
    # name.
    arrays = [
        _put(
            leaf.array,
            mesh,
            PartitionSpec() if leaf.layers is None else spec.get(leaf.array.ndim, PartitionSpec()),
        )
        for leaf in labelled_leaves(optimizer.opt_state, labels)
    ]
    opt_state = jax.tree.unflatten(jax.tree.structure(optimizer.opt_state), arrays)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] = _put(optimizer.step[...], mesh, PartitionSpec())


def replicate(array: Any, mesh: Mesh) -> jax.Array:
    """Replicate ``array``, which is equal on every process, over all devices of ``mesh``."""
    value = np.asarray(array)
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, PartitionSpec()), lambda index: value[index]
    )


def _variables(state: Any) -> list[nnx.Variable]:
    return jax.tree.leaves(state, is_leaf=is_variable)


def _on_mesh(array: Any, mesh: Mesh) -> bool:
    return isinstance(array.sharding, NamedSharding) and array.sharding.mesh == mesh


def _put(array: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    if _on_mesh(array, mesh):
        return array
    sharding = NamedSharding(mesh, spec)
    if jax.process_count() == 1:
        return jax.device_put(array, sharding)
    if is_key(array):
        data = _put(jax.random.key_data(array), mesh, PartitionSpec())
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    value = np.asarray(array)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
