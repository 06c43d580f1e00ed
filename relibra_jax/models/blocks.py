"""One transformer layer: attention, then experts on `relibra_jax.nnx.MoELayer`, or a dense MLP.

A layer computes ``x += attention(norm(x)); x += mlp(norm(x))``. It fetches its replicas at the start, while attention
runs.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int, Integer

from relibra_jax.contract.types import Array, LayerPlan, Topology
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.models.attention import Attention
from relibra_jax.models.cache import LayerCache
from relibra_jax.models.config import ModelConfig
from relibra_jax.nnx import MoELayer, MoEOutput


class Block(nnx.Module):
    """A transformer layer with experts; `relibra_jax.models.LanguageModel` stacks them."""

    def __init__(
        self, config: ModelConfig, topology: Topology, *, fsdp_axis: str | None = None, rngs: nnx.Rngs
    ):
        self.attention = Attention(config, rngs=rngs)
        self.experts = MoELayer(
            *(topology, config.width, config.expert_width, config.gating),
            shared_width=config.shared_width,
            activation=config.activation,
            expert_biases=config.expert_biases,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            fsdp_axis=fsdp_axis,
            rngs=rngs,
        )
        self.attention_norm, self.experts_norm = (_norm(config, rngs) for _ in range(2))

    def __call__(
        self,
        x: Float[jax.Array, "B t D"],
        mask: Bool[Array, "B t"],
        positions: Int[Array, "B t"],
        segments: Int[Array, "B t"] | None,
        cache: LayerCache | None,
        expert_ids: Integer[Array, "B t K"] | None,
        layer: PreparedLayer | LayerPlan | None,
        window: Int[Array, ""] | None,
        *,
        parallel: ExpertParallel,
    ) -> tuple[Array, LayerCache | None, MoEOutput]:
        """Run the layer; returns ``(x, cache, output of the experts)``."""
        weights = None
        if layer is not None:
            weights, x = self.experts.fetch(x, layer, parallel)
        attention, cache = self.attention(
            *(self.attention_norm(x), positions, segments, cache, window), parallel=parallel
        )
        x = x + attention
        moe_output = self.experts(
            *(self.experts_norm(x), expert_ids, layer), parallel=parallel, experts=weights, mask=mask
        )
        return x + moe_output.output, cache, moe_output


class DenseBlock(nnx.Module):
    """A transformer layer without experts."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs=rngs)
        linear = functools.partial(
            nnx.Linear,
            use_bias=False,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )
        self.gate, self.up = (linear(config.width, config.dense_width) for _ in range(2))
        self.down = linear(config.dense_width, config.width)
        self.attention_norm, self.mlp_norm = (_norm(config, rngs) for _ in range(2))

    def __call__(
        self,
        x: Float[jax.Array, "B t D"],
        positions: Int[Array, "B t"],
        segments: Int[Array, "B t"] | None,
        cache: LayerCache | None,
        window: Int[Array, ""] | None,
        *,
        parallel: ExpertParallel,
    ) -> tuple[Array, LayerCache | None]:
        """Run the layer; returns ``(x, cache)``."""
        attention, cache = self.attention(
            *(self.attention_norm(x), positions, segments, cache, window), parallel=parallel
        )
        x = x + attention
        inner = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(inner)) * self.up(inner)), cache


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_epsilon,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )
