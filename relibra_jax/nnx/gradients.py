"""Gradients of one optimizer update, accumulated over its micro-batches, including the gradients of residents.

    push residents   ->   scan over micro-batches: gradients of parameters and residents, summed in float32
    ->   residents' gradients return to their homes   ->   the caller divides, clips and steps

One function does all of this, so that one jitted update contains it and residents are never stale. Residents are
separate inputs, not parameters: the optimizer, norms, clipping and weight decay see only the model's parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Integer, PyTree

from relibra_jax.contract.types import Array
from relibra_jax.execution.memory import take
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.execution.residents import Residents, push_residents, return_gradients
from relibra_jax.nnx.dense_sharding import shard_like_dense
from relibra_jax.nnx.group_totals import gather_experts, sum_groups, total_of_groups, total_of_residents
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.nnx.variables import ExpertParam, WithTotal, fsdp_axis_of, is_variable
from relibra_jax.support.argument_types import checks_arguments

type Objective = Callable[[nnx.Module, PyTree, PreparedLayer | None], tuple[Array, PyTree]]
"""The loss function of one micro-batch, ``objective(model, samples, layers) -> (loss, auxiliary)``.

The loss of the batch is the sum of the losses of its micro-batches. ``auxiliary`` is any tree of additional outputs.
``samples`` are the micro-batch's sequences. ``layers`` are its prepared layers, stacked ``[L]``, or None for live
routing.
"""


@checks_arguments
def accumulate_gradients(
    model: nnx.Module,
    objective: Objective,
    batch: PreparedBatch,
    samples: PyTree,
    *,
    micro_batches: slice = slice(None),
    residents: Residents | None = None,
    step: Integer[Array, ""] | int | None = None,
    in_place: bool = False,
) -> tuple[Any, PyTree]:
    """Compute the gradient of the loss summed over micro-batches. Call it inside the jitted update.

    The function reads the model's other state (counters of random streams, running statistics) but does not change it.
    Pass the random keys of a step with the samples.

    Args:
        model: the model. Its parameters (``nnx.Param``) are differentiated.
        objective: the loss function of one micro-batch.
        batch: the prepared batch, from a replay or for live routing.
        samples: the sequences of all micro-batches, as `PreparedBatch.to_ranks` returns them.
        micro_batches: the micro-batches of this update, for a batch of several updates. All of them by default.
        residents: the residents of this optimizer step from `prepare_residents`. None pushes residents in this
            function.
        step: the optimizer's step number, ``optimizer.step[...]``, required with ``residents``.
        in_place: whether a `relibra_jax.models.LanguageModel` adds the gradients of a layer to their totals where it
            computes them, so that those of a micro-batch take no memory. The gradients of experts are then summed over
            data-parallel groups once, and not in every micro-batch, with ``ExpertParallel(gather_once=True)`` over an
            FSDP axis too. The objective must run the model once: after none or several runs the gradients of embedding,
            output head and last norm are NaN.

    Returns:
        ``(gradients, auxiliary)``: the gradients in float32 (or wider, if the parameters are wider), with the structure
        of ``nnx.state(model, nnx.Param)``; and the additional outputs of the objective, stacked over micro-batches.
        The loss and all gradients of experts are NaN if ``residents`` were pushed at another step or for another batch.

    Raises:
        ValueError: if ``samples`` has another number of micro-batches, ``residents`` come without ``step``, no
            parameter adds gradients ``in_place``, or ``gather_once`` finds no experts sharded over an FSDP axis.
    """
    _check_micro_batches(samples, batch.layers())
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    if residents is None:
        residents = _push(params, batch)
    elif step is None:
        raise ValueError("residents were given without step: pass step=optimizer.step[...]")
    else:
        residents = residents.at(step)
    paths, stored = zip(*nnx.to_flat_state(params), strict=True)
    variables = gather_experts(list(stored), batch.parallel)
    values = [variable.get_raw_value() for variable in variables]
    adds = [in_place and variable.get_metadata("adds_gradients", False) for variable in variables]
    if in_place and not any(adds):
        raise ValueError(
            "in_place=True needs a model that adds gradients where it computes them, such as"
            " relibra_jax.models.LanguageModel: no parameter has the metadata adds_gradients"
        )
    if residents is not None:
        values.append(residents.weights)
        adds.append(in_place)

    def micro_batch_loss(differentiated, runs, number):
        """Compute the loss from values, or from the totals of those to which the model adds gradients."""
        trained = [
            WithTotal(value, each, runs) if add else each
            for value, each, add in zip(values, differentiated, adds, strict=True)
        ]
        of_variables = (variable.replace(each) for variable, each in zip(variables, trained, strict=False))
        params = nnx.from_flat_state(list(zip(paths, of_variables, strict=True)))
        one, layers = take((samples, batch.layers()), number)
        if residents is not None:
            assert layers is not None, "batches with residents have prepared layers"
            weights: Any = trained[-1]
            layers = layers._replace(residents=residents._replace(weights=weights))
        # Copies, because Flax's transformations in the objective reject variables that were made outside this trace.
        return objective(nnx.merge(graph, params, *rest, copy=True), one, layers)

    def accumulate(totals, number):
        point = [total if add else value for value, total, add in zip(values, totals, adds, strict=True)]
        gradient = jax.grad(micro_batch_loss, argnums=(0, 1), has_aux=True)
        (gradients, runs), auxiliary = gradient(point, jnp.zeros(()), number)
        once = jnp.where(runs == sum(adds), 1.0, jnp.nan)
        totals = [
            each if add else total + (each * once if in_place else each)
            for total, each, add in zip(totals, gradients, adds, strict=True)
        ]
        return totals, auxiliary

    def zeros(shape, dtype):
        return jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))

    # Totals of gathered experts are as wide as the parameters.
    of_variables = [
        variable.replace(zeros(value.shape, original.get_raw_value().dtype))
        for variable, value, original in zip(variables, values, stored, strict=False)
    ]
    of_variables = shard_like_dense(of_variables, batch.parallel.mesh)
    totals = [
        total_of_groups(variable, batch.parallel) if add else variable.get_raw_value()
        for variable, add in zip(of_variables, adds, strict=False)
    ]
    if residents is not None:
        of_residents = zeros(residents.weights.shape, residents.weights.dtype)
        totals.append(total_of_residents(of_residents, batch.parallel) if in_place else of_residents)
    numbers = jnp.arange(len(jax.tree.leaves((samples, batch.layers()))[0]))[micro_batches]
    totals, auxiliary = jax.lax.scan(accumulate, totals, numbers)
    summed = (
        variable.replace(sum_groups(total, variable, batch.parallel))
        for variable, total in zip(stored, totals, strict=False)
    )
    gradients = nnx.from_flat_state(list(zip(paths, summed, strict=True)))
    if residents is not None:
        gradients = _add_resident_gradients(gradients, totals[-1], batch)
    return gradients, auxiliary


def _check_micro_batches(samples: PyTree, layers: PreparedLayer | None) -> None:
    """Raise unless every array of ``samples`` begins with the micro-batches. Live routing takes any number."""
    if layers is None:
        return
    micro_batches = len(layers.slot_expert)
    for path, leaf in jax.tree.leaves_with_path(samples):
        if jnp.shape(leaf)[:1] != (micro_batches,):
            raise ValueError(
                f"samples{jax.tree_util.keystr(path)}: shape {jnp.shape(leaf)}, but the batch has {micro_batches}"
                " micro-batches: pass what PreparedBatch.to_ranks returns, [M, sequences, ...]"
            )


@checks_arguments
def prepare_residents(model: nnx.Module, optimizer: nnx.Optimizer, batch: PreparedBatch) -> Residents | None:
    """Push the residents of one update, for steps that share them, such as a recompute and the update after it.

    Call it under jit, and donate the residents to the last step that uses them. They are valid until the next optimizer
    step: later steps give NaN, and `relibra_jax.execution.check_residents` says so on the host.

    Args:
        model: the model with its current parameters.
        optimizer: the optimizer of the model. The residents record its current step number.
        batch: the prepared batch.

    Returns:
        The residents with the step number. None if the batch has no residents.
    """
    residents = _push(nnx.state(model, nnx.Param), batch)
    if residents is None:
        return None
    return residents._replace(step=jnp.asarray(optimizer.step[...], jnp.int32))


def _push(params: Any, batch: PreparedBatch) -> Residents | None:
    if not batch.parallel.topology.resident_slots:
        return None
    leaves = _experts(params)
    return push_residents(
        [leaf.get_raw_value() for leaf in leaves],
        batch.batch_plan.plan,
        batch.parallel,
        dtype=leaves[0].get_metadata("compute_dtype", None),
        fsdp_axis=fsdp_axis_of(leaves[0]),
    )


def _add_resident_gradients(gradients: Any, resident_gradients: jax.Array, batch: PreparedBatch) -> Any:
    leaves = _experts(gradients)
    totals = return_gradients(
        resident_gradients,
        [leaf.get_raw_value() for leaf in leaves],
        batch.batch_plan.plan,
        batch.parallel,
        fsdp_axis=fsdp_axis_of(leaves[0]),
    )
    sums = iter(totals)

    def add(leaf):
        return leaf.replace(next(sums)) if isinstance(leaf, ExpertParam) else leaf

    return jax.tree.map(add, gradients, is_leaf=is_variable)


def _experts(state: Any) -> list[ExpertParam]:
    """Return the expert weights of all layers, in the order of the tree."""
    leaves = jax.tree.leaves(state, is_leaf=is_variable)
    return [leaf for leaf in leaves if isinstance(leaf, ExpertParam)]
