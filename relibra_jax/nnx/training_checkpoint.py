"""Checkpoints of a Flax training run: model, optimizer and balancer together, so that their homes always agree."""

from collections.abc import Sequence
from typing import Any, Final

import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from flax import nnx
from jaxtyping import PyTree

from relibra_jax.execution.checkpoint import restore_checkpoint, save_checkpoint
from relibra_jax.execution.checkpoint_steps import find_step, read_layout
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.nnx.balancer import Balancer
from relibra_jax.nnx.balancer_state import BalancerState, sizes_from_names
from relibra_jax.nnx.checks import check_finite
from relibra_jax.nnx.homes import check_copies, expert_labels, get_homes, set_homes
from relibra_jax.nnx.put_on_mesh import put_on_mesh
from relibra_jax.nnx.variables import Homes
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.interrupts import signals_deferred

SIZES: Final = "balancer.capacities."
"""The prefix of the names of buffer sizes in a checkpoint."""
HISTORY: Final = "balancer.planner.history.load"
"""The name of the loads per node that a planner remembers (`relibra_jax.planning.horizon.History`)."""
COPIES: Final = "copies."
"""The prefix of the names of the copies' arrays in a checkpoint."""


@checks_arguments
def save_training(
    manager: ocp.CheckpointManager,
    step: int,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    balancer: Balancer,
    *,
    copies: Sequence[nnx.Module] = (),
    extra: PyTree = None,
) -> bool:
    """Save the model, the optimizer and the balancer in one checkpoint, with the experts in logical order.

    Args:
        manager: an Orbax checkpoint manager created without item names or handlers.
        step: the step number of the checkpoint.
        model: the module. All its state except homes is saved.
        optimizer: the optimizer of the model.
        balancer: the balancer that prepares the batches of the model.
        copies: modules that move with the model (`Balancer.prepare`), which are saved, too.
        extra: any other tree of host arrays and Python numbers.

    Returns:
        True if the manager saved a checkpoint; False if its policy skips this step.

    Raises:
        ValueError: if a parameter is not finite, a copy has its experts at other homes than the model, or under the
            conditions of `relibra_jax.execution.checkpoint.save_checkpoint`.
    """
    check_finite(model)
    check_copies(model, copies)
    _put_on_mesh(model, optimizer, balancer, copies)
    return save_checkpoint(
        manager,
        step,
        _tree(model, optimizer, balancer, copies, extra),
        get_homes(model),
        layers=_layers(model, optimizer, copies),
        mesh=balancer.parallel.mesh,
        topology=balancer.parallel.topology,
    )


@checks_arguments
def restore_training(
    manager: ocp.CheckpointManager,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    balancer: Balancer,
    *,
    copies: Sequence[nnx.Module] = (),
    extra: PyTree = None,
    step: int | None = None,
    verify: bool = True,
) -> tuple[int, PyTree]:
    """Restore the model, the optimizer and the balancer in place from a checkpoint, which another mesh may have saved.

    Args:
        manager: the Orbax checkpoint manager of the directory.
        model: a module with the sizes of the saved one.
        optimizer: the optimizer of the model.
        balancer: a balancer with the same planner, layers and experts.
        copies: as many copies as were saved, with their sizes.
        extra: a tree with the structure of the saved ``extra``.
        step: the step number of the checkpoint. None takes the latest.
        verify: whether to compare every array with its saved digest.

    Returns:
        The step number, and the saved ``extra``.

    Raises:
        ValueError: if there is no checkpoint of this step, if it belongs to another model (the message says what
            differs), or if it cannot be read or has changed since it was saved
            (`relibra_jax.execution.checkpoint.restore_checkpoint`). Then model, optimizer, balancer and copies keep
            their values.
    """
    _put_on_mesh(model, optimizer, balancer, copies)
    step = find_step(manager, step)
    saved = read_layout(manager, step, verify=verify).arrays
    tree = _tree(model, optimizer, balancer, copies, extra)
    # The saved names show which stage shapes the checkpoint has buffer sizes for.
    sizes = sizes_from_names(name.removeprefix(SIZES) for name in saved if name.startswith(SIZES))
    state = balancer.state._replace(capacities=sizes)
    if HISTORY in saved:
        _, _, nodes, _ = saved[HISTORY]
        state = _with_history_over(state, nodes)
    restored = restore_checkpoint(
        manager,
        tree | {"balancer": state},
        layers=_layers(model, optimizer, copies),
        mesh=balancer.parallel.mesh,
        topology=balancer.parallel.topology,
        step=step,
        verify=verify,
    )
    tree = restored.tree
    with signals_deferred():
        nnx.update(model, tree["model"])
        nnx.update(optimizer.opt_state, nnx.state(tree["optimizer"]))
        for copy, state in zip(copies, tree["copies"], strict=True):
            nnx.update(copy, state)
            set_homes(copy, restored.home)
        optimizer.step[...] = tree["updates"]
        set_homes(model, restored.home)
        state = _with_history_over(tree["balancer"], balancer.parallel.topology.num_nodes)
        balancer.state = state._replace(home=restored.home)
        balancer.trains = True
    return restored.step, tree["extra"]


def _with_history_over(state: BalancerState, nodes: int) -> BalancerState:
    """Give the history of the planner, if it keeps one, another number of nodes."""
    if not hasattr(state.planner, "history"):
        return state
    history = state.planner.history.over_nodes(nodes)
    return state._replace(planner=state.planner._replace(history=history))


def _saved_state(model: nnx.Module) -> Any:
    return nnx.state(model, nnx.Not(Homes))


def _put_on_mesh(
    model: nnx.Module, optimizer: nnx.Optimizer, balancer: Balancer, copies: Sequence[nnx.Module]
) -> None:
    """Put what is on one device on the mesh of the balancer, as `Balancer.prepare` does."""
    put_on_mesh(model, optimizer, balancer.parallel.mesh)
    for other in copies:
        put_on_mesh(other, None, balancer.parallel.mesh)


def _tree(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    balancer: Balancer,
    copies: Sequence[nnx.Module],
    extra: PyTree,
) -> dict[str, Any]:
    return {
        "model": _saved_state(model),
        "copies": [_saved_state(copy) for copy in copies],
        "optimizer": optimizer.opt_state,
        "updates": optimizer.step[...],
        "balancer": balancer.state,
        "extra": extra,
    }


def _layers(model: nnx.Module, optimizer: nnx.Optimizer, copies: Sequence[nnx.Module]) -> dict[str, Any]:
    parameter_labels = expert_labels(nnx.state(model, optimizer.wrt))
    return {
        "model": expert_labels(_saved_state(model)),
        "copies": [expert_labels(_saved_state(copy)) for copy in copies],
        "optimizer": optimizer_layers(optimizer.tx, optimizer.opt_state, parameter_labels),
        "updates": None,
        "balancer": None,
        "extra": None,
    }
