"""The homes of a Flax model's experts: functions that read and set them, and that move experts to new homes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.types import EMPTY, Array, Topology
from relibra_jax.execution.expert_labels import Layers, optimizer_layers
from relibra_jax.execution.migration import MoveError, migrate_experts
from relibra_jax.nnx.variables import AXES, ExpertParam, Homes, is_variable
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.interrupts import signals_deferred


def expert_labels(state: Any) -> Any:
    """Label each leaf of a model's state with the MoE layers whose experts it holds.

    `migrate_experts` and the checkpoints take these labels. Layers are numbered in the order of the tree, those of an
    ``nnx.List`` and stacked layers alike. To label optimizer state, pass the labels of the parameters to
    `relibra_jax.execution.expert_labels.optimizer_layers`.

    Args:
        state: ``nnx.state(model, ...)``, or gradients with that structure.

    Returns:
        A prefix of ``state``: the layer number for expert weights, a range of layer numbers for stacked layers, and
        None for all other leaves.
    """
    leaves, structure = jax.tree.flatten(state, is_leaf=is_variable)
    labels: list[Layers] = []
    layer = 0
    for leaf in leaves:
        if not isinstance(leaf, ExpertParam):
            labels.append(None)
        elif len(leaf.shape) == AXES:
            labels.append(layer)
            layer += 1
        else:
            labels.append(range(layer, layer + leaf.shape[0]))
            layer += leaf.shape[0]
    return jax.tree.unflatten(structure, labels)


@checks_arguments
def get_homes(model: nnx.Module) -> Int[np.ndarray, "L E"]:
    """Read the homes of the experts of all layers from the model.

    Args:
        model: a module with L MoE layers, numbered in the order of its tree.

    Returns:
        Flat home slot of each expert.

    Raises:
        ValueError: if the model has no MoE layer, or its layers have different numbers of experts.
    """
    leaves = jax.tree.leaves(nnx.state(model, Homes))
    experts = sorted({leaf.shape[-1] for leaf in leaves})
    if not experts:
        raise ValueError(f"the model, a {type(model).__name__}, contains no MoELayer")
    if len(experts) != 1:
        raise ValueError(
            f"all MoE layers of the model must have the same number of experts; they have {experts}"
        )
    return np.concatenate([np.asarray(leaf).reshape(-1, *experts) for leaf in leaves])


@checks_arguments
def set_homes(model: nnx.Module, home: Int[Array, "L E"]) -> None:
    """Set the homes that all layers record for their experts, in place, without moving any weights.

    To move the weights too, call `reorder_experts`.

    Args:
        model: a module with L MoE layers, numbered in the order of its tree.
        home: flat home slot of each expert.

    Raises:
        ValueError: if the model has a different number of layers or experts, or a home slot does not have exactly one
            expert.
    """
    layers, experts = get_homes(model).shape
    if np.shape(home) != (layers, experts):
        raise ValueError(
            f"home has shape {np.shape(home)}, but the model has {layers} MoE layers with {experts} experts"
        )
    nnx.update(model, _homes_state(model, check_homes(home, experts)))


def _homes_state(model: nnx.Module, home: Int[np.ndarray, "L E"]) -> Any:
    """Return the state of a model's `Homes` with other values."""
    rows = iter(np.split(home, len(home)))

    def place(old):
        row = np.concatenate([next(rows) for _ in range(old.size // old.shape[-1])]).reshape(old.shape)
        # Unlike device_put, this needs no other process.
        return jax.make_array_from_callback(row.shape, old.sharding, lambda index: row[index])

    return jax.tree.map(place, nnx.state(model, Homes))


def check_copies(model: nnx.Module, copies: Sequence[nnx.Module]) -> None:
    """Raise ValueError unless the experts of all copies are at the homes of the model."""
    homes = get_homes(model)
    for number, other in enumerate(copies):
        if not np.array_equal(get_homes(other), homes):
            raise ValueError(
                f"copies[{number}] has its experts at other homes than the model: bring its parameters there with"
                " logical_params and from_logical"
            )


@checks_arguments
def reorder_experts(
    model: nnx.Module,
    optimizer: nnx.Optimizer | None,
    home: Int[Array, "L E"],
    *,
    mesh: Mesh,
    topology: Topology,
    copies: Sequence[nnx.Module] = (),
) -> None:
    """Move the experts of all layers and their optimizer state to new homes, in place, between two batches.

    `relibra_jax.execution.migration.migrate_experts` describes how they move. All of it moves, or nothing; signals
    such as Ctrl-C wait until it has.

    Args:
        model: a module with L MoE layers, numbered in the order of its tree.
        optimizer: the optimizer of the model. None if the model is not trained.
        home: the new flat home slot of each expert, ``Plan.home``.
        mesh: the device mesh over which the experts are sharded.
        topology: the expert-parallel group of ``home``.
        copies: modules with experts at the same homes as the model, which move too, such as a moving average of its
            weights.

    Raises:
        ValueError: if ``home`` has a different number of layers than the model, a copy has other homes, or under the
            conditions of `migrate_experts`. Nothing has moved then.
        relibra_jax.execution.MoveError: if a step of the move fails. Nothing has moved then, unless the message says
            that experts are lost: the model then has no homes, and no batch can be prepared for it.
    """
    modules, homes = (model, *copies), get_homes(model)
    check_copies(model, copies)
    states = [nnx.state(module, ExpertParam) for module in modules]
    tree: dict[str, Any] = {"experts": states}
    layers: dict[str, Any] = {"experts": [expert_labels(state) for state in states]}
    if optimizer is not None:
        tree["optimizer"] = optimizer.opt_state
        labels = expert_labels(nnx.state(model, optimizer.wrt))
        layers["optimizer"] = optimizer_layers(optimizer.tx, optimizer.opt_state, labels)

    new_home = check_homes(home, homes.shape[1])
    if new_home.shape != homes.shape:
        raise ValueError(f"home has {len(new_home)} layers, but the model has {len(homes)}")
    # Made before anything moves, so that memory cannot run out between the experts and their homes.
    at_home, lost = (
        [_homes_state(module, value) for module in modules]
        for value in (new_home, np.full_like(homes, EMPTY))
    )

    def update(states: list[Any]) -> None:
        for module, state in zip(modules, states, strict=True):
            nnx.update(module, state)

    def take(tree: dict[str, Any]) -> None:
        update(tree["experts"])
        if optimizer is not None:
            nnx.update(optimizer.opt_state, nnx.state(tree["optimizer"]))

    with signals_deferred():
        try:
            take(migrate_experts(tree, homes, new_home, layers=layers, mesh=mesh, topology=topology))
            update(at_home)
        except MoveError as error:
            if error.tree is None:
                update(lost)
            else:
                take(error.tree)
            raise
