"""The timed programs: one optimizer update of a stack of layers, as a trainer runs it.

    push residents -> forward and backward of every micro-batch, gradients summed in float32
    -> residents' gradients return -> mean, clip by the global norm, AdamW

Each micro-batch is a call of one compiled program, and layers are a scan inside it. All numbers of micro-batches
therefore share the programs. A layer has no attention: it normalises the tokens, computes the softmax gates of the
recorded experts, runs the experts and adds the residual.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from experiments.contenders import ContenderBatch, expert_weights
from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import LayerPlan, Plan
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

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class Params(NamedTuple):
    """The parameters of all layers, or their gradients or shardings in the same structure."""

    experts: Any
    """The expert weights, ``[L, N, G, H, 3, D, F]``."""
    router: Any
    """The router weights, ``[L, D, E]``."""


class Inputs(NamedTuple):
    """The inputs of the updates under one planner, on the devices."""

    params: Params
    state: optax.OptState
    x: jax.Array
    """The hidden states ``[ranks, t, D]``, the same in every micro-batch."""
    plan: Plan
    """The plan's homes and residents; it has only the first micro-batch."""
    expert_ids: list[jax.Array]
    """The expert ids ``[1, ranks, t, L, K]`` of each micro-batch."""
    layer_plans: list[LayerPlan]
    """The layer plans of each micro-batch, stacked ``[1, L]``."""


class Updated(NamedTuple):
    """The result of an update."""

    params: Params
    state: optax.OptState
    norm: jax.Array
    """The norm of the gradient before clipping, which is the same for all planners with the same routing."""


class Update:
    """The compiled update under one planner on one path.

    Args:
        parallel: the mesh, topology, path, and buffer sizes that suffice for all batches.
        inputs: the inputs of any batch, which determine the shapes.
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
        """Prepare the tables of every micro-batch, stacked ``[1, L]``; needed once per batch, before its updates."""
        return [self._prepare(*each) for each in zip(inputs.expert_ids, inputs.layer_plans, strict=True)]

    def __call__(self, inputs: Inputs, layers: list[PreparedLayer]) -> Updated:
        """Run one update over all micro-batches."""
        residents, total = self._begin(inputs.params, inputs.plan)
        for ids, tables in zip(inputs.expert_ids, layers, strict=True):
            total = self._add(total, inputs.params, residents, inputs.x, ids, tables)
        return self._end(inputs.params, inputs.state, total, inputs.plan, float(len(layers)))

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """The programs that run before, for each of, and after the micro-batches."""
        return self._begin, self._add, self._end

    def _begin_update(self, params: Params, plan: Plan):
        residents = None
        if self._parallel.topology.resident_slots:
            residents = push_residents([params.experts], plan, self._parallel)
        return residents, jax.tree.map(jnp.zeros_like, (params, residents))

    def _add_micro_batch(self, total, params: Params, residents, x, expert_ids, layers: PreparedLayer):
        by_layer = jnp.moveaxis(expert_ids[0], -2, 0)

        def loss(trainable):
            inputs = (*trainable, layers.layer(0), by_layer)
            out, _ = jax.lax.scan(functools.partial(_layer, parallel=self._parallel), x, inputs)
            return (out**2).mean()

        return jax.tree.map(jnp.add, total, jax.grad(loss)((params, residents)))

    def _end_update(self, params: Params, state, total, plan: Plan, micro_batches) -> Updated:
        gradients, resident_gradients = total
        if resident_gradients is not None:
            totals = return_gradients(resident_gradients, gradients.experts, plan, self._parallel)
            gradients = gradients._replace(experts=totals)
        gradients = jax.tree.map(lambda leaf: leaf / micro_batches, gradients)
        changes, state = OPTIMIZER.update(gradients, state, params)
        return Updated(optax.apply_updates(params, changes), state, optax.tree.norm(gradients))


def _layer(x, inputs, *, parallel: ExpertParallel):
    """Run one layer of the scan on ``x[ranks, t, D]``."""
    params, residents, tables, expert_ids = inputs
    weights, x = fetch_replicas(params.experts, tables._replace(residents=residents), x, parallel)
    normalised = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    valid_ids = jnp.maximum(expert_ids, 0)
    gates = jax.nn.softmax(jnp.take_along_axis(normalised @ params.router, valid_ids, -1))
    return x + moe_layer(normalised, expert_ids, gates, weights, tables, parallel).output, None


def param_shardings(parallel: ExpertParallel) -> Params:
    """Return the shardings of parameters: experts are sharded over the ranks, the router is replicated."""
    return Params(*(jax.NamedSharding(parallel.mesh, spec) for spec in (jax.P(None, *RANKS), jax.P())))


def state_shardings(params: Params, parallel: ExpertParallel) -> optax.OptState:
    """Return the shardings of the optimizer state: moments like their parameters, the rest replicated."""
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
    """Create the inputs of updates under one planner, with the same tokens and experts for all planners.

    Args:
        contender: the batch with its plan.
        parallel: the mesh, topology, path and buffer sizes.
        tokens: the number of tokens of a rank including padding, at least that of the rank with the most tokens.
        width: the model width D.
        hidden: the expert width F.
    """
    topology, ids = parallel.topology, contender.expert_ids
    layers = ids.shape[1]
    padding = [(0, 0)] * 3 + [(0, tokens - ids.shape[3]), (0, 0)]
    ids = np.moveaxis(np.pad(ids, padding, constant_values=-1), 1, 3)  # [M ranks t L K]

    def put(values: Any, *spec) -> jax.Array:
        """Put values that are the same on every process on the devices; each process keeps its own part."""
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
