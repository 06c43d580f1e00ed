"""The sizes and architecture options of a mixture-of-experts language model."""

import contextlib
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from relibra_jax.execution.expert_mlp import expert_columns
from relibra_jax.execution.gating import Gating
from relibra_jax.execution.memory import MEMORY_KINDS
from relibra_jax.models.rotary import Yarn
from relibra_jax.support.argument_types import checks_arguments

QK_NORMS: Final = (None, "head", "width")
"""The axes over which RMSNorm normalises queries and keys: None for no norm, ``head`` for each head by itself (Qwen3,
GLM-4.5), or ``width`` for all heads of a token together (OLMoE)."""

FLOATS: Final = ("float32", "bfloat16", "float16")
"""The names of the dtypes that computation, parameters and checkpoints may have."""


@checks_arguments
@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a `relibra_jax.models.LanguageModel`. Hashable and static under jit.

    Raises:
        ValueError: if ``heads`` is not a multiple of ``kv_heads``, the rotary part of a head is odd or empty,
            ``qk_norm`` is not in `QK_NORMS`, a dtype is not in `FLOATS`, all layers are dense, or ``windows`` does not
            have one number that is not negative for each layer.

    >>> gating = Gating(top_k=2, scores="softmax")
    >>> config = ModelConfig(width=64, layers=4, heads=4, kv_heads=2, head_width=16, num_experts=16, gating=gating,
    ...     expert_width=64, vocabulary=259)
    >>> config.moe_layers, config.rotary_width
    (4, 16)
    """

    width: int
    """The model width D, in elements of a token's hidden state."""
    layers: int
    """The number of transformer layers, including dense ones."""
    heads: int
    """The number of query heads."""
    kv_heads: int
    """The number of key and value heads; each serves ``heads / kv_heads`` query heads."""
    head_width: int
    """The width of one attention head."""
    num_experts: int
    """The number of logical experts E of a layer."""
    gating: Gating
    """The rule by which tokens choose experts; its top-k is K."""
    expert_width: int
    """The hidden width F of an expert."""
    vocabulary: int
    """The vocabulary size V."""
    activation: str = "swiglu"
    """The function of an expert's gate and up, a key of `relibra_jax.execution.expert_mlp.ACTIVATIONS`."""
    expert_biases: bool = False
    """Whether the matrices of experts have biases."""
    shared_width: int = 0
    """The total hidden width of the shared experts; 0 for none."""
    dense_layers: int = 0
    """The number of leading layers that have a dense MLP instead of experts."""
    dense_width: int = 0
    """The hidden width of the MLP of dense layers."""
    qk_norm: str | None = "head"
    """The axes over which queries and keys are normalised, one of `QK_NORMS`."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    out_bias: bool = False
    """Whether attention's output projection has a bias."""
    sinks: bool = False
    """Whether each query head has an attention sink: a learned score that takes its share of the weights."""
    windows: tuple[int, ...] = ()
    """For each layer, the number of tokens, with itself, to which a token attends at most; 0 for all. Empty if all
    layers attend to all tokens."""
    rotary_fraction: float = 1.0
    """The fraction of a head, from its start, to which rotary position embeddings apply."""
    rope_theta: float = 10_000.0
    """The base of the rotary position embeddings; a million in published models, whose contexts are long."""
    yarn: Yarn | None = None
    """The settings with which YaRN stretches the rotary position embeddings. None does not."""
    tied: bool = False
    """Whether the output head shares its weights with the embedding."""
    norm_epsilon: float = 1e-6
    """The number added to the mean square before RMSNorm takes its root."""
    dtype: DTypeLike = "float32"
    """The dtype of the computation. Statistics of norms, attention weights, router logits and the model's logits are
    always float32."""
    param_dtype: DTypeLike = "float32"
    """The dtype of the parameters, except for correction biases, which are always float32."""
    activation_memory: str = "device"
    """The memory in which the inputs of layers wait for the backward pass: ``device`` or ``pinned_host``."""
    architecture: str = "qwen3_moe"
    """The architecture whose tensor names the model's checkpoints use, a key of
    `relibra_jax.models.hf_architectures.ARCHITECTURES`."""

    def __post_init__(self) -> None:
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, float_name(name, getattr(self, name)))
        if self.activation_memory not in MEMORY_KINDS:
            raise ValueError(
                f"activation_memory={self.activation_memory!r} must be one of {', '.join(MEMORY_KINDS)}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_width:
            part = "" if self.rotary_fraction == 1 else f" x rotary_fraction={self.rotary_fraction}"
            raise ValueError(f"head_width={self.head_width}{part} must be even and at least 2")
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm={self.qk_norm!r} must be one of {QK_NORMS}")
        if self.windows and (len(self.windows) != self.layers or min(self.windows) < 0):
            raise ValueError(
                f"windows={self.windows} must have one number for each of {self.layers} layers, 0 or more"
            )
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} must be in 0..{self.layers - 1}: layers={self.layers}"
            )

    @property
    def moe_layers(self) -> int:
        """The number of layers with experts L: all layers after the dense ones."""
        return self.layers - self.dense_layers

    @property
    def top_k(self) -> int:
        """The number of experts K of a token."""
        return self.gating.top_k

    @property
    def expert_size(self) -> int:
        """The number of elements of an expert's array: its parameters, and zeros beside biases if F is not D."""
        columns = expert_columns(self.width, self.expert_width, biases=self.expert_biases)
        return 3 * self.width * columns

    @property
    def has_plain_experts(self) -> bool:
        """Whether experts are SwiGLU without biases, which `pallas_kernels.grouped_mlp` computes."""
        return self.activation == "swiglu" and not self.expert_biases

    @property
    def rotary_width(self) -> int:
        """The number of elements of a head to which rotary position embeddings apply."""
        return int(self.head_width * self.rotary_fraction)

    @property
    def cache_bytes(self) -> int:
        """The bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * jnp.dtype(self.dtype).itemsize


def float_name(argument: str, dtype: DTypeLike) -> str:
    """Return the name of a dtype.

    Args:
        argument: the name of the argument that holds the dtype, for the error message.
        dtype: the dtype.

    Raises:
        ValueError: if the dtype is not in `FLOATS`.

    >>> float_name("dtype", jnp.bfloat16)
    'bfloat16'
    """
    with contextlib.suppress(TypeError):
        name = jnp.dtype(dtype).name
        if name in FLOATS:
            return name
    raise ValueError(f"{argument}={dtype!r} must be one of {', '.join(FLOATS)}")
