"""Homes of a Flax model's experts: read, told, and changed with everything that belongs to the experts."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int

from relibra_jax.execution.expert_labels import Layers, optimizer_layers
from relibra_jax.execution.migration import migrate_experts
from relibra_jax.nnx.variables import AXES, ExpertParam, Homes
from relibra_jax.plan_check import check_homes
from relibra_jax.types import Array, Topology


def expert_labels(state: Any) -> Any:
    """Labels that say which leaves hold the experts of which layers, for `migrate_experts` and checkpoints.

    Layers are counted in the order of the tree, ``nnx.List`` and stacked layers alike. For optimizer state, give the
    labels of the parameters to `relibra_jax.execution.expert_labels.optimizer_layers`.

    Args:
        state: ``nnx.state(model, ...)``, or gradients of that structure.

    Returns:
        A prefix of ``state``: for expert weights an int, or a range where layers are stacked; None elsewhere.
    """
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
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


def get_homes(model: nnx.Module) -> Int[np.ndarray, "L E"]:
    """The homes of all layers' experts, as the model itself holds them.

    Args:
        model: a module with L MoE layers, which are counted in the order of its tree.

    Returns:
        Flat home slot of each expert.

    Raises:
        ValueError: if the model has no MoE layer, or layers of different numbers of experts.
    """
    leaves = jax.tree.leaves(nnx.state(model, Homes))
    experts = sorted({leaf.shape[-1] for leaf in leaves})
    if not experts:
        raise ValueError(f"there is no MoELayer in this {type(model).__name__}")
    if len(experts) != 1:
        raise ValueError(f"expected MoE layers of one number of experts, found {experts}")
    return np.concatenate([np.asarray(leaf).reshape(-1, *experts) for leaf in leaves])


def set_homes(model: nnx.Module, home: Int[Array, "L E"]) -> None:
    """Tell all layers where their experts lie, in place. No weights move: see `reorder_experts` for that.

    Args:
        model: a module with L MoE layers, which are counted in the order of its tree.
        home: flat home slot of each expert.

    Raises:
        ValueError: if the model has another number of layers or experts, with both, or a home slot has not exactly one
            expert.
    """
    layers, experts = get_homes(model).shape
    if np.shape(home) != (layers, experts):
        raise ValueError(f"homes of shape {np.shape(home)} for {layers} MoE layers of {experts} experts")
    rows = iter(np.split(check_homes(home, experts), layers))

    def place(old):
        row = np.concatenate([next(rows) for _ in range(old.size // old.shape[-1])])
        return jax.device_put(row.reshape(old.shape), old.sharding)

    nnx.update(model, jax.tree.map(place, nnx.state(model, Homes)))


def reorder_experts(
    model: nnx.Module,
    optimizer: nnx.Optimizer | None,
    home: Int[Array, "L E"],
    *,
    mesh: Mesh,
    topology: Topology,
) -> None:
    """Move the experts of all layers to new homes, and the optimizer state that belongs to them: between batches.

    In place, as nnx has it; see `relibra_jax.execution.migration.migrate_experts`.

    Args:
        model: a module with L MoE layers, which are counted in the order of its tree.
        optimizer: the optimizer of the model; None if it is not trained.
        home: flat home slot of each expert from now on, ``Plan.home``.
        mesh: the device mesh that the experts are sharded over.
        topology: the expert-parallel group that ``home`` belongs to.

    Raises:
        ValueError: if ``home`` has another number of layers, or as `migrate_experts` says; nothing has moved then.
    """
    experts = nnx.state(model, ExpertParam)
    tree, layers = {"experts": experts}, {"experts": expert_labels(experts)}
    if optimizer is not None:
        tree["optimizer"] = optimizer.opt_state
        labels = expert_labels(nnx.state(model, optimizer.wrt))
        layers["optimizer"] = optimizer_layers(optimizer.tx, optimizer.opt_state, labels)
    moved = migrate_experts(tree, get_homes(model), home, layers=layers, mesh=mesh, topology=topology)
    nnx.update(model, moved["experts"])
    if optimizer is not None:
        nnx.update(optimizer.opt_state, nnx.state(moved["optimizer"]))
    set_homes(model, home)
