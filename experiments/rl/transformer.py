"""One transformer layer of the policy: attention with a cache, then experts on `MoELayer`.

A layer is ``x += attention(norm(x)); x += experts(norm(x))``: grouped-query attention with RMSNorm on every head's
queries and keys (QK norm) and rotary positions, then experts chosen by softmax top-k. Replicas are fetched at the
layer's start, beside attention.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.tokens import VOCABULARY
from relibra_jax.execution.gating import GATINGS, Gating
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.nnx import MoELayer, MoEOutput
from relibra_jax.types import Array, LayerPlan, Topology


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Sizes of a policy, by default those of a model for CPUs. Hashable and static under jit.

    Raises:
        ValueError: if ``heads`` is no multiple of ``kv_heads``, or ``head_width`` is odd and so has no rotary pairs.
    """

    width: int = 64
    """D, the width of a token."""
    layers: int = 4
    """L, the number of layers, all of them with experts."""
    heads: int = 4
    """The number of heads of queries."""
    kv_heads: int = 2
    """The number of heads of keys and values; each serves ``heads / kv_heads`` heads of queries."""
    head_width: int = 16
    """The width of a head."""
    num_experts: int = 16
    """E, the logical experts of a layer."""
    top_k: int = 2
    """K, the experts of a token."""
    expert_width: int = 64
    """F, the hidden width of an expert."""
    vocabulary: int = VOCABULARY
    """V, the number of different tokens."""
    tied: bool = False
    """Whether the head is the embedding."""
    rope_theta: float = 10_000.0
    """The base of rotary positions; a million in published models, whose contexts are long."""
    norm_epsilon: float = 1e-6
    """What is added to mean squares before a norm divides by their root."""
    dtype: str = "float32"
    """The dtype of the computation. Parameters, statistics of norms, attention weights, routers and logits are
    float32 whatever it is."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_width % 2:
            raise ValueError(f"head_width={self.head_width} must be even")

    @property
    def cache_bytes(self) -> int:
        """The bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * jnp.dtype(self.dtype).itemsize

    @property
    def gating(self) -> Gating:
        """The gating of Qwen3-MoE, with this top-k."""
        return dataclasses.replace(GATINGS["qwen3-moe"], top_k=self.top_k)


class Block(nnx.Module):
    """One transformer layer; `experiments.rl.policy.Policy` stacks them."""

    def __init__(self, config: PolicyConfig, topology: Topology, *, rngs: nnx.Rngs):
        self.config = config
        width, query = config.width, (config.heads, config.head_width)
        key = (config.kv_heads, config.head_width)
        norm = functools.partial(
            nnx.RMSNorm, epsilon=config.norm_epsilon, dtype=jnp.dtype(config.dtype), rngs=rngs
        )

        def linear(inputs, outputs, fan_in):
            return nnx.LinearGeneral(
                *(inputs, outputs),
                axis=tuple(range(-len(inputs), 0)),
                use_bias=False,
                dtype=jnp.dtype(config.dtype),
                kernel_init=nnx.initializers.normal(fan_in**-0.5),
                rngs=rngs,
            )

        self.query = linear((width,), query, width)
        self.key, self.value = (linear((width,), key, width) for _ in range(2))
        self.out = linear(query, (width,), config.heads * config.head_width)
        self.experts = MoELayer(topology, width, config.expert_width, config.gating, rngs=rngs)
        self.attention_norm, self.experts_norm = norm(width), norm(width)
        self.query_norm, self.key_norm = norm(config.head_width), norm(config.head_width)

    def __call__(
        self,
        x: Float[jax.Array, "B t D"],
        mask: Bool[Array, "B t"],
        start: Int[Array, " B"],
        cache: tuple[Array, Array] | None,
        expert_ids: Integer[Array, "B t K"] | None,
        layer: PreparedLayer | LayerPlan | None,
        *,
        parallel: ExpertParallel,
    ) -> tuple[Array, tuple[Array, Array] | None, MoEOutput]:
        """``(x, cache, experts' output)`` behind the layer; ``x[:, 0]`` stands at position ``start``."""
        held = None
        if layer is not None:
            held, x = self.experts.fetch(x, layer, parallel)
        attended, cache = self._attention(self.attention_norm(x), start, cache)
        x = x + attended
        moe = self.experts(
            *(self.experts_norm(x), expert_ids, layer), parallel=parallel, experts=held, mask=mask
        )
        return x + moe.output, cache, moe

    def _attention(self, x, start, cache):
        positions = start[:, None] + jnp.arange(x.shape[1])[None]
        query = _rotate(self.query_norm(self.query(x)), positions, self.config.rope_theta)
        key = _rotate(self.key_norm(self.key(x)), positions, self.config.rope_theta)
        value = self.value(x)
        if cache is not None:
            key, value = cache = _write(cache[0], key, start), _write(cache[1], value, start)
        causal = positions[:, None, :, None] >= jnp.arange(key.shape[1])[None, None, None]
        return self.out(jax.nn.dot_product_attention(query, key, value, mask=causal)), cache


def _rotate(x, positions, theta):
    """Rotary positions: number i of the first half of a head and number i of the second are turned together."""
    half = x.shape[-1] // 2
    rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.multiply.outer(positions.astype(jnp.float32), rates)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _write(cache, new, start):
    """``cache[B, C, heads, width]`` with ``new[B, t, heads, width]`` at positions ``start..start + t - 1``."""
    index = jnp.arange(cache.shape[1])[None] - start[:, None]
    source = jnp.clip(index, 0, new.shape[1] - 1)[..., None, None]
    here = ((index >= 0) & (index < new.shape[1]))[..., None, None]
    return jnp.where(here, jnp.take_along_axis(new, source, axis=1), cache)
