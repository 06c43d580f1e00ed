"""Grouped-query attention with rotary position embeddings, over whole sequences or a cache of keys and values.

Layers may have attention sinks and sliding windows (GPT-OSS, arXiv 2508.10925). Windows are data, so that one scan runs
layers with and without them. Attention with either is `pallas_kernels.flash_attention` at every length.
"""

import functools
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from relibra_jax.contract.types import Array
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.models.cache import LayerCache
from relibra_jax.models.config import ModelConfig
from relibra_jax.models.packed_attention import BLOCK, first_keys, packed_attention, split_attention
from relibra_jax.models.rotary import rotate

CUDNN_DTYPES: Final = ("bfloat16", "float16")
"""The dtypes that cuDNN's attention supports."""
CUDNN_HEAD: Final = 128
"""The widest head that cuDNN's attention supports on every GPU that has it; widths are multiples of 8."""


class Attention(nnx.Module):
    """The attention of one transformer layer.

    Args:
        config: the model's sizes.
        rngs: the random keys with which the parameters are initialised.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, query = config.width, (config.heads, config.head_width)
        key = (config.kv_heads, config.head_width)
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)

        def linear(inputs, outputs, fan_in, bias):
            return nnx.LinearGeneral(
                *(inputs, outputs),
                axis=tuple(range(-len(inputs), 0)),
                use_bias=bias,
                kernel_init=nnx.initializers.normal(fan_in**-0.5),
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        def norm(heads):
            return nnx.RMSNorm(
                heads * config.head_width,
                epsilon=config.norm_epsilon,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        self.query = linear((width,), query, width, config.qkv_bias)
        self.key, self.value = (linear((width,), key, width, config.qkv_bias) for _ in range(2))
        self.out = linear(query, (width,), config.heads * config.head_width, config.out_bias)
        norm_heads = {None: None, "head": (1, 1), "width": (config.heads, config.kv_heads)}[config.qk_norm]
        self.sinks = nnx.Param(jnp.zeros(config.heads, param_dtype)) if config.sinks else None
        self.query_norm = None if norm_heads is None else norm(norm_heads[0])
        self.key_norm = None if norm_heads is None else norm(norm_heads[1])

    def __call__(
        self,
        x: Float[jax.Array, "B t D"],
        positions: Int[Array, "B t"],
        segments: Int[Array, "B t"] | None,
        cache: LayerCache | None,
        window: Int[Array, ""] | None = None,
        *,
        parallel: ExpertParallel,
    ) -> tuple[Array, LayerCache | None]:
        """Apply causal attention: every token attends to itself and to the earlier tokens of its sample.

        Args:
            x: the hidden states of the tokens.
            positions: the position of each token in its sample.
            segments: the sample of each token, for sequences that hold several samples one after another. None if every
                sequence holds one sample. Not used with a cache.
            cache: this layer's part of a cache that holds the earlier tokens and has columns for the new ones. None for
                whole sequences.
            window: the number of tokens, with itself, to which a token attends at most. None for all.
            parallel: the device mesh, whose platform decides between cuDNN and XLA.

        Returns:
            The output ``[B, t, D]``, and the cache with the new tokens, or None.
        """
        query = self._rotate(_norm(self.query_norm, self.query(x)), positions)
        key = self._rotate(_norm(self.key_norm, self.key(x)), positions)
        value = self.value(x)
        if cache is None:
            attention = self._attend(query, key, value, segments, window, parallel)
        else:
            cache = cache.write(key, value)
            attention = cache.attend(query, positions, self._sinks, window)
        return self.out(attention), cache

    @property
    def _sinks(self):
        return None if self.sinks is None else self.sinks[...]

    def _attend(self, query, key, value, segments, window, parallel):
        """Attend inside whole sequences. No array has an entry for every pair of tokens of more than one block."""
        tokens, kernel = parallel.token_spec, parallel.attention_implementation
        specs = (*(tokens,) * 4, PartitionSpec(), PartitionSpec())
        on_ranks = functools.partial(jax.shard_map, mesh=parallel.mesh, in_specs=specs, out_specs=tokens)
        arrays, special = (query, key, value, segments), (self._sinks, window)
        if parallel.split_sequences:
            if segments is None:
                raise ValueError("split sequences need the sample of each token: pass PreparedBatch.packing")
            attend = functools.partial(split_attention, implementation=kernel)
            return on_ranks(attend)(*arrays, *special)
        implementation = attention_implementation(self.config, parallel)
        length = query.shape[1]
        is_special = any(each is not None for each in special)
        if is_special or (length > BLOCK and (implementation == "xla" or segments is not None)):
            # JAX has no public way to give cuDNN samples inside sequences other than a mask for all pairs of tokens.
            attend = functools.partial(packed_attention, block=BLOCK, implementation=kernel)
            return on_ranks(attend)(*arrays, *special)
        mask = None
        if segments is not None:
            mask = first_keys(segments)[:, None, :, None] <= jnp.arange(length)[None, None, None]
        return jax.nn.dot_product_attention(
            *(query, key, value), mask=mask, is_causal=True, implementation=implementation
        )

    def _rotate(self, x, positions):
        config = self.config
        return rotate(x, positions, width=config.rotary_width, theta=config.rope_theta, yarn=config.yarn)


def _norm(norm, x):
    """Normalise ``x[..., heads, head_width]`` over as many elements as the norm has scales."""
    if norm is None:
        return x
    return norm(x.reshape(*x.shape[:2], -1, norm.scale.shape[-1])).reshape(x.shape)


def attention_implementation(config: ModelConfig, parallel: Any) -> Literal["cudnn", "xla"]:
    """Choose cuDNN's attention if it supports these heads on this mesh, and XLA's otherwise.

    Args:
        config: the model's sizes and the dtype of the computation.
        parallel: the mesh, on whose devices attention runs.
    """
    fits = config.dtype in CUDNN_DTYPES and config.head_width % 8 == 0 and config.head_width <= CUDNN_HEAD
    return "cudnn" if fits and parallel.mesh.devices.flat[0].platform == "gpu" else "xla"
