"""One optimizer update of a stack of layers, as a trainer runs it: the programs that are timed.

    push residents -> forward and backward of every micro-batch, gradients summed in float32
    -> residents' gradients return -> mean, clip by the global norm, AdamW

Micro-batches are calls of one compiled program and layers a scan inside it, so no program knows how many micro-batches
there are, and all numbers of them share the programs. There is no attention: a layer is normalised tokens, a softmax
router at the recorded experts, experts, a residual.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from experiments.contenders import ContenderBatch, expert_weights
from relibra_jax.execution import (
    ExpertParallel,
    PreparedLayer,
    fetch_replicas,
    moe_layer,
    prepare_layers,
    push_residents,
    return_gradients,
)
from relibra_jax.execution.mesh import RANKS
from relibra_jax.plan import home_layout
from relibra_jax.types import LayerPlan, Plan

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class Params(NamedTuple):
    """Parameters of all layers; or, of the same structure, their gradients or shardings."""

    experts: Any
    """``[L, N, G, H, 3, D, F]``."""
    router: Any
    """``[L, D, E]``."""


class Inputs(NamedTuple):
    """What one contender's updates start from, on the devices."""

    params: Params
    state: optax.OptState
    x: jax.Array
    """``[ranks, t, D]``, the same in every micro-batch."""
    plan: Plan
    """Homes and residents; of its micro-batches only the first is read."""
    expert_ids: list[jax.Array]
    """``[1, ranks, t, L, K]`` of each micro-batch."""
    layer_plans: list[LayerPlan]
    """Stacked ``[1, L]``, of each micro-batch."""


class Updated(NamedTuple):
    """What an update leaves."""

    params: Params
    state: optax.OptState
    norm: jax.Array
    """Of the gradient, before it is clipped: the same for all contenders that run the same routing."""


class Update:
    """The compiled update of one contender on one path.

    Args:
        parallel: mesh, topology, path and the buffer sizes of all batches that are run.
        inputs: the inputs of any one batch, for their shapes.
    """

    def __init__(self, parallel: ExpertParallel, inputs: Inputs):
        self._parallel = parallel
        params = param_shardings(parallel)
        residents = params.experts if parallel.topology.resident_slots else None
        total = (params, residents)
        prepare = prepare_layers.lower(inputs.expert_ids[0], inputs.layer_plans[0], parallel)
        self._prepare = prepare.compile()
        begin = jax.jit(self._begin_update, out_shardings=(residents, total))
        self._begin = begin.lower(inputs.params, inputs.plan).compile()
        layers, ids = self.prepare(inputs)[0], inputs.expert_ids[0]
        weights, zeros = self._begin(inputs.params, inputs.plan)
        add = jax.jit(self._add_micro_batch, out_shardings=total, donate_argnums=0)
        self._add = add.lower(zeros, inputs.params, weights, inputs.x, ids, layers).compile()
        state = state_shardings(inputs.params, parallel)
        end = jax.jit(self._end_update, out_shardings=Updated(params, state, params.router))
        self._end = end.lower(inputs.params, inputs.state, zeros, inputs.plan, 1.0).compile()

    def prepare(self, inputs: Inputs) -> list[PreparedLayer]:
        """The tables of every micro-batch, stacked ``[1, L]``: once a batch, before its updates."""
        return [self._prepare(*each) for each in zip(inputs.expert_ids, inputs.layer_plans, strict=True)]

    def __call__(self, inputs: Inputs, layers: list[PreparedLayer]) -> Updated:
        """One update over all micro-batches."""
        residents, total = self._begin(inputs.params, inputs.plan)
        for ids, tables in zip(inputs.expert_ids, layers, strict=True):
            total = self._add(total, inputs.params, residents, inputs.x, ids, tables)
        return self._end(inputs.params, inputs.state, total, inputs.plan, float(len(layers)))

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """The program before the micro-batches, that of each of them, and the one behind them."""
        return self._begin, self._add, self._end

    def _begin_update(self, params: Params, plan: Plan):
        residents = None
        if self._parallel.topology.resident_slots:
            residents = push_residents([params.experts], plan, self._parallel)
        return residents, jax.tree.map(jnp.zeros_like, (params, residents))

    def _add_micro_batch(self, total, params: Params, residents, x, expert_ids, layers: PreparedLayer):
        by_layer = jnp.moveaxis(expert_ids[0], -2, 0)

        def loss(trained):
            inputs = (*trained, layers.layer(0), by_layer)
            out, _ = jax.lax.scan(functools.partial(_layer, parallel=self._parallel), x, inputs)
            return (out**2).mean()

        return jax.tree.map(jnp.add, total, jax.grad(loss)((params, residents)))

    def _end_update(self, params: Params, state, total, plan: Plan, micro_batches) -> Updated:
        gradients, of_residents = total
        if of_residents is not None:
            (returned,) = return_gradients(of_residents, [params.experts], plan, self._parallel)
            gradients = gradients._replace(experts=gradients.experts + returned)
        gradients = jax.tree.map(lambda leaf: leaf / micro_batches, gradients)
        changes, state = OPTIMIZER.update(gradients, state, params)
        return Updated(optax.apply_updates(params, changes), state, optax.tree.norm(gradients))


