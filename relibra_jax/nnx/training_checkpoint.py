"""Checkpoints of a Flax training run: model, optimizer and balancer together, so that their homes always agree."""

from typing import Any, Final

import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from flax import nnx
from jaxtyping import PyTree

from relibra_jax.execution.checkpoint import restore_checkpoint, save_checkpoint
from relibra_jax.execution.checkpoint_steps import find_step, read_layout
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.nnx.balancer import Balancer
from relibra_jax.nnx.balancer_state import capacities_named
from relibra_jax.nnx.finite import check_finite
from relibra_jax.nnx.homes import expert_labels, get_homes, set_homes
from relibra_jax.nnx.put_on_mesh import put_on_mesh
from relibra_jax.nnx.variables import Homes

SIZES: Final = "balancer.capacities."
"""What the names of buffer sizes begin with."""


def save_training(
    manager: ocp.CheckpointManager,
    step: int,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    balancer: Balancer,
    *,
    extra: PyTree = None,
) -> bool:
    """Save all that the next batch depends on, experts in logical order.

    Args:
        manager: an Orbax manager made without item names or handlers.
        step: the number to save under.
        model: the module; parameters (``optimizer.wrt``) and what else it holds besides homes are saved.
        optimizer: the optimizer of the model.
        balancer: the balancer that prepares its batches.
        extra: anything else: host arrays and Python numbers.

    Returns:
        Whether the manager wanted a checkpoint of this step.

    Raises:
        ValueError: if a parameter is not finite, or as `relibra_jax.execution.checkpoint.save_checkpoint` says.
    """
    check_finite(model)
    put_on_mesh(model, optimizer, balancer.mesh)
    return save_checkpoint(
        *(manager, step, _tree(model, optimizer, balancer, extra), get_homes(model)),
        layers=_layers(model, optimizer),
        mesh=balancer.mesh,
        topology=balancer.topology,
    )


def restore_training(
    manager: ocp.CheckpointManager,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    balancer: Balancer,
    *,
    extra: PyTree = None,
    step: int | None = None,
    verify: bool = True,
) -> tuple[int, PyTree]:
    """Go on from a checkpoint, which another mesh may have saved: model, optimizer and balancer, in place.

    Args:
        manager: the Orbax manager of the directory.
        model: a module of the same sizes.
        optimizer: the optimizer of the model.
        balancer: a balancer of the same planner, layers and experts.
        extra: a tree like the one that was saved.
        step: the number of the checkpoint; None for the latest.
        verify: whether to compare every array with the digest that was saved with it.

    Returns:
        The number of the step, and what was saved as ``extra``.

    Raises:
        ValueError: if there is no such step, or it is of another model; says what differs. If it cannot be read or is
            not what was saved, as `relibra_jax.execution.checkpoint.restore_checkpoint` says. Model, optimizer and
            balancer keep their values then.
    """
    put_on_mesh(model, optimizer, balancer.mesh)
    step = find_step(manager, step)
    saved = read_layout(manager, step, verify=verify).arrays
    tree = _tree(model, optimizer, balancer, extra)
    # Which stages there were is for the checkpoint to say.
    sizes = capacities_named(name.removeprefix(SIZES) for name in saved if name.startswith(SIZES))
    restored = restore_checkpoint(
        manager,
        tree | {"balancer": balancer.state._replace(capacities=sizes)},
        layers=_layers(model, optimizer),
        mesh=balancer.mesh,
        topology=balancer.topology,
        step=step,
        verify=verify,
    )
    tree = restored.tree
    nnx.update(model, tree["model"])
    nnx.update(optimizer.opt_state, nnx.state(tree["optimizer"]))
    optimizer.step[...] = tree["updates"]
    set_homes(model, restored.home)
    balancer.state = tree["balancer"]._replace(home=restored.home)
    return restored.step, tree["extra"]


def _saved_state(model: nnx.Module) -> Any:
    return nnx.state(model, nnx.Not(Homes))


def _tree(model: nnx.Module, optimizer: nnx.Optimizer, balancer: Balancer, extra: PyTree) -> dict[str, Any]:
    return {
        "model": _saved_state(model),
        "optimizer": optimizer.opt_state,
        "updates": optimizer.step[...],
        "balancer": balancer.state,
        "extra": extra,
    }


def _layers(model: nnx.Module, optimizer: nnx.Optimizer) -> dict[str, Any]:
    trained = expert_labels(nnx.state(model, optimizer.wrt))
    return {
        "model": expert_labels(_saved_state(model)),
        "optimizer": optimizer_layers(optimizer.tx, optimizer.opt_state, trained),
        "updates": None,
        "balancer": None,
        "extra": None,
    }
