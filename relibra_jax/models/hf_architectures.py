"""The architectures of Hugging Face checkpoints that `LanguageModel` supports, and how to read and write their configs.

They follow the configurations and models of `transformers` 5.23.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from relibra_jax.execution.gating import Gating
from relibra_jax.models.config import ModelConfig

type Fields = Mapping[str, Any]
"""The fields of a ``config.json``."""


class Architecture(NamedTuple):
    """The fields of one ``model_type``, and functions that read and write them."""

    class_name: str
    """The class in `transformers`, the only entry of the field ``architectures``."""
    defaults: Fields
    """The defaults in `transformers` of fields that a ``config.json`` may omit."""
    required: Fields
    """The fields that must be absent or have the given value."""
    read: Callable[[Fields], dict[str, Any]]
    """A function from a ``config.json`` to the `ModelConfig` fields that are specific to the architecture."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """A function from a `ModelConfig` to the ``config.json`` fields that are specific to the architecture."""


def _first_dense(fields: Fields) -> int:
    """Return the number of leading dense layers, which Qwen3-MoE lists as ``mlp_only_layers``."""
    return len(fields["mlp_only_layers"] or [])


def _qwen3(fields: Fields) -> dict[str, Any]:
    return {
        "gating": _softmax(fields),
        "dense_layers": _first_dense(fields),
        "dense_width": fields["intermediate_size"] if _first_dense(fields) else 0,
        "expert_width": fields["moe_intermediate_size"],
        "qkv_bias": fields["attention_bias"],
        "out_bias": fields["attention_bias"],
    }


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.expert_width,
        "intermediate_size": config.dense_width or config.expert_width,
        "mlp_only_layers": list(range(config.dense_layers)),
        "decoder_sparse_step": 1,
        "attention_bias": config.qkv_bias,
        "head_dim": config.head_width,
        "norm_topk_prob": config.gating.normalise,
    }


def _glm4(fields: Fields) -> dict[str, Any]:
    gating = Gating(
        top_k=fields["num_experts_per_tok"],
        scores="sigmoid",
        normalise=fields["norm_topk_prob"],
        scale=float(fields["routed_scaling_factor"]),
        correction_bias=True,
        expert_groups=fields["n_group"],
        top_expert_groups=fields["topk_group"],
    )
    return {
        "gating": gating,
        "dense_layers": fields["first_k_dense_replace"],
        "dense_width": fields["intermediate_size"],
        "expert_width": fields["moe_intermediate_size"],
        "shared_width": fields["n_shared_experts"] * fields["moe_intermediate_size"],
        "qk_norm": "head" if fields["use_qk_norm"] else None,
        "qkv_bias": fields["attention_bias"],
    }


def _write_glm4(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_width // config.expert_width,
        "moe_intermediate_size": config.expert_width,
        "intermediate_size": config.dense_width,
        "first_k_dense_replace": config.dense_layers,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm == "head",
        "head_dim": config.head_width,
        "partial_rotary_factor": config.rotary_fraction,
        "norm_topk_prob": config.gating.normalise,
        "routed_scaling_factor": config.gating.scale,
        "n_group": config.gating.expert_groups,
        "topk_group": config.gating.top_expert_groups,
        "num_nextn_predict_layers": 0,
    }


def _olmoe(fields: Fields) -> dict[str, Any]:
    return {
        "gating": _softmax(fields),
        "expert_width": fields["intermediate_size"],
        "qk_norm": "width",
        "qkv_bias": fields["attention_bias"],
        "out_bias": fields["attention_bias"],
    }


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "intermediate_size": config.expert_width,
        "attention_bias": config.qkv_bias,
        "clip_qkv": None,
        "norm_topk_prob": config.gating.normalise,
    }


def _mixtral(fields: Fields) -> dict[str, Any]:
    return {
        "gating": _softmax({**fields, "norm_topk_prob": True}),
        "expert_width": fields["intermediate_size"],
        "qk_norm": None,
    }


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_local_experts": config.num_experts,
        "intermediate_size": config.expert_width,
        "head_dim": config.head_width,
        "sliding_window": None,
    }


def _softmax(fields: Fields) -> Gating:
    return Gating(top_k=fields["num_experts_per_tok"], scores="softmax", normalise=fields["norm_topk_prob"])


ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "qwen3_moe": Architecture(
            "Qwen3MoeForCausalLM",
            {
                "norm_topk_prob": False,
                "attention_bias": False,
                "mlp_only_layers": [],
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False,
            },
            {"decoder_sparse_step": 1, "use_sliding_window": False, "partial_rotary_factor": 1.0},
            _qwen3,
            _write_qwen3,
        ),
        "glm4_moe": Architecture(
            "Glm4MoeForCausalLM",
            {
                "norm_topk_prob": True,
                "attention_bias": False,
                "use_qk_norm": False,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "partial_rotary_factor": 0.5,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
            },
            {},
            _glm4,
            _write_glm4,
        ),
        "olmoe": Architecture(
            "OlmoeForCausalLM",
            {
                "norm_topk_prob": False,
                "attention_bias": False,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
            },
            {"clip_qkv": None, "partial_rotary_factor": 1.0},
            _olmoe,
            _write_olmoe,
        ),
        "mixtral": Architecture(
            "MixtralForCausalLM",
            {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 1_000_000.0},
            {"sliding_window": None, "router_jitter_noise": 0.0, "partial_rotary_factor": 1.0},
            _mixtral,
            _write_mixtral,
        ),
    }
)
"""The architectures that can be loaded and saved, keyed by ``model_type``."""
