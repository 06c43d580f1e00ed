"""Updates and recomputes of whole models, from their shapes: those of `experiments.rl.step`, as a run compiles them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.stack import with_shardings
from experiments.aot.whole_settings import COMPILER_OPTIONS, Cluster, Lowered, Whole
from experiments.rl.objective import Losses
from experiments.rl.optimizer import make_optimizer
from experiments.rl.policy import Agent
from experiments.rl.step import TrainingBatch, recompute, update
from relibra_jax.contract.types import Assignment, BatchPlan, Plan
from relibra_jax.execution import ExpertParallel, prepare_layers
from relibra_jax.execution.memory import HOST, to_host
from relibra_jax.execution.mesh import RANKS
from relibra_jax.models import ModelConfig
from relibra_jax.nnx import PreparedBatch, SequencePacking
from relibra_jax.nnx.host_state import is_training_state, on_device
from relibra_jax.nnx.prepared import by_group
from relibra_jax.nnx.variables import is_variable


def training_program(setting: Whole, cluster: Cluster) -> Lowered:
    """Return an update, or a recompute."""
    config, parallel, make = cluster
    mesh = parallel.mesh
    tx = make_optimizer(1e-5, 1e-5, 0, moments=setting.moments)

    def build() -> tuple[Agent, nnx.Optimizer]:
        agent = Agent(make(nnx.Rngs(0)))
        return agent, nnx.Optimizer(agent, tx, wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(build))
    state = with_shardings(shapes, mesh)
    arguments = (state, *batch_shapes(config, parallel, setting))
    on_host = bytes_on_host(setting, *arguments[:3])

    def recompute_of(state: Any, batch: PreparedBatch, samples: TrainingBatch, _: Any) -> Any:
        state, batch, samples = _in_memory(setting, state, batch, samples)
        agent, _ = nnx.merge(graph, state)
        return recompute(on_device(agent, mesh), batch, samples, temperature=1.0, record=setting.live)

    def update_of(state: Any, batch: PreparedBatch, samples: TrainingBatch, load: jax.Array) -> Any:
        state, batch, samples = _in_memory(setting, state, batch, samples)
        agent, optimizer = nnx.merge(graph, state)
        metrics = update(agent, optimizer, batch, samples, load, losses=Losses(), balance=0.01)
        return nnx.state((agent, optimizer)), metrics

    if setting.program == "recompute":
        program = jax.jit(recompute_of, compiler_options=COMPILER_OPTIONS)
        return Lowered(program, arguments, on_host)
    # Results in host memory keep the shardings that they are computed with.
    outputs = None
    if setting.state_memory != HOST:
        outputs = (jax.tree.map(lambda leaf: leaf.sharding, state), None)
    program = jax.jit(update_of, donate_argnums=0, out_shardings=outputs, compiler_options=COMPILER_OPTIONS)
    return Lowered(program, arguments, on_host)


def batch_shapes(
    config: ModelConfig, parallel: ExpertParallel, setting: Whole
) -> tuple[PreparedBatch, TrainingBatch, jax.ShapeDtypeStruct]:
    """Return the shapes of a prepared batch, its samples on the ranks, and its load."""
    mesh, topology, layers = parallel.mesh, parallel.topology, config.moe_layers
    groups, micro_batches = parallel.num_ranks // topology.num_ranks, setting.micro_batches
    sequences = (micro_batches, parallel.num_ranks, setting.tokens)

    def shape(size: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def tokens(dtype: Any, *rest: int) -> Any:
        return shape((*sequences, *rest), dtype, None, *parallel.token_spec)

    ids = tokens(jnp.uint8, layers, config.top_k)
    samples = TrainingBatch(
        tokens=tokens(jnp.int32),
        mask=tokens(jnp.bool_),
        expert_ids=None if setting.live else ids,
        weights=tokens(jnp.float32),
        advantages=tokens(jnp.float32),
        old_log_probs=tokens(jnp.float32),
        packing=SequencePacking(tokens(jnp.int32), tokens(jnp.int32)),
    )
    batch_load = shape((layers, topology.num_experts), jnp.int32)
    if setting.live:
        return PreparedBatch(None, parallel), samples, batch_load
    all_ranks = (groups * micro_batches, layers, *parallel.ranks)
    slots = shape((*all_ranks, topology.slots), jnp.int32)
    load = shape((*all_ranks, topology.num_experts), jnp.int32)
    assignment = Assignment(shape((groups * micro_batches, *parallel.ranks, 8), jnp.int32))
    plan = BatchPlan(assignment, load, Plan(slots, shape((layers, topology.num_experts), jnp.int32), slots))
    prepare = functools.partial(prepare_layers, parallel=parallel)
    tables = jax.eval_shape(
        lambda ids, plan: prepare(ids, by_group(plan.layer_plans(), parallel)),
        jax.ShapeDtypeStruct(ids.shape, jnp.int32),
        plan,
    )

    def over_ranks(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return shape(leaf.shape, leaf.dtype, None, None, *parallel.data_axes, *RANKS)

    plan_of_ranks = tables.slot_expert
    tables = jax.tree.map(over_ranks, tables._replace(slot_expert=None))
    slot_expert = shape(plan_of_ranks.shape, plan_of_ranks.dtype, None, None, *parallel.data_axes)
    return PreparedBatch(plan, parallel, tables._replace(slot_expert=slot_expert)), samples, batch_load


def _in_memory(
    setting: Whole, state: Any, batch: PreparedBatch, samples: TrainingBatch
) -> tuple[Any, PreparedBatch, TrainingBatch]:
    """Move a program's arguments to host memory, under jit, if the setting has them there.

    Described devices have no memories, so their arguments cannot be declared there. XLA counts the arguments as those
    of the device; `bytes_on_host` is what has to be taken off.
    """
    if setting.state_memory == HOST:
        state = jax.tree.map(
            lambda variable: to_host(variable) if is_training_state(variable) else variable,
            state,
            is_leaf=is_variable,
        )
    if setting.batch_memory == HOST:
        plan = None if setting.live else batch.batch_plan
        batch = PreparedBatch(plan, batch.parallel, to_host(batch.layers()))
        samples = to_host(samples)
    return state, batch, samples


def bytes_on_host(setting: Whole, state: Any, batch: PreparedBatch, samples: TrainingBatch) -> int:
    """Return the bytes of a program's arguments in host memory, for a device."""
    leaves = []
    if setting.state_memory == HOST:
        leaves += jax.tree.leaves(
            list(filter(is_training_state, jax.tree.leaves(state, is_leaf=is_variable)))
        )
    if setting.batch_memory == HOST:
        leaves += jax.tree.leaves((batch.layers(), samples))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
