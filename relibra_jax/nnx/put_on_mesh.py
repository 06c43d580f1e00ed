"""Arrays that do not lie on the mesh yet are put there: parameters by their metadata, optimizer state beside them.

A model may be built without a mesh, and counters of an optimizer are always born on one device, where every step would
leave them on all devices and be compiled a second time.
"""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relibra_jax.execution.expert_labels import labelled_leaves, optimizer_layers
from relibra_jax.nnx.homes import expert_labels
from relibra_jax.nnx.variables import ExpertParam


def put_on_mesh(model: nnx.Module, optimizer: nnx.Optimizer | None, mesh: Mesh) -> None:
    """Distribute what of a model and its optimizer lies on single devices, in place.

    Args:
        model: the module; its variables go where ``nnx.get_partition_spec`` says.
        optimizer: the optimizer of the model, if any; moments of experts go where the experts are, all else is
            replicated.
        mesh: the device mesh.
    """
    state = nnx.state(model)
    if not all(_on_mesh(array, mesh) for array in jax.tree.leaves(state)):
        specs = [spec.get_raw_value() for spec in _variables(nnx.get_partition_spec(state))]
        arrays, structure = jax.tree.flatten(state)
        placed = [_put(array, mesh, spec) for array, spec in zip(arrays, specs, strict=True)]
        nnx.update(model, jax.tree.unflatten(structure, placed))
    if optimizer is None or all(_on_mesh(leaf, mesh) for leaf in jax.tree.leaves(nnx.state(optimizer))):
        return
    trained = nnx.state(model, optimizer.wrt)
    experts = [leaf.get_raw_value() for leaf in _variables(trained) if isinstance(leaf, ExpertParam)]
    spec = {array.ndim: array.sharding.spec for array in experts}
    labels = optimizer_layers(optimizer.tx, optimizer.opt_state, expert_labels(trained))
    # State of experts that is laid out otherwise than they are is refused by name where it would have to move.
    placed = [
        _put(
            leaf.array,
            mesh,
            PartitionSpec() if leaf.layers is None else spec.get(leaf.array.ndim, PartitionSpec()),
        )
        for leaf in labelled_leaves(optimizer.opt_state, labels)
    ]
    opt_state = jax.tree.unflatten(jax.tree.structure(optimizer.opt_state), placed)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] = _put(optimizer.step[...], mesh, PartitionSpec())


def replicate(array: Any, mesh: Mesh) -> jax.Array:
    """``array``, the same on every process, on all devices of ``mesh``."""
    value = np.asarray(array)
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, PartitionSpec()), lambda at: value[at]
    )


def _variables(state: Any) -> list[nnx.Variable]:
    return jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _on_mesh(array: Any, mesh: Mesh) -> bool:
    return isinstance(array.sharding, NamedSharding) and array.sharding.mesh == mesh


def _put(array: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    if _on_mesh(array, mesh):
        return array
    sharding = NamedSharding(mesh, spec)
    if jax.process_count() == 1:
        return jax.device_put(array, sharding)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(array), mesh, PartitionSpec())
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    value = np.asarray(array)
    return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])
