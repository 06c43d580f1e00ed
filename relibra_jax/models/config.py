"""The sizes of a mixture-of-experts language model, and in what published architectures differ."""

import contextlib
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from relibra_jax.execution.gating import Gating

QK_NORMS: Final = (None, "head", "width")
"""What RMSNorm of queries and keys is over: nothing, each head by itself (Qwen3, GLM-4.5), or all heads of a token
together (OLMoE)."""


FLOATS: Final = ("float32", "bfloat16", "float16")
"""The dtypes of computation, parameters and checkpoints."""


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a `relibra_jax.models.LanguageModel`. Hashable and static under jit.

    Raises:
        ValueError: if ``heads`` is no multiple of ``kv_heads``, the rotary part of a head is odd or empty, ``qk_norm``
            is none of `QK_NORMS`, a dtype none of `FLOATS`, or all layers are
            dense.

    >>> gating = Gating(top_k=2, scores="softmax")
    >>> config = ModelConfig(width=64, layers=4, heads=4, kv_heads=2, head_width=16, num_experts=16, gating=gating,
    ...     expert_width=64, vocabulary=259)
    >>> config.moe_layers, config.rotary_width
    (4, 16)
    """

    width: int
    """D, the width of a token."""
    layers: int
    """The number of layers, dense ones included."""
    heads: int
    """The number of heads of queries."""
    kv_heads: int
    """The number of heads of keys and values; each serves ``heads / kv_heads`` heads of queries."""
    head_width: int
    """The width of a head."""
    num_experts: int
    """E, the logical experts of a layer."""
    gating: Gating
    """How tokens choose experts; its top-k is K."""
    expert_width: int
    """F, the hidden width of an expert."""
    vocabulary: int
    """V, the number of different tokens."""
    shared_width: int = 0
    """The hidden width of the shared expert, of all shared experts together; 0 for none."""
    dense_layers: int = 0
    """How many layers, the first ones, have a dense MLP in place of experts."""
    dense_width: int = 0
    """The hidden width of dense layers."""
    qk_norm: str | None = "head"
    """What queries and keys are normalised over, one of `QK_NORMS`."""
    qkv_bias: bool = False
    """Whether projections to queries, keys and values have biases."""
    out_bias: bool = False
    """Whether the projection of attention's output has a bias."""
    rotary_fraction: float = 1.0
    """The share of a head, its first part, that rotary positions turn."""
    rope_theta: float = 10_000.0
    """The base of rotary positions; a million in published models, whose contexts are long."""
    tied: bool = False
    """Whether the head is the embedding."""
    norm_epsilon: float = 1e-6
    """What is added to mean squares before a norm divides by their root."""
    dtype: str = "float32"
    """The dtype of the computation. Statistics of norms, attention weights, routers' and the model's logits are
    float32 whatever it is."""
    param_dtype: str = "float32"
    """The dtype of the parameters, save for correction biases, which are float32."""
    architecture: str = "qwen3_moe"
    """The architecture whose names the model's checkpoints have, a key of
    `relibra_jax.models.hf_architectures.ARCHITECTURES`."""

    def __post_init__(self) -> None:
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, float_name(name, getattr(self, name)))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_width:
            part = "" if self.rotary_fraction == 1 else f" x rotary_fraction={self.rotary_fraction}"
            raise ValueError(f"head_width={self.head_width}{part} must be even and at least 2")
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm={self.qk_norm!r} must be one of {QK_NORMS}")
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} must be in 0..{self.layers - 1}: layers={self.layers}"
            )

    @property
    def moe_layers(self) -> int:
        """L, the number of layers with experts: all behind the dense ones."""
        return self.layers - self.dense_layers

    @property
    def top_k(self) -> int:
        """K, the experts of a token."""
        return self.gating.top_k

    @property
    def rotary_width(self) -> int:
        """The part of a head that rotary positions turn."""
        return int(self.head_width * self.rotary_fraction)

    @property
    def cache_bytes(self) -> int:
        """The bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * jnp.dtype(self.dtype).itemsize


def float_name(what: str, dtype: DTypeLike) -> str:
    """The name of a dtype.

    Raises:
        ValueError: if it is none of `FLOATS`.

    >>> float_name("dtype", jnp.bfloat16)
    'bfloat16'
    """
    with contextlib.suppress(TypeError):
        name = jnp.dtype(dtype).name
        if name in FLOATS:
            return name
    raise ValueError(f"{what}={dtype!r} must be one of {', '.join(FLOATS)}")
