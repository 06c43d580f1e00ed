"""A stack of transformer layers, attention and mixture of experts, and its training step without an optimizer.

As small as a stack can be and still show what compilers do to one: pre-norm causal attention over the samples of
each rank, a softmax router whose gates are recomputed at replayed ids, checkpointed layers, residuals in bfloat16.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from relibra_jax.execution.mesh import OVERLAP_OPTIONS, RANKS
from relibra_jax.execution.moe import ExpertParallel, fetch_replicas, moe_layer
from relibra_jax.types import Plan

# Choosing tiles of matrix products takes a third of the compile time, and changes neither schedule nor buffers.
QUICKLY: Final = {"xla_gpu_autotune_level": 0}


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of the model and of one rank's part of a micro-batch."""

    width: int = 2048
    expert_width: int = 768
    heads: int = 16
    top_k: int = 4
    samples: int = 4
    positions: int = 512

    @property
    def tokens(self) -> int:
        """t, of one rank."""
        return self.samples * self.positions


class Layer(NamedTuple):
    """Parameters; a leading axis over layers in a stack."""

    qkv: jax.Array
    out: jax.Array
    router: jax.Array
    experts: jax.Array


class Replay(NamedTuple):
    """What a layer of one micro-batch is told; a leading axis over layers in a stack."""

    plan: Plan
    load: jax.Array
    expert_ids: jax.Array


def layer(x: jax.Array, params: Layer, replay: Replay, model: Model, parallel: ExpertParallel) -> jax.Array:
    """One layer: ``x`` is ``[N, G, t, D]``."""
    experts, x = fetch_replicas(params.experts, replay.plan, x, parallel)
    with jax.named_scope("attention"):
        x = x + _attention(_normalise(x), params, model)
    hidden = _normalise(x)
    scores = jnp.einsum("ngtd,de->ngte", hidden, params.router, preferred_element_type=jnp.float32)
    gates = jnp.take_along_axis(jax.nn.softmax(scores), replay.expert_ids, axis=-1)
    return x + moe_layer(hidden, replay.expert_ids, gates, experts, replay.plan, replay.load, parallel)


def _attention(x, params: Layer, model: Model):
    shape = (*x.shape[:2], model.samples, model.positions, 3, model.heads, -1)
    query, key, value = jnp.moveaxis((x @ params.qkv).reshape(shape), 4, 0)
    scores = jnp.einsum("ngbqhc,ngbkhc->ngbhqk", query, key, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[(None,) * 4]
    scores = jnp.where(causal, scores / query.shape[-1] ** 0.5, -jnp.inf)
    mixed = jnp.einsum("ngbhqk,ngbkhc->ngbqhc", jax.nn.softmax(scores).astype(x.dtype), value)
    return mixed.reshape(x.shape) @ params.out


def _normalise(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def compile_step(
    model: Model, parallel: ExpertParallel, *, layers: int, scanned: bool
) -> jax.stages.Compiled:
    """Forward and backward of a stack, with the options that overlap needs.

    Args:
        model: its sizes.
        parallel: how it runs; its mesh says for which devices.
        layers: of the stack.
        scanned: one loop over stacked parameters; else one layer after the other, each with parameters of its own.

    Returns:
        The compiled gradients of parameters and input, all in bfloat16.
    """

    def apply(x, slices):
        params, replay = slices
        return layer(x, params, replay, model, parallel)

    # Only an unrolled stack could have its second computation merged with the first.
    policy = jax.checkpoint_policies.nothing_saveable
    apply = jax.checkpoint(apply, policy=policy, prevent_cse=not scanned)

    def loss(params, x, replay):
        if scanned:
            x, _ = jax.lax.scan(lambda x, slices: (apply(x, slices), None), x, (params, replay))
        else:
            for slices in zip(params, replay, strict=True):
                x = apply(x, slices)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = _layer_shapes(model, parallel, stacked=layers if scanned else None)
    params, replay = shapes if scanned else tuple((one,) * layers for one in shapes)
    ranks = (parallel.topology.num_nodes, parallel.topology.ranks_per_node)
    sharding = NamedSharding(parallel.mesh, PartitionSpec(*RANKS))
    x = jax.ShapeDtypeStruct((*ranks, model.tokens, model.width), jnp.bfloat16, sharding=sharding)
    options = {**OVERLAP_OPTIONS, **QUICKLY}
    step = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=options)
    return step.lower(params, x, replay).compile()


def _layer_shapes(model: Model, parallel: ExpertParallel, stacked: int | None) -> tuple[Layer, Replay]:
    """Shapes, dtypes and shardings of a layer's arguments, or of those of all layers of a stack."""
    lead = () if stacked is None else (stacked,)

    def array(shape, dtype, *spec):
        sharding = NamedSharding(parallel.mesh, PartitionSpec(*(None for _ in lead), *spec))
        return jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=sharding)

    topology, width = parallel.topology, model.width
    ranks, experts = (topology.num_nodes, topology.ranks_per_node), topology.num_experts
    weights = (*ranks, topology.home_slots, 3, width, model.expert_width)
    params = Layer(
        qkv=array((width, 3 * width), jnp.bfloat16),
        out=array((width, width), jnp.bfloat16),
        router=array((width, experts), jnp.bfloat16),
        experts=array(weights, jnp.bfloat16, *RANKS),
    )
    slots = array((*ranks, topology.slots), jnp.int32)
    replay = Replay(
        plan=Plan(slots, array((experts,), jnp.int32), slots),
        load=array((*ranks, experts), jnp.int32),
        expert_ids=array((*ranks, model.tokens, model.top_k), jnp.int32, *RANKS),
    )
    return params, replay
