"""Gradients of one optimizer update, accumulated over its micro-batches, residents included.

    push residents   ->   scan over micro-batches: gradients of parameters and residents, summed in float32
    ->   residents' gradients return to their homes   ->   the caller divides, clips and steps

All in one function, so that one jitted update holds it and no resident can be stale. Residents are inputs of their own:
the optimizer, norms, clipping and weight decay see the model's parameters alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.execution.residents import Residents, push_residents, return_gradients
from relibra_jax.nnx.float8 import check_exact
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.nnx.variables import AXES, ExpertParam
from relibra_jax.plan import resident_experts
from relibra_jax.types import Array

type Objective = Callable[[nnx.Module, PyTree, PreparedLayer | None], tuple[Array, PyTree]]
"""``objective(model, samples, layers) -> (loss, more)``: the share of one micro-batch in the batch's loss, which is
their sum, and whatever else is wanted of it. ``samples`` are the micro-batch's rows, ``layers`` what its layers follow,
stacked ``[L]``; None for live routing."""


def accumulate_gradients(
    model: nnx.Module,
    objective: Objective,
    batch: PreparedBatch,
    samples: PyTree,
    *,
    micro_batches: slice = slice(None),
    residents: Residents | None = None,
) -> tuple[Any, PyTree]:
    """The gradient of a sum over micro-batches. Call it inside the jitted update.

    The model's other state (counts of random streams, running statistics) is read and left as it is: give a step's
    random keys with the samples.

    Args:
        model: the model; its parameters (``nnx.Param``) are differentiated.
        objective: the loss of one micro-batch.
        batch: the prepared batch, in replay or live.
        samples: what `PreparedBatch.to_ranks` returned: the rows of all micro-batches.
        micro_batches: the micro-batches of this update, where a batch has several updates; all of them by default.
        residents: residents that `prepare_residents` made for this step, and `relibra_jax.execution.check_residents`
            accepted; None pushes them here.

    Returns:
        ``(gradients, more)``: the gradients in float32 (or wider, with wider parameters), of the structure of
        ``nnx.state(model, nnx.Param)``; and what the objective returned besides the loss, stacked over micro-batches.

    Raises:
        ValueError: if ranks of the batch compute in float8.
    """
    check_exact(batch)
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    weights = _push_weights(params, batch) if residents is None else residents.weights

    def share(trained, micro_batch):
        params, weights = trained
        samples, layers = micro_batch
        if weights is not None:
            layers = layers._replace(residents=weights)
        return objective(nnx.merge(graph, params, *rest), samples, layers)

    def accumulate(total, micro_batch):
        more, also = jax.grad(share, has_aux=True)((params, weights), micro_batch)
        return jax.tree.map(jnp.add, total, more), also

    def zeros(leaf):
        return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))

    nothing = jax.tree.map(zeros, (params, weights))
    of_update = jax.tree.map(lambda leaf: leaf[micro_batches], (samples, batch.layers()))
    (gradients, of_residents), also = jax.lax.scan(accumulate, nothing, of_update)
    if weights is not None:
        gradients = _add_returned(gradients, of_residents, batch)
    return gradients, also


def prepare_residents(model: nnx.Module, optimizer: nnx.Optimizer, batch: PreparedBatch) -> Residents | None:
    """The residents of one update, for steps that share them, such as a recompute and the update after it.

    Jit it, and donate them to the update that uses them last. They serve until the optimizer steps;
    `relibra_jax.execution.check_residents` says so on the host.

    Args:
        model: the model as it is now.
        optimizer: its optimizer, whose step the residents carry.
        batch: the prepared batch.

    Returns:
        Weights and step; None if the batch has no residents.
    """
    weights = _push_weights(nnx.state(model, nnx.Param), batch)
    if weights is None:
        return None
    experts = resident_experts(batch.batch_plan.plan, batch.parallel.topology)
    return Residents(weights, jnp.asarray(optimizer.step[...], jnp.int32), experts)


def _push_weights(params: Any, batch: PreparedBatch) -> Array | None:
    if batch.layers() is None or not batch.parallel.topology.resident_slots:
        return None
    leaves = _experts(params)
    return push_residents(
        [leaf.get_raw_value() for leaf in leaves],
        batch.batch_plan.plan,
        batch.parallel,
        dtype=leaves[0].get_metadata("compute_dtype", None),
        fsdp_axis=_fsdp_axis(leaves[0]),
    )


def _add_returned(gradients: Any, of_residents: jax.Array, batch: PreparedBatch) -> Any:
    leaves = _experts(gradients)
    totals = return_gradients(
        of_residents,
        [leaf.get_raw_value() for leaf in leaves],
        batch.batch_plan.plan,
        batch.parallel,
        fsdp_axis=_fsdp_axis(leaves[0]),
    )
    sums = iter(totals)

    def add(leaf):
        return leaf.replace(next(sums)) if isinstance(leaf, ExpertParam) else leaf

    return jax.tree.map(add, gradients, is_leaf=_is_variable)


def _experts(state: Any) -> list[ExpertParam]:
    """The expert weights of all layers, in the order of the tree."""
    leaves = jax.tree.leaves(state, is_leaf=_is_variable)
    return [leaf for leaf in leaves if isinstance(leaf, ExpertParam)]


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _fsdp_axis(leaf: ExpertParam) -> str | None:
    """The mesh axis over which experts are sharded along D."""
    spec = tuple(leaf.get_metadata("out_sharding", None) or ())
    ahead = max(len(leaf.shape) - AXES, 0) + 4
    return spec[ahead] if len(spec) > ahead else None
