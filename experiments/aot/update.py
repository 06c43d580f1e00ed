"""A whole optimizer update with residents, and a batch of several updates, as a training loop compiles them.

    push residents   ->   scan over micro-batches: gradients of parameters and residents, summed in float32
    ->   residents' gradients return to their homes   ->   AdamW

Parameters are float32 master weights; the computation is in bfloat16. The tables of prepared layers are arguments.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from experiments.aot.stack import (
    FAST_COMPILATION,
    Layer,
    Model,
    input_shapes,
    loss,
    parameter_shapes,
    plan_shapes,
)
from relibra_jax.contract.types import Plan
from relibra_jax.execution import OVERLAP_OPTIONS, ExpertParallel, push_residents, return_gradients

OPTIMIZER = optax.adamw(1e-5)


def update(
    params: Layer,
    state: Any,
    inputs: Any,
    plan: Plan,
    model: Model,
    parallel: ExpertParallel,
    chunk_bytes: int,
) -> tuple[Layer, Any]:
    """Run one optimizer update over stacked micro-batches.

    Args:
        params: the parameters.
        state: the state of the optimizer.
        inputs: the micro-batches, as stacked `experiments.aot.stack.Inputs`.
        plan: the plan of the batch.
        model: the sizes of the model.
        parallel: the mesh, topology, buffer sizes and kinds of exchange.
        chunk_bytes: the size of a chunk of pushed residents, as in `relibra_jax.execution.push_residents`.

    Returns:
        The new parameters and the new state.
    """
    residents = weights = None
    if parallel.topology.resident_slots:
        residents = push_residents(
            params.experts, plan, parallel, dtype=inputs.x.dtype, chunk_bytes=chunk_bytes
        )
        weights = residents.weights

    def micro_batch_loss(trainable, micro_batch):
        params, weights = trainable
        prepared = micro_batch.prepared
        if residents is not None:
            prepared = prepared._replace(residents=residents._replace(weights=weights))
        return loss(params, micro_batch.x, prepared, micro_batch.expert_ids, model, parallel)

    def accumulate(total, micro_batch):
        value, gradients = jax.value_and_grad(micro_batch_loss)((params, weights), micro_batch)
        return jax.tree.map(jnp.add, total, gradients), value

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (params, weights))
    (gradients, resident_gradients), _ = jax.lax.scan(accumulate, zeros, inputs)
    if residents is not None:
        totals = return_gradients(
            resident_gradients, gradients.experts, plan, parallel, chunk_bytes=chunk_bytes
        )
        gradients = gradients._replace(experts=totals)
    changes, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, changes), state


def compile_updates(
    model: Model,
    parallel: ExpertParallel,
    *,
    layers: int,
    micro_batches: int,
    updates: int,
    chunk_bytes: int,
) -> jax.stages.Compiled:
    """Compile a batch of updates under one plan, with donated parameters and state.

    Args:
        model: the sizes of the model.
        parallel: the mesh, whose devices are the target, and the topology, buffer sizes and kinds of exchange.
        layers: the number of scanned layers.
        micro_batches: the number of scanned micro-batches of an update.
        updates: the number of updates of the batch; several are scanned.
        chunk_bytes: the size of a chunk of pushed residents, as in `relibra_jax.execution.push_residents`.

    Returns:
        The compiled program.
    """
    params = parameter_shapes(model, parallel, (layers,), jnp.float32)
    state = jax.eval_shape(OPTIMIZER.init, params)
    state = optax.tree.map_params(OPTIMIZER, lambda _, param: param, state, params)
    stacked = plan_shapes(parallel, (micro_batches, layers))
    plan = Plan(stacked.slot_expert, plan_shapes(parallel, (layers,)).home, stacked.quota)
    lead = (micro_batches,) if updates == 1 else (updates, micro_batches)

    def batch(params, state, inputs, plan):
        def run_update(carry, inputs):
            params, state = carry
            return update(params, state, inputs, plan, model, parallel, chunk_bytes), None

        if updates == 1:
            return run_update((params, state), inputs)[0]
        return jax.lax.scan(run_update, (params, state), inputs)[0]

    step = jax.jit(batch, donate_argnums=(0, 1), compiler_options={**OVERLAP_OPTIONS, **FAST_COMPILATION})
    return step.lower(params, state, input_shapes(model, parallel, lead, layers), plan).compile()
