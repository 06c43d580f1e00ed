"""The logical view of a model: its parameters and optimizer state with experts in the order of their ids.

Expert weights are in home slots, and every batch may move them. Parameters that are kept over a batch, such as the best
weights so far, or that leave the program, must therefore not be copied as they are::

    best = logical_params(model)              # with experts [E, 3, D, F], whatever their homes are now
    ...                                       # more batches
    from_logical(model, best)                 # at their current homes

Both take the arrays of a whole model at once, and send every expert that is not at the place of its id. A moving
average of every step is cheaper as a module of its own, which moves with the model: `Balancer.prepare` takes it in
``copies``.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Int, PyTree

from relibra_jax.contract.types import Array, Topology
from relibra_jax.execution.expert_labels import ExpertLeaf, labelled_leaves, optimizer_layers
from relibra_jax.execution.logical_order import (
    identity_homes,
    logical_shape,
    logical_sharding,
    regroup,
)
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.migration import migrate_experts
from relibra_jax.nnx.homes import expert_labels, get_homes
from relibra_jax.nnx.variables import CorrectionBias
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.interrupts import signals_deferred
from relibra_jax.support.random_keys import is_key

_KEPT: Final = nnx.Any(nnx.Param, CorrectionBias)
type Named = dict[str, Any]
"""Arrays by the names of their places in the model or in the optimizer's state, such as ``layers.0.experts``."""


@checks_arguments
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
    >>> import functools
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


@checks_arguments
def logical_optimizer_state(model: nnx.Module, optimizer: nnx.Optimizer) -> Named:
    """Copy the state of a model's optimizer, with what belongs to experts in logical order, as `logical_params`."""
    return _logical(optimizer.opt_state, _optimizer_labels(model, optimizer), get_homes(model))


@checks_arguments
def from_logical(
    model: nnx.Module,
    params: Named,
    *,
    optimizer: nnx.Optimizer | None = None,
    optimizer_state: Named | None = None,
) -> None:
    """Set the parameters of a model, and the state of its optimizer, from arrays with experts in logical order.

    Experts go to their current homes. Values are cast to the dtypes of the model. The step number of the optimizer
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
    moved = _move(copies, home, identity_homes(home))
    return {_name(leaf): _to_logical(array, leaf) for leaf, array in zip(copies, moved, strict=True)}


def _physical(
    tree: PyTree, labels: PyTree, home: Int[np.ndarray, "L E"], values: Named, argument: str
) -> PyTree:
    leaves = {_name(leaf): leaf for leaf in labelled_leaves(tree, labels)}
    if unknown := sorted(set(values) ^ set(leaves)):
        problem = "is missing" if unknown[0] in leaves else "is not in the model"
        raise ValueError(f"{argument}: {unknown[0]} {problem}")
    for name, leaf in leaves.items():
        expected = leaf.array.shape if leaf.layers is None else logical_shape(leaf)
        if (found := np.shape(values[name])) != tuple(expected):
            raise ValueError(f"{argument}, {name}: expected shape {tuple(expected)}, found {found}")
    placed = [leaf._replace(array=_to_slots(values[name], leaf)) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), _move(placed, identity_homes(home), home))


def _is_over_ranks(leaf: ExpertLeaf) -> bool:
    """Return whether a leaf has experts, on a mesh with ranks."""
    sharding = leaf.array.sharding
    return (
        leaf.layers is not None
        and isinstance(sharding, NamedSharding)
        and set(RANKS) <= set(sharding.mesh.axis_names)
    )


def _to_logical(array: jax.Array, leaf: ExpertLeaf) -> jax.Array:
    """Return an array with experts at the slots of their ids as one over experts."""
    if leaf.layers is None:
        return array
    return regroup(array, leaf, merge=True) if _is_over_ranks(leaf) else array.reshape(logical_shape(leaf))


def _to_slots(value: Array, leaf: ExpertLeaf) -> jax.Array:
    """Return a copy of a value in logical order as an array like the leaf's, with experts at the slots of their ids."""
    array, over_ranks = leaf.array, _is_over_ranks(leaf)
    sharding = logical_sharding(array.sharding, leaf) if over_ranks else array.sharding
    if is_key(array):
        return jnp.copy(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        copy = jnp.copy(jax.device_put(value.astype(array.dtype), sharding))
    else:
        # Unlike device_put, this needs no other process, and shares no memory with the value.
        host = np.array(value, array.dtype)
        copy = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    if leaf.layers is None:
        return copy
    return regroup(copy, leaf, merge=False) if over_ranks else copy.reshape(array.shape)


def _move(
    leaves: list[ExpertLeaf], old: Int[np.ndarray, "L E"], new: Int[np.ndarray, "L E"]
) -> list[jax.Array]:
    """Move the experts of leaves from old homes to new ones; their arrays are donated."""
    arrays, labels = [leaf.array for leaf in leaves], [leaf.layers for leaf in leaves]
    experts = next(filter(_is_over_ranks, leaves), None)
    if experts is None:
        return [_take(leaf, old, new) for leaf in leaves]
    nodes, local, homes = experts.array.shape[experts.stacked :][:3]
    topology = Topology(
        num_nodes=nodes, ranks_per_node=local, num_experts=nodes * local * homes, replica_slots=0
    )
    return migrate_experts(
        arrays, old, new, layers=labels, mesh=experts.array.sharding.mesh, topology=topology
    )


def _take(leaf: ExpertLeaf, old: Int[np.ndarray, "L E"], new: Int[np.ndarray, "L E"]) -> jax.Array:
    """Move the experts of an array that is on no mesh."""
    if leaf.layers is None:
        return leaf.array
    rows = leaf.array.reshape(-1, old.shape[1], *leaf.array.shape[leaf.stacked + 3 :])
    source = [old[layer][np.argsort(new[layer])] for layer in leaf.layer_numbers]
    moved = jnp.stack([row[index] for row, index in zip(rows, source, strict=True)])
    return moved.reshape(leaf.array.shape)


def _name(leaf: ExpertLeaf) -> str:
    return jax.tree_util.keystr(leaf.path, simple=True, separator=".").removesuffix(".value")
