"""A stack of transformer layers, attention and mixture of experts, and its training step without an optimizer.

As small as a stack can be and still show what compilers do to one: pre-norm causal attention over the samples of
each rank, a softmax router whose gates are recomputed at replayed ids, checkpointed layers, residuals in bfloat16.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from relibra_jax.execution import OVERLAP_OPTIONS, ExpertParallel, fetch_replicas, moe_layer
from relibra_jax.execution.mesh import RANKS
from relibra_jax.types import LayerPlan

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


def layer(
    x: jax.Array,
    params: Layer,
    plan: LayerPlan,
    expert_ids: jax.Array,
    model: Model,
    parallel: ExpertParallel,
) -> jax.Array:
    """One layer: ``x`` is ``[samples, positions, D]``, those of all ranks."""
    experts, x = fetch_replicas(params.experts, plan, x, parallel)
    with jax.named_scope("attention"):
        x = x + _attention(_normalise(x), params, model)
    hidden = _normalise(x)
    scores = jnp.einsum("btd,de->bte", hidden, params.router, preferred_element_type=jnp.float32)
    gates = jnp.take_along_axis(jax.nn.softmax(scores), expert_ids, axis=-1)
    return x + moe_layer(hidden, expert_ids, gates, experts, plan, parallel)


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


def compile_step(
    model: Model, parallel: ExpertParallel, *, layers: int, scanned: bool
) -> jax.stages.Compiled:
    """Forward and backward of a stack, with the options that overlap needs.

    Args:
        model: the sizes of the model.
        parallel: how plans are run; the mesh says for which devices is compiled.
        layers: the number of layers.
        scanned: whether one loop runs over stacked parameters; otherwise one layer follows the other, each with
            parameters of its own.

    Returns:
        The compiled gradients of parameters and input, all in bfloat16.
    """

    def apply(x, slices):
        params, plan, expert_ids = slices
        return layer(x, params, plan, expert_ids, model, parallel)

    # Only an unrolled stack could have its second computation merged with the first.
    policy = jax.checkpoint_policies.nothing_saveable
    apply = jax.checkpoint(apply, policy=policy, prevent_cse=not scanned)

    def loss(params, x, plans, expert_ids):
        if scanned:
            x, _ = jax.lax.scan(lambda x, slices: (apply(x, slices), None), x, (params, plans, expert_ids))
        else:
            for slices in zip(params, plans, expert_ids, strict=True):
                x = apply(x, slices)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = _layer_shapes(model, parallel, stacked=layers if scanned else None)
    arguments = shapes if scanned else tuple((one,) * layers for one in shapes)
    shape = (parallel.num_ranks * model.samples, model.positions, model.width)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=parallel.token_sharding)
    options = {**OVERLAP_OPTIONS, **QUICKLY}
    step = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=options)
    return step.lower(arguments[0], x, *arguments[1:]).compile()


def _layer_shapes(
    model: Model, parallel: ExpertParallel, stacked: int | None
) -> tuple[Layer, LayerPlan, jax.ShapeDtypeStruct]:
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
    plan = LayerPlan(slots, array((experts,), jnp.int32), slots, array((*ranks, experts), jnp.int32))
    ids = (parallel.num_ranks * model.samples, model.positions, model.top_k)
    return params, plan, array(ids, jnp.int32, RANKS)
