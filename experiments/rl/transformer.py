"""One transformer layer of the policy: attention with a cache, then experts on `MoELayer`.

A layer is ``x += attention(norm(x)); x += experts(norm(x))``: grouped-query attention with RMSNorm on every head's
queries and keys (QK norm) and rotary positions, then experts chosen by softmax top-k. Replicas are fetched at the
layer's start, beside attention.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.tokens import VOCABULARY
from relibra_jax.execution.gating import GATINGS, Gating
from relibra_jax.execution.moe import ExpertParallel
from relibra_jax.nnx.layer import MoELayer
from relibra_jax.types import Array, Plan, Topology


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Sizes of a policy; those of a model for the CPU by default. Hashable and static under jit.

    Raises:
        ValueError: key-value heads that do not divide the heads, or an odd head width, which has no rotary pairs.
    """

    width: int = 64
    """D."""
    layers: int = 4
    """L, all of them with experts."""
    heads: int = 4
    """Of queries."""
    kv_heads: int = 2
    """Of keys and values; each serves ``heads / kv_heads`` heads."""
    head_width: int = 16
    num_experts: int = 16
    """E."""
    top_k: int = 2
    """K."""
    expert_width: int = 64
    """F."""
    vocabulary: int = VOCABULARY
    """V."""
    tied: bool = False
    """Whether the head is the embedding."""
    rope_theta: float = 10_000.0
    """Of rotary positions; a million in published models, whose contexts are long."""
    norm_epsilon: float = 1e-6
    dtype: str = "float32"
    """Of the computation. Parameters, routers and logits are float32."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_width % 2:
            raise ValueError(f"head_width={self.head_width} must be even")

    @property
    def gating(self) -> Gating:
        """Qwen3-MoE's, with this top-k."""
        return dataclasses.replace(GATINGS["qwen3-moe"], top_k=self.top_k)


class Block(nnx.Module):
    """One transformer layer; `Policy` stacks them."""

    def __init__(self, config: PolicyConfig, topology: Topology, *, rngs: nnx.Rngs):
        width, head = config.width, config.head_width
        self.config = config
        self.attention_norm = nnx.Param(jnp.ones(width))
        self.query = nnx.Param(normal(rngs, (width, config.heads, head), width**-0.5))
        self.key = nnx.Param(normal(rngs, (width, config.kv_heads, head), width**-0.5))
        self.value = nnx.Param(normal(rngs, (width, config.kv_heads, head), width**-0.5))
        self.out = nnx.Param(normal(rngs, (config.heads, head, width), (config.heads * head) ** -0.5))
        self.query_norm = nnx.Param(jnp.ones(head))
        self.key_norm = nnx.Param(jnp.ones(head))
        self.experts_norm = nnx.Param(jnp.ones(width))
        self.experts = MoELayer(topology, width, config.expert_width, config.gating, rngs=rngs)

    def __call__(
        self,
        x: Float[jax.Array, "*ranks b t D"],
        mask: Bool[Array, "*ranks b t"],
        start: Int[jax.Array, "*ranks b"],
        cache: tuple[Array, Array] | None,
        expert_ids: Integer[Array, "*ranks b t K"] | None,
        plan: Plan | None,
        load: Int[Array, "*ranks E"] | None,
        *,
        parallel: ExpertParallel,
    ) -> tuple[Array, tuple[Array, Array] | None, Array, Array]:
        """``(x, cache, expert_ids, router_logits)`` behind the layer; ``x[..., 0, :]`` stands at position ``start``."""
        experts = None
        if plan is not None:
            experts, x = self.experts.fetch(x, plan, parallel)
        attended, cache = self._attention(self._norm(x, self.attention_norm), start, cache)
        x = x + attended
        moe = self.experts(
            *(self._norm(x, self.experts_norm), expert_ids, plan, load),
            parallel=parallel,
            experts=experts,
            mask=mask,
        )
        return x + moe.output, cache, moe.expert_ids, moe.router_logits

    def _attention(self, x, start, cache):
        config = self.config
        positions = jnp.add.outer(start, jnp.arange(x.shape[-2]))

        def heads(weights):
            return jnp.einsum("...td,dhk->...thk", x, weights[...].astype(x.dtype))

        query = _rotate(self._norm(heads(self.query), self.query_norm), positions, config.rope_theta)
        keys = _rotate(self._norm(heads(self.key), self.key_norm), positions, config.rope_theta)
        values = heads(self.value)
        if cache is not None:
            keys, values = _write(cache[0], keys, start), _write(cache[1], values, start)
        grouped = query.reshape(*query.shape[:-2], config.kv_heads, -1, config.head_width)
        scores = jnp.einsum("...tgqk,...sgk->...gqts", grouped, keys, preferred_element_type=jnp.float32)
        behind = jnp.subtract.outer(positions, jnp.arange(keys.shape[-3]))[..., None, None, :, :]
        scores = jnp.where(behind >= 0, scores * config.head_width**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        attended = jnp.einsum("...gqts,...sgk->...tgqk", weights, values).reshape(query.shape)
        out = jnp.einsum("...thk,hkd->...td", attended, self.out[...].astype(x.dtype))
        return out, None if cache is None else (keys, values)

    def _norm(self, x, scale):
        return rms_norm(x, scale[...], self.config.norm_epsilon)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Parameters at birth."""
    return jax.random.normal(rngs.params(), shape) * scale


def rms_norm(x, scale, epsilon):
    """``x[..., D]`` divided by its root mean square, times ``scale[D]``; in float32, and back in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return jnp.einsum("...d,d->...d", wide, scale).astype(x.dtype)


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
    """``cache[..., C, heads, width]`` with ``new[..., t, heads, width]`` at positions ``start..start + t - 1``."""
    index = jnp.add.outer(-start, jnp.arange(cache.shape[-3]))
    source = jnp.clip(index, 0, new.shape[-3] - 1)
    here = ((index >= 0) & (index < new.shape[-3]))[..., None, None]
    return jnp.where(here, jnp.take_along_axis(new, source[..., None, None], axis=-3), cache)
