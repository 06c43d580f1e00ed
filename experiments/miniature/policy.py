"""The trained model of the miniature: blocks of attention and experts, in the way of the Flax guide.

XLA sums the gradients of every dense array over all ranks. On GPUs it combines such sums; on CPUs each array has one of
its own, which takes a small cluster longer than its bytes do. A block therefore has few dense arrays: one of attention,
and the router.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import Mesh

from experiments.miniature.attention import attend
from relibra_jax.contract.types import Topology
from relibra_jax.execution.mesh import RANKS
from relibra_jax.nnx import GATINGS, ExpertParallel, MoELayer
from relibra_jax.nnx.batch_sequences import SequencePacking

FLOAT: Final = 4
"""The bytes of a number: parameters and activations are float32."""
VOCABULARY: Final = 64
"""The number of different tokens. The output head is a small part of the work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the model."""

    layers: int
    """L, the number of layers."""
    width: int
    """D, the width of tokens."""
    expert_width: int
    """F, the width of an expert."""
    head_width: int
    """The width of a head of attention, which divides D."""
    top_k: int
    """K, the number of experts of a token."""


type MakeExperts = Callable[[nnx.Rngs], nnx.Module]
"""Makes the expert layer of a block: a `MoELayer`, or a layer that is called with tokens, their experts and a mask."""


def own_experts(sizes: Sizes, topology: Topology) -> MakeExperts:
    """Return the function that makes a `MoELayer`."""
    gating = dataclasses.replace(GATINGS["gpt-oss"], top_k=sizes.top_k, router_bias=False)
    return lambda rngs: MoELayer(topology, sizes.width, sizes.expert_width, gating, rngs=rngs)


class Attention(nnx.Module):
    """Causal attention inside samples, with its norm and projections."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.head_width = sizes.head_width
        self.norm = nnx.RMSNorm(sizes.width, use_scale=False, rngs=rngs)
        width = sizes.width
        # Of queries, keys and values, and of the output.
        self.weights = nnx.Param(jax.random.normal(rngs.params(), (width, 4 * width)) * width**-0.5)

    def __call__(self, x, packing: SequencePacking, mesh: Mesh):
        """Apply attention to ``x[sequences, T, D]``, on each rank to its own sequences."""
        inward, outward = jnp.split(self.weights[...], [3 * x.shape[-1]], axis=1)
        heads = (self.norm(x) @ inward).reshape(*x.shape[:2], 3, -1, self.head_width)

        def on_rank(heads, segments, positions):
            query, key, value = jnp.moveaxis(heads.reshape(-1, *heads.shape[2:]), 1, 0)
            query, key = (
                part * jax.lax.rsqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (query, key)
            )
            # One sequence after another.
            first = jnp.arange(segments.size) - positions.ravel()
            out = attend(query, key, value, segments.ravel(), first)
            return out.reshape(*heads.shape[:2], *heads.shape[3:])

        spec = jax.P(RANKS)
        run = jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return run(heads, *packing).reshape(x.shape) @ outward


class Block(nnx.Module):
    """Attention, then experts."""

    def __init__(self, sizes: Sizes, make_experts: MakeExperts, rngs: nnx.Rngs):
        self.attention = Attention(sizes, rngs)
        self.norm = nnx.RMSNorm(sizes.width, use_scale=False, rngs=rngs)
        self.experts = make_experts(rngs)

    def __call__(self, x, expert_ids, packing: SequencePacking, layer, parallel: ExpertParallel):
        """Apply the block to ``x[sequences, T, D]``."""
        mask = packing.segments >= 0
        if not isinstance(self.experts, MoELayer):
            x = x + self.attention(x, packing, parallel.mesh)
            return x + self.experts(self.norm(x), expert_ids, mask)
        experts, x = self.experts.fetch(x, layer, parallel)
        x = x + self.attention(x, packing, parallel.mesh)
        moe = self.experts(self.norm(x), expert_ids, layer, parallel=parallel, experts=experts, mask=mask)
        return x + moe.output


class Policy(nnx.Module):
    """Embedding, blocks and output head. The blocks are stacked, so that they compile once."""

    def __init__(self, sizes: Sizes, make_experts: MakeExperts, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, sizes.width, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(sizes, make_experts, rngs))(rngs.split(sizes.layers))
        self.head = nnx.Linear(sizes.width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, expert_ids, packing, layers, parallel):
        """Compute the logits of ``tokens[sequences, T]``."""

        @nnx.scan(in_axes=(nnx.Carry, 0, 0, 0), out_axes=nnx.Carry)
        def run_blocks(x, block, expert_ids, layer):
            return block(x, expert_ids, packing, layer, parallel)

        x = run_blocks(self.embedding(tokens), self.blocks, jnp.moveaxis(expert_ids, -2, 0), layers)
        return self.head(x)


def make_policy(sizes: Sizes, topology: Topology) -> tuple[Policy, nnx.Optimizer]:
    """Make the model and its optimizer, equal for every topology with as many experts."""

    @nnx.jit
    def make():
        policy = Policy(sizes, own_experts(sizes, topology), nnx.Rngs(0))
        return policy, make_optimizer(policy)

    return make()


def make_optimizer(policy: Policy) -> nnx.Optimizer:
    """Make the optimizer of a model."""
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return nnx.Optimizer(policy, rule, wrt=nnx.Param)
