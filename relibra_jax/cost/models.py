"""Named models for `relibra_jax.cost`: the sizes that determine time and memory, with their source."""

import dataclasses

import jax

from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a mixture-of-experts transformer that determine its time and memory."""

    moe_layers: int
    """L, the number of MoE layers."""
    num_experts: int
    """E, the number of logical experts of a layer."""
    top_k: int
    """K, the number of experts of a token."""
    width: int
    """D, the model width."""
    expert_width: int
    """F, the width of one expert."""
    shared_width: int
    """The width of all shared experts together; 0 for none."""
    attention_params: int
    """The number of weights of one attention block."""
    attention_width: int
    """Heads x (query-key dimension + value dimension)."""
    cache_width: int
    """The numbers that the key-value cache holds per token and layer."""
    cache_heads: int
    """The number of parts into which tensor parallelism can divide the cache; with more devices, parts are duplicated.
    """
    heads: int | None = None
    """The number of query heads, which tensor parallelism divides; None if unknown."""
    vocabulary: int = 0
    """The number of tokens of the vocabulary, for the output head. 0 leaves the head out."""

    @property
    def expert_params(self) -> int:
        """The number of weights of one expert: gate, up and down."""
        return 3 * self.width * self.expert_width

    @property
    def dense_params(self) -> int:
        """The number of weights of one layer outside the routed experts: attention and shared experts."""
        return self.attention_params + 3 * self.width * self.shared_width


def _grouped_query(width: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return the sizes of grouped-query attention with ``kv_heads`` heads of keys and values."""
    params = width * head_dim * (2 * heads + 2 * kv_heads)
    return {
        "width": width,
        "attention_params": params,
        "attention_width": 2 * heads * head_dim,
        "cache_width": 2 * kv_heads * head_dim,
        "cache_heads": kv_heads,
        "heads": heads,
    }


# Sizes from the models' published configurations (config.json of each repository on Hugging Face).
MODELS = {
    "qwen3-30b-a3b": Model(
        moe_layers=48,
        num_experts=128,
        top_k=8,
        expert_width=768,
        shared_width=0,
        vocabulary=151936,
        **_grouped_query(2048, 32, 4, 128),
    ),
    "qwen3-235b-a22b": Model(
        moe_layers=94,
        num_experts=128,
        top_k=8,
        expert_width=1536,
        shared_width=0,
        vocabulary=151936,
        **_grouped_query(4096, 64, 4, 128),
    ),
    "glm-4.5-106b-a12b": Model(
        moe_layers=45,
        num_experts=128,
        top_k=8,
        expert_width=1408,
        shared_width=1408,
        vocabulary=151552,
        **_grouped_query(4096, 96, 8, 128),
    ),
    # Multi-head latent attention: query rank 1536, key-value rank 512, 128 heads of 128 + 64 (rotary) and 128. The
    # cache holds the latent vector and the rotary key, which all heads share.
    "deepseek-v3": Model(
        moe_layers=58,
        num_experts=256,
        top_k=8,
        width=7168,
        expert_width=2048,
        shared_width=2048,
        attention_params=7168 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168,
        attention_width=128 * (192 + 128),
        cache_width=512 + 64,
        cache_heads=1,
        heads=128,
        vocabulary=129280,
    ),
    "gpt-oss-20b": Model(
        moe_layers=24,
        num_experts=32,
        top_k=4,
        expert_width=2880,
        shared_width=0,
        vocabulary=201088,
        **_grouped_query(2880, 64, 8, 64),
    ),
    "gpt-oss-120b": Model(
        moe_layers=36,
        num_experts=128,
        top_k=4,
        expert_width=2880,
        shared_width=0,
        vocabulary=201088,
        **_grouped_query(2880, 64, 8, 64),
    ),
}
"""The named models."""
