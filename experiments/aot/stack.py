"""A minimal stack of MoE transformer layers, and its training step without an optimizer.

The stack has the parts that matter for compilation: pre-norm causal attention over the samples of each rank, a softmax
router whose gates are recomputed at replayed ids, checkpointed layers, and residuals in bfloat16.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relibra_jax.contract.types import LayerPlan
from relibra_jax.execution import (
    OVERLAP_OPTIONS,
    ExpertParallel,
    PreparedLayer,
    fetch_replicas,
    moe_layer,
    prepare_layers,
)
from relibra_jax.execution.mesh import RANKS

# Autotuning matrix products takes a third of the compile time, and changes neither schedule nor buffers.
FAST_COMPILATION: Final = {"xla_gpu_autotune_level": 0}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of the model and of one rank's part of a micro-batch."""

    width: int = 2048
    expert_width: int = 768
    heads: int = 16
    top_k: int = 4
    samples: int = 4
    positions: int = 512

    @property
    def tokens(self) -> int:
        """The number of tokens t of one rank."""
        return self.samples * self.positions


class Layer(NamedTuple):
    """The parameters of a layer; in a stack they have a leading axis over layers."""

    qkv: jax.Array
    out: jax.Array
    router: jax.Array
    experts: jax.Array


def layer(
    x: jax.Array,
    params: Layer,
    prepared: PreparedLayer,
    expert_ids: jax.Array,
    model: Model,
    parallel: ExpertParallel,
) -> jax.Array:
    """Run one layer on ``x[samples, positions, D]`` of all ranks, in the dtype of ``x``.

    Args:
        x: the hidden states.
        params: the parameters of the layer.
        prepared: the tables of the prepared layer.
        expert_ids: the replayed routing.
        model: the sizes of the model.
        parallel: the mesh, topology, buffer sizes and kinds of exchange.

    Returns:
        The hidden states after the layer.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(x.dtype), params)
    experts, x = fetch_replicas(params.experts, prepared, x, parallel)
    with jax.named_scope("attention"):
        x = x + _attention(_normalise(x), params, model)
    hidden = _normalise(x)
    scores = jnp.einsum("btd,de->bte", hidden, params.router, preferred_element_type=jnp.float32)
    gates = jnp.take_along_axis(jax.nn.softmax(scores), expert_ids, axis=-1)
    return x + moe_layer(hidden, expert_ids, gates, experts, prepared, parallel).output


def _attention(x, params: Layer, model: Model):
    shape = (*x.shape[:2], 3, model.heads, -1)
    query, key, value = jnp.moveaxis((x @ params.qkv).reshape(shape), 2, 0)
    scores = jnp.einsum("bqhc,bkhc->bhqk", query, key, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    scores = jnp.where(causal, scores / query.shape[-1] ** 0.5, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores).astype(x.dtype), value)
    return mixed.reshape(x.shape) @ params.out


def _normalise(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def loss(
    params: Any, x: jax.Array, prepared: Any, expert_ids: Any, model: Model, parallel: ExpertParallel
) -> jax.Array:
    """Compute the loss of a stack of checkpointed layers: scanned for stacked leaves, unrolled for tuples of layers.

    Args:
        params: the parameters, as a stacked `Layer` or a tuple of layers.
        x: the hidden states of the input.
        prepared: the tables of the prepared layers, stacked or a tuple.
        expert_ids: the replayed routing of the layers, stacked or a tuple.
        model: the sizes of the model.
        parallel: the mesh, topology, buffer sizes and kinds of exchange.

    Returns:
        The mean square of the outputs.
    """
    scanned = isinstance(params, Layer)

    def apply(x, slices):
        params, prepared, expert_ids = slices
        return layer(x, params, prepared, expert_ids, model, parallel)

    # XLA could merge the recomputation with the first computation only in an unrolled stack.
    policy = jax.checkpoint_policies.nothing_saveable
    apply = jax.checkpoint(apply, policy=policy, prevent_cse=not scanned)
    if scanned:
        x, _ = jax.lax.scan(lambda x, slices: (apply(x, slices), None), x, (params, prepared, expert_ids))
    else:
        for slices in zip(params, prepared, expert_ids, strict=True):
            x = apply(x, slices)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def compile_step(
    model: Model, parallel: ExpertParallel, *, layers: int, scanned: bool
) -> jax.stages.Compiled:
    """Compile the forward and backward pass of a stack, with the compiler options for overlap.

    Args:
        model: the sizes of the model.
        parallel: the mesh, whose devices are the target, and the topology, buffer sizes and kinds of exchange.
        layers: the number of layers.
        scanned: whether one loop runs over stacked parameters. Otherwise the stack is unrolled, and each layer has its
            own parameters.

    Returns:
        The compiled function that computes the gradients of parameters and input, all in bfloat16.
    """
    params = parameter_shapes(model, parallel, (layers,), jnp.bfloat16)
    inputs = input_shapes(model, parallel, (), layers)
    stacked: tuple[Any, ...] = (params, inputs.prepared, inputs.expert_ids)
    if not scanned:
        stacked = tuple((_without_first_axis(one),) * layers for one in stacked)

    def step_loss(params, x, prepared, expert_ids):
        return loss(params, x, prepared, expert_ids, model, parallel)

    options = {**OVERLAP_OPTIONS, **FAST_COMPILATION}
    step = jax.jit(jax.grad(step_loss, argnums=(0, 1)), compiler_options=options)
    return step.lower(stacked[0], inputs.x, *stacked[1:]).compile()


class Inputs(NamedTuple):
    """The inputs of a stack besides its parameters."""

    x: jax.ShapeDtypeStruct
    """The hidden states, ``[*lead, samples, positions, D]``."""
    prepared: PreparedLayer
    """The tables of the prepared layers, ``[*lead, L, ...]``, without residents."""
    expert_ids: jax.ShapeDtypeStruct
    """The replayed routing, ``[*lead, L, samples, positions, K]``."""


def parameter_shapes(model: Model, parallel: ExpertParallel, lead: tuple[int, ...], dtype: Any) -> Layer:
    """Return the shapes and shardings of layer parameters with the leading axes ``lead``."""
    topology, width = parallel.topology, model.width
    slots = (*parallel.ranks, topology.home_slots)
    return Layer(
        qkv=_array(parallel, lead, (width, 3 * width), dtype),
        out=_array(parallel, lead, (width, width), dtype),
        router=_array(parallel, lead, (width, topology.num_experts), dtype),
        experts=_array(parallel, lead, (*slots, 3, width, model.expert_width), dtype, *RANKS),
    )


def plan_shapes(parallel: ExpertParallel, lead: tuple[int, ...]) -> LayerPlan:
    """Return the shapes of layer plans with the leading axes ``lead``, replicated on all devices."""
    topology, ranks = parallel.topology, parallel.ranks
    slots = _array(parallel, lead, (*ranks, topology.slots), jnp.int32)
    home = _array(parallel, lead, (topology.num_experts,), jnp.int32)
    return LayerPlan(slots, home, slots, _array(parallel, lead, (*ranks, topology.num_experts), jnp.int32))


def input_shapes(model: Model, parallel: ExpertParallel, lead: tuple[int, ...], layers: int) -> Inputs:
    """Return the shapes and shardings of a stack's inputs; ``lead`` are the numbers of updates and micro-batches.

    Args:
        model: the sizes of the model.
        parallel: the mesh, topology, buffer sizes and kinds of exchange.
        lead: the leading axes.
        layers: the number of layers.
    """
    samples = (parallel.num_ranks * model.samples, model.positions)
    ids = jax.ShapeDtypeStruct((1, *samples, layers, model.top_k), jnp.int32)
    tables = jax.eval_shape(
        lambda ids, plans: prepare_layers(ids, plans, parallel), ids, plan_shapes(parallel, (1, layers))
    )

    def stacked(leaf: jax.ShapeDtypeStruct, *spec: Any) -> jax.ShapeDtypeStruct:
        return _array(parallel, (*lead, layers), leaf.shape[2:], leaf.dtype, *spec)

    prepared = jax.tree.map(lambda leaf: stacked(leaf, *RANKS), tables._replace(slot_expert=None))
    return Inputs(
        x=_array(parallel, lead, (*samples, model.width), jnp.bfloat16, RANKS),
        prepared=prepared._replace(slot_expert=stacked(tables.slot_expert)),
        expert_ids=_array(parallel, (*lead, layers), (*samples, model.top_k), jnp.int32, RANKS),
    )


def with_shardings(shapes: Any, mesh: Mesh) -> Any:
    """Add the shardings that the metadata of variables says to their shapes."""
    specs = nnx.get_partition_spec(shapes)

    def add(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        spec = spec if isinstance(spec, PartitionSpec) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(add, shapes, specs)


def _array(parallel: ExpertParallel, lead: tuple[int, ...], shape: Any, dtype: Any, *spec: Any):
    sharding = NamedSharding(parallel.mesh, PartitionSpec(*(None for _ in lead), *spec))
    return jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=sharding)


def _without_first_axis(shapes: Any) -> Any:
    def rest(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)

    return jax.tree.map(rest, shapes)
