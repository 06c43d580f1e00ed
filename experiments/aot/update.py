"""A whole optimizer update with residents, and a batch of several: what a training loop compiles.

    push residents   ->   scan over micro-batches: gradients of parameters and residents, summed in float32
    ->   residents' gradients return to their homes   ->   AdamW

Parameters are float32 masters, computed with in bfloat16. Layers were prepared before: their tables are arguments.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from experiments.aot.stack import (
    QUICKLY,
    Layer,
    Model,
    input_shapes,
    loss,
    parameter_shapes,
    plan_shapes,
)
from relibra_jax.execution import OVERLAP_OPTIONS, ExpertParallel, push_residents, return_gradients
from relibra_jax.types import Plan

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
    """One optimizer update over stacked micro-batches, `experiments.aot.stack.Inputs`: parameters and state."""
    has_residents = parallel.topology.resident_slots > 0
    residents = None
    if has_residents:
        residents = push_residents(
            params.experts, plan, parallel, dtype=inputs.x.dtype, chunk_bytes=chunk_bytes
        )

    def share(trained, micro_batch):
        params, residents = trained
        prepared = micro_batch.prepared._replace(residents=residents)
        return loss(params, micro_batch.x, prepared, micro_batch.expert_ids, model, parallel)

    def accumulate(total, micro_batch):
        value, gradients = jax.value_and_grad(share)((params, residents), micro_batch)
        return jax.tree.map(jnp.add, total, gradients), value

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (params, residents))
    (gradients, of_residents), _ = jax.lax.scan(accumulate, nothing, inputs)
    if has_residents:
        totals = return_gradients(of_residents, gradients.experts, plan, parallel, chunk_bytes=chunk_bytes)
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
    """A batch of updates under one plan, parameters and state donated.

    Args:
        model: the sizes of the model.
        parallel: how plans are run; the mesh says for which devices is compiled.
        layers: the number of layers, scanned.
        micro_batches: the micro-batches of an update, scanned.
        updates: the updates of the batch, scanned where there are several.
        chunk_bytes: as in `relibra_jax.execution.push_residents`.

    Returns:
        The compiled batch.
    """
    params = parameter_shapes(model, parallel, (layers,), jnp.float32)
    state = jax.eval_shape(OPTIMIZER.init, params)
    state = optax.tree.map_params(OPTIMIZER, lambda _, param: param, state, params)
    stacked = plan_shapes(parallel, (micro_batches, layers))
    plan = Plan(stacked.slot_expert, plan_shapes(parallel, (layers,)).home, stacked.quota)
    lead = (micro_batches,) if updates == 1 else (updates, micro_batches)

    def batch(params, state, inputs, plan):
        def one(carry, inputs):
            params, state = carry
            return update(params, state, inputs, plan, model, parallel, chunk_bytes), None

        if updates == 1:
            return one((params, state), inputs)[0]
        return jax.lax.scan(one, (params, state), inputs)[0]

    step = jax.jit(batch, donate_argnums=(0, 1), compiler_options={**OVERLAP_OPTIONS, **QUICKLY})
    return step.lower(params, state, input_shapes(model, parallel, lead, layers), plan).compile()
