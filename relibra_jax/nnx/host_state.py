"""Training state in host memory: parameters and moments that devices take one layer at a time.

With AdamW, float32 parameters and moments take 12 bytes for each value of the model, and only the optimizer step needs
them. `put_on_host` moves them to the host's memory, sharded as before. The programs of a step then compute with
`on_device`, which copies the parameters in the dtype of the computation, 2 bytes a value in bfloat16. `apply_gradients`
takes the optimizer step. Both run through stacked layers one at a time, so the device holds float32 state of one layer.
Nothing else changes: parameters migrate, and are saved and restored, where they are.

The host needs room for two copies of the state, because XLA writes a step's results beside its inputs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from relibra_jax.execution.memory import HOST, in_host_memory, take, to_device, to_host
from relibra_jax.nnx.dense_sharding import STACKS

type Path = tuple[Any, ...]


def put_on_host(module: nnx.Module | nnx.Optimizer) -> None:
    """Move the parameters of a model, or the state of an optimizer, to host memory, in place and one after another.

    Numbers without axes, such as step counts, and variables that are not trained stay on the devices. Make the
    optimizer of a model that is on the host already: its moments are then there, too.

    Args:
        module: the model or its optimizer, on the mesh.
    """
    for _, variable in nnx.iter_graph(module):
        if is_training_state(variable):
            leaf = variable.get_raw_value()
            variable.set_value(jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST)))


def is_training_state(variable: Any) -> bool:
    """Return whether `put_on_host` moves a part of a module: a parameter or moment with axes."""
    return isinstance(variable, nnx.Param | nnx.optimizer.OptState) and variable.get_raw_value().ndim > 0


def on_device[T: nnx.Module](model: T, mesh: Mesh) -> T:
    """Return a model with its parameters in device memory, under jit; one without parameters on the host as it is.

    Parameters that came from the host are in the dtype of their computation, as their metadata says
    (`relibra_jax.nnx.variables.ExpertParam`, `relibra_jax.nnx.dense_sharding.DenseParam`); others keep theirs.

    Args:
        model: the model, with parameters in the memory of host or devices.
        mesh: the device mesh.
    """
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    variables = dict(nnx.to_flat_state(params))
    if not any(in_host_memory(variable.get_raw_value()) for variable in variables.values()):
        return model

    def cast(values: dict[Path, jax.Array]) -> dict[Path, jax.Array]:
        dtypes = {path: variables[path].get_metadata("compute_dtype", None) for path in values}
        return {path: value.astype(dtypes[path] or value.dtype) for path, value in values.items()}

    copied: dict[Path, jax.Array] = {}
    for layers, paths in _stacks(variables).items():
        values = {path: variables[path].get_raw_value() for path in paths}
        shardings = {path: _sharding(variables[path], mesh, layers) for path in paths}

        def copy(_: None, number: Any, values: Any = values, shardings: Any = shardings) -> Any:
            return None, jax.lax.with_sharding_constraint(cast(_take(values, number)), shardings)

        copied |= _run_layers(copy, None, layers)[1]
    moved = [(path, variable.replace(copied[path])) for path, variable in variables.items()]
    return nnx.merge(graph, nnx.from_flat_state(moved), *rest, copy=True)


def apply_gradients(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    gradients: Any,
    mesh: Mesh,
    *,
    factor: Float[jax.Array, ""] | float = 1.0,
) -> None:
    """Take an optimizer step in place, under jit, with state in the memory of host or devices.

    State in host memory is updated layer by layer, and everything else at once. So the transformation must treat every
    value on its own, as AdamW does.

    A factor that is not finite skips the step: parameters, moments and all step counts keep their bits. Old values are
    then selected one by one where new ones are computed, so that a skipped step needs no second copy of the state.

    Args:
        model: the model whose parameters the gradients belong to, as it was given to the optimizer.
        optimizer: the optimizer of the model.
        gradients: the gradients in device memory, with the structure of the optimizer's parameters.
        mesh: the device mesh.
        factor: the factor of all gradients, for example one that clips them by their global norm. NaN or infinity
            skips the step.
    """
    taken = jnp.isfinite(factor)
    tx = optimizer.tx

    def take_step(params: Any, gradients: Any, state: Any) -> Any:
        """Return the parameters and the state of the optimizer after the step, or as they are."""
        updates, stepped = tx.update(_scale(gradients, factor), state, params)
        new = optax.apply_updates(params, updates), stepped
        return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, (params, state))

    params = nnx.state(model, optimizer.wrt)
    variables = dict(nnx.to_flat_state(params))
    optimizer.step[...] += taken.astype(optimizer.step[...].dtype)
    trees = nnx.as_pure(params), nnx.as_pure(nnx.state(gradients, optimizer.wrt))
    state = nnx.as_pure(optimizer.opt_state)
    if not any(in_host_memory(variable.get_raw_value()) for variable in variables.values()):
        new_params, stepped = take_step(*trees, state)
        nnx.update(model, new_params)
        nnx.update(optimizer.opt_state, nnx.state(stepped))
        return
    counts = optax.tree_map_params(tx, lambda _: None, state)
    new_params, new_state = [], []
    for layers, paths in _stacks(variables).items():
        part = _only(paths, trees[0])
        shardings = jax.tree.map_with_path(
            lambda path, keep, layers=layers: (
                _sharding(variables[tuple(entry.key for entry in path)], mesh, layers) if keep else None
            ),
            part,
        )
        of_params, of_gradients = (_select(tree, part) for tree in trees)
        moments = optax.tree_map_params(
            tx, lambda leaf, keep: leaf if keep else None, state, part, transform_non_params=lambda _: None
        )

        def step(
            _: Any,
            number: Any,
            inputs: Any = (of_params, of_gradients, moments),
            shardings: Any = shardings,
        ) -> Any:
            params, gradients, moments = _take(inputs, number)
            new_params, stepped = take_step(params, gradients, _merge(moments, counts))
            place = jax.lax.with_sharding_constraint
            moments = optax.tree_map_params(
                tx, place, stepped, shardings, transform_non_params=lambda _: None
            )
            counted = optax.tree_map_params(tx, lambda _: None, stepped)
            new = jax.tree.map(place, new_params, shardings), moments
            return counted, jax.tree.map(_put_beside, new, (inputs[0], inputs[2]))

        counted, stepped = _run_layers(step, counts, layers)
        new_params.append(stepped[0])
        new_state.append(stepped[1])
    nnx.update(model, _merge(*new_params))
    nnx.update(optimizer.opt_state, nnx.state(_merge(*new_state, counted)))


def _run_layers(step: Callable[[Any, Any], Any], carry: Any, layers: int | None) -> Any:
    """Scan ``step(carry, number)`` over stacked layers, or call it once without a number if there are none."""
    return step(carry, None) if layers is None else jax.lax.scan(step, carry, jnp.arange(layers))


def _take(tree: Any, number: Any) -> Any:
    """Return the arrays of one layer, or whole arrays without a number, in device memory."""
    return to_device(tree) if number is None else take(tree, number)


def _scale(gradients: Any, factor: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * factor, gradients)


def _put_beside(leaf: jax.Array, old: jax.Array) -> jax.Array:
    """Put an array into the memory in which another one is."""
    return to_host(leaf) if in_host_memory(old) else leaf


def _stacks(variables: dict[Path, nnx.Variable]) -> dict[int | None, list[Path]]:
    """Group the paths of parameters by their number of stacked layers; None for those that are not stacked."""
    stacks: dict[int | None, list[Path]] = {}
    for path, variable in variables.items():
        layers = len(variable.get_raw_value()) if set(path) & set(STACKS) else None
        stacks.setdefault(layers, []).append(path)
    return stacks


def _sharding(variable: nnx.Variable, mesh: Mesh, layers: int | None) -> NamedSharding:
    """Return the sharding of a parameter, or of one of its layers, as its metadata says."""
    spec = tuple(variable.get_metadata("out_sharding", None) or ())
    return NamedSharding(mesh, PartitionSpec(*(spec if layers is None else spec[1:])))


def _only(paths: list[Path], tree: Any) -> Any:
    """Mark the leaves of a nested dict whose paths are among these."""
    chosen = set(paths)
    return jax.tree.map_with_path(lambda path, _: tuple(entry.key for entry in path) in chosen, tree)


def _select(tree: Any, keep: Any) -> Any:
    """Replace the leaves that are not kept by None."""
    return jax.tree.map(lambda leaf, keep: leaf if keep else None, tree, keep)


def _merge(*trees: Any) -> Any:
    """Merge trees of the same structure, each leaf of which is None in all trees but one."""
    return jax.tree.map(
        lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None),
        *trees,
        is_leaf=lambda leaf: leaf is None,
    )