def _layer(x, inputs, *, parallel: ExpertParallel):
    """One layer of a scan: ``x[ranks, t, D]``."""
    params, residents, tables, expert_ids = inputs
    held, x = fetch_replicas(params.experts, tables._replace(residents=residents), x, parallel)
    normed = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    chosen = jnp.maximum(expert_ids, 0)
    gates = jax.nn.softmax(jnp.take_along_axis(normed @ params.router, chosen, -1))
    return x + moe_layer(normed, expert_ids, gates, held, tables, parallel).output, None


def param_shardings(parallel: ExpertParallel) -> Params:
    """Experts over the ranks, the router everywhere."""
    return Params(*(jax.NamedSharding(parallel.mesh, spec) for spec in (jax.P(None, *RANKS), jax.P())))


def state_shardings(params: Params, parallel: ExpertParallel) -> optax.OptState:
    """Moments as their parameters, the rest everywhere."""
    shardings = param_shardings(parallel)
    return optax.tree.map_params(
        OPTIMIZER,
        lambda _, sharding: sharding,
        jax.eval_shape(OPTIMIZER.init, params),
        shardings,
        transform_non_params=lambda _: shardings.router,
    )


def make_inputs(
    contender: ContenderBatch, parallel: ExpertParallel, *, tokens: int, width: int, hidden: int
) -> Inputs:
    """The inputs of a contender's updates: the same tokens and experts for all contenders.

    Args:
        contender: the batch as the contender runs it.
        parallel: how it is run.
        tokens: the tokens of a rank, padding among them; as many as the fullest rank has, or more.
        width: D.
        hidden: F.
    """
    topology, ids = parallel.topology, contender.expert_ids
    layers = ids.shape[1]
    padding = [(0, 0)] * 3 + [(0, tokens - ids.shape[3]), (0, 0)]
    ids = np.moveaxis(np.pad(ids, padding, constant_values=-1), 1, 3)  # [M ranks t L K]

    def put(values: Any, *spec) -> jax.Array:
        """The same values on every process, each keeping its own part."""
        values = np.asarray(values)
        sharding = jax.NamedSharding(parallel.mesh, jax.P(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    weights = expert_weights(topology.num_experts, width, hidden, layers)
    layout = np.asarray(home_layout(contender.batch_plan.plan.home, topology))
    experts = weights[np.arange(layers).reshape(-1, 1, 1, 1), layout]
    params = Params(put(experts, None, *RANKS), put(weights[:, :, 0, :, 0].swapaxes(1, 2)))
    x = np.random.default_rng(0).normal(size=(topology.num_ranks, tokens, width)).astype(np.float32)
    slots, home, quota = contender.batch_plan.plan
    by_micro_batch = [
        jax.tree.map(lambda leaf, at=at: put(leaf[at : at + 1]), contender.batch_plan.layer_plans())
        for at in range(len(ids))
    ]
    return Inputs(
        params=params,
        state=jax.jit(OPTIMIZER.init, out_shardings=state_shardings(params, parallel))(params),
        x=put(x, RANKS),
        plan=jax.tree.map(put, Plan(slots[:1], home, quota[:1])),
        expert_ids=[put(ids[at : at + 1], None, RANKS) for at in range(len(ids))],
        layer_plans=by_micro_batch,
    )
