"""The logical view of a model: its parameters and optimizer state with experts in the order of their ids.

Expert weights are in home slots, and every batch may move them. Parameters that are kept over a batch, such as the best
weights so far, or that leave the program, must therefore not be copied as they are::

    best = logical_params(model)              # with experts [E, 3, D, F], whatever their homes are now
    ...                                       # more batches
    from_logical(model, best)                 # at the homes of today

Both take the arrays of a whole model at once, and send every expert that is not at the place of its id. A moving
average of every step is cheaper as a module of its own, which moves with the model: `Balancer.prepare` takes it in
``copies``.
"""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from relibra_jax.contract.types import Array, Topology
from relibra_jax.execution.expert_labels import ExpertLeaf, labelled_leaves, optimizer_layers
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.migration import migrate_experts
from relibra_jax.nnx.homes import expert_labels, get_homes
from relibra_jax.nnx.variables import CorrectionBias
from relibra_jax.support.interrupts import signals_deferred

_KEPT: Final = nnx.Any(nnx.Param, CorrectionBias)
type Named = dict[str, Any]
"""Arrays by the names of their places in the model or in the optimizer's state, such as ``layers.0.experts``."""


def logical_params(model: nnx.Module) -> Named:
    """Copy the parameters of a model, with experts in logical order.

    Args:
        model: a module with L MoE layers.

    Returns:
        Every ``nnx.Param`` and `CorrectionBias` by its name. Experts are ``[E, 3, D, F]``, or ``[l, E, 3, D, F]`` where
        layers are stacked, sharded over the ranks along E if the model is on a mesh.

    >>> from relibra_jax.execution.gating import GATINGS
    >>> from relibra_jax.nnx import MoELayer
    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> make = functools.partial(MoELayer, topology, 8, 16, GATINGS["gpt-oss"])
    >>> here, there = make(rngs=nnx.Rngs(0)), make(home=np.array([2, 0, 3, 1]), rngs=nnx.Rngs(1))
    >>> params = logical_params(here)
    >>> from_logical(there, params)
    >>> {name: array.shape for name, array in params.items()}
    {'experts': (4, 3, 8, 16), 'router': (8, 4), 'router_bias': (4,)}
    >>> bool((there.experts[0, 0, 2] == here.experts[0, 0, 0]).all())
    True
    """
    params = nnx.state(model, _KEPT)
    return _logical(params, expert_labels(params), get_homes(model))


def logical_optimizer_state(model: nnx.Module, optimizer: nnx.Optimizer) -> Named:
    """Copy the state of a model's optimizer, with what belongs to experts in logical order, as `logical_params`."""
    return _logical(optimizer.opt_state, _optimizer_labels(model, optimizer), get_homes(model))


def from_logical(
    model: nnx.Module,
    params: Named,
    *,
    optimizer: nnx.Optimizer | None = None,
    optimizer_state: Named | None = None,
) -> None:
    """Set the parameters of a model, and the state of its optimizer, from arrays with experts in logical order.

    Experts go to their homes of now. Values are cast to the dtypes of the model. The step number of the optimizer
    stays.

    Args:
        model: the module, which is changed in place.
        params: the parameters, as `logical_params` returns them; host arrays too.
        optimizer: the optimizer of the model, if its state is to be set.
        optimizer_state: its state, as `logical_optimizer_state` returns it.

    Raises:
        ValueError: if a name is missing or unknown, a shape differs, or only one of ``optimizer`` and
            ``optimizer_state`` is given. Nothing has changed then.
    """
    if (optimizer is None) != (optimizer_state is None):
        raise ValueError("optimizer and optimizer_state belong together: give both or none")
    home, state = get_homes(model), nnx.state(model, _KEPT)
    new_state = _physical(state, expert_labels(state), home, params, "params")
    opt_state = None
    if optimizer is not None and optimizer_state is not None:
        labels = _optimizer_labels(model, optimizer)
        opt_state = _physical(optimizer.opt_state, labels, home, optimizer_state, "optimizer_state")
    with signals_deferred():
        nnx.update(model, new_state)
        if optimizer is not None and opt_state is not None:
            nnx.update(optimizer.opt_state, nnx.state(opt_state))


def _optimizer_labels(model: nnx.Module, optimizer: nnx.Optimizer) -> PyTree:
    return optimizer_layers(optimizer.tx, optimizer.opt_state, expert_labels(nnx.state(model, optimizer.wrt)))


def _logical(tree: PyTree, labels: PyTree, home: Int[np.ndarray, "L E"]) -> Named:
    leaves = labelled_leaves(tree, labels)
    copies = [leaf._replace(array=jnp.copy(leaf.array)) for leaf in leaves]
    moved = _move(copies, home, _identity(home))
    return {
        _name(leaf): array if leaf.layers is None else _reshape(array, leaf, home.shape[1])
        for leaf, array in zip(leaves, moved, strict=True)
    }


