"""Published models: the fields of their ``config.json`` that determine sizes, for settings without a checkpoint."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

QWEN3: Final = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rope_theta": 1e6,
}
GLM: Final = {
    "model_type": "glm4_moe",
    "head_dim": 128,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "attention_bias": True,
    "vocab_size": 151552,
    "rope_theta": 1e6,
}
GPT_OSS: Final = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
}
PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "OLMoE-1B-7B": {
            "model_type": "olmoe",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 50304,
        },
        "GPT-OSS-20B": {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
        "Qwen3-30B-A3B": {
            **QWEN3,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "moe_intermediate_size": 768,
        },
        "Mixtral-8x7B": {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
        "GLM-4.5-Air": {
            **GLM,
            "hidden_size": 4096,
            "num_hidden_layers": 46,
            "moe_intermediate_size": 1408,
            "intermediate_size": 10944,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
        },
        "GPT-OSS-120B": {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
        "Qwen3-235B-A22B": {
            **QWEN3,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "moe_intermediate_size": 1536,
        },
        "GLM-4.5": {
            **GLM,
            "hidden_size": 5120,
            "num_hidden_layers": 92,
            "moe_intermediate_size": 1536,
            "intermediate_size": 12288,
            "first_k_dense_replace": 3,
            "n_routed_experts": 160,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
        },
    }
)
"""Published models by name, with the fields of their ``config.json`` on Hugging Face that determine sizes."""