def _physical(
    tree: PyTree, labels: PyTree, home: Int[np.ndarray, "L E"], values: Named, argument: str
) -> PyTree:
    leaves, num_experts = labelled_leaves(tree, labels), home.shape[1]
    names = [_name(leaf) for leaf in leaves]
    if unknown := sorted(set(values) ^ set(names)):
        problem = "is missing" if unknown[0] in names else "is not in the model"
        raise ValueError(f"{argument}: {unknown[0]} {problem}")
    placed = []
    for name, leaf in zip(names, leaves, strict=True):
        expected = _logical_shape(leaf, num_experts) if leaf.layers is not None else leaf.array.shape
        if np.shape(values[name]) != tuple(expected):
            raise ValueError(
                f"{argument}, {name}: expected shape {tuple(expected)}, found {np.shape(values[name])}"
            )
        placed.append(leaf._replace(array=_like(values[name], leaf.array)))
    return jax.tree.unflatten(jax.tree.structure(tree), _move(placed, _identity(home), home))


def _move(
    leaves: list[ExpertLeaf], old: Int[np.ndarray, "L E"], new: Int[np.ndarray, "L E"]
) -> list[jax.Array]:
    """Move the experts of leaves from old homes to new ones; their arrays are donated."""
    arrays = [leaf.array for leaf in leaves]
    experts = next((leaf for leaf in leaves if leaf.layers is not None), None)
    if experts is None:
        return arrays
    sharding = experts.array.sharding
    if (
        isinstance(sharding, NamedSharding)
        and isinstance(sharding.mesh, Mesh)
        and set(RANKS) <= set(sharding.mesh.axis_names)
    ):
        nodes, local, homes = experts.array.shape[experts.stacked :][:3]
        topology = Topology(
            num_nodes=nodes, ranks_per_node=local, num_experts=nodes * local * homes, replica_slots=0
        )
        labels = [leaf.layers for leaf in leaves]
        return migrate_experts(arrays, old, new, layers=labels, mesh=sharding.mesh, topology=topology)
    return [
        array if leaf.layers is None else _take(array, leaf, old, new)
        for leaf, array in zip(leaves, arrays, strict=True)
    ]


def _take(
    array: jax.Array, leaf: ExpertLeaf, old: Int[np.ndarray, "L E"], new: Int[np.ndarray, "L E"]
) -> jax.Array:
    """Move the experts of an array that is on no mesh."""
    rows = array.reshape(-1, old.shape[1], *array.shape[leaf.stacked + 3 :])
    source = [old[layer][np.argsort(new[layer])] for layer in leaf.layer_numbers]
    return jnp.stack([row[index] for row, index in zip(rows, source, strict=True)]).reshape(array.shape)


def _identity(home: Int[np.ndarray, "L E"]) -> Int[np.ndarray, "L E"]:
    return np.broadcast_to(np.arange(home.shape[1], dtype=np.int32), home.shape)


def _logical_shape(leaf: ExpertLeaf, num_experts: int) -> tuple[int, ...]:
    lead = leaf.array.shape[: leaf.stacked]
    return (*lead, num_experts, *leaf.array.shape[leaf.stacked + 3 :])


def _reshape(array: jax.Array, leaf: ExpertLeaf, num_experts: int) -> jax.Array:
    """Return an array in home slots as one over experts, sharded over the ranks."""
    shape = _logical_shape(leaf, num_experts)
    if not isinstance(array.sharding, NamedSharding):
        return array.reshape(shape)
    rest = array.sharding.spec[leaf.stacked + 3 :]
    return _reshape_to(shape, NamedSharding(array.sharding.mesh, _spec(leaf, rest)))(array)


def _spec(leaf: ExpertLeaf, rest: tuple[Any, ...]) -> PartitionSpec:
    return PartitionSpec(*(None,) * leaf.stacked, RANKS, *rest)


def _like(value: Array, like: jax.Array) -> jax.Array:
    """Return a copy of ``value`` with the shape, dtype and sharding of ``like``."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jnp.copy(_reshape_to(like.shape, like.sharding)(value).astype(like.dtype))
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.copy(value)
    host = np.asarray(value).astype(like.dtype).reshape(like.shape)
    return jax.make_array_from_callback(host.shape, like.sharding, lambda index: host[index])


@functools.cache
def _reshape_to(shape: tuple[int, ...], sharding: Any) -> Any:
    return jax.jit(lambda array: array.reshape(shape), out_shardings=sharding)


def _name(leaf: ExpertLeaf) -> str:
    return jax.tree_util.keystr(leaf.path, simple=True, separator=".").removesuffix(".value")
