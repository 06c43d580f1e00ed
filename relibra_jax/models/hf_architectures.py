"""The architectures of Hugging Face checkpoints that `LanguageModel` supports, and how to read and write their configs.

They follow the configurations and models of `transformers` 5.23, GPT-OSS those of 5.24 (``models/gpt_oss``) and of
https://github.com/openai/gpt-oss (``gpt_oss/torch/model.py``).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from relibra_jax.execution.expert_mlp import CLAMP_ALPHA, CLAMP_LIMIT
from relibra_jax.execution.gating import Gating
from relibra_jax.models.config import ModelConfig
from relibra_jax.models.rotary import Yarn

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
    yarn: bool = False
    """Whether rotary positions may be stretched by YaRN."""
    quantization: str | None = None
    """The ``quant_method`` that the experts of a checkpoint may have, beside none."""


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


SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
PUBLISHED_YARN: Final[Fields] = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)
"""The rotary positions of a GPT-OSS model whose ``config.json`` does not say."""


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    layers = fields["num_hidden_layers"]
    kinds = fields.get("layer_types") or [(SLIDING, FULL)[layer % 2] for layer in range(layers)]
    known = isinstance(kinds, list) and all(kind in (SLIDING, FULL) for kind in kinds)
    if not known or len(kinds) != layers:
        raise ValueError(f"layer_types={kinds!r} must name {SLIDING} or {FULL} for each of {layers} layers")
    return {
        "gating": Gating(top_k=fields["num_experts_per_tok"], scores="softmax", router_bias=True),
        "expert_width": fields["intermediate_size"],
        "activation": "clamped_swiglu",
        "expert_biases": True,
        "qk_norm": None,
        "qkv_bias": fields["attention_bias"],
        "out_bias": fields["attention_bias"],
        "sinks": True,
        "windows": tuple(fields["sliding_window"] if kind == SLIDING else 0 for kind in kinds)
        if SLIDING in kinds
        else (),
        "yarn": _yarn(fields.get("rope_parameters") or fields.get("rope_scaling") or PUBLISHED_YARN),
    }


def _yarn(rope: Fields) -> Yarn | None:
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return None
    return Yarn(
        factor=float(rope["factor"]),
        first_context=rope["original_max_position_embeddings"],
        fast_turns=float(rope.get("beta_fast") or 32),
        slow_turns=float(rope.get("beta_slow") or 1),
        whole=rope.get("truncate", True),
    )


def _write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    yarn = config.yarn
    rope = (
        {"rope_type": "default"}
        if yarn is None
        else {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "beta_fast": yarn.fast_turns,
            "beta_slow": yarn.slow_turns,
            "truncate": yarn.whole,
            "original_max_position_embeddings": yarn.first_context,
        }
    )
    windows = config.windows or (0,) * config.layers
    return {
        "num_local_experts": config.num_experts,
        "intermediate_size": config.expert_width,
        "attention_bias": config.qkv_bias,
        "head_dim": config.head_width,
        "rope_scaling": rope,
        "sliding_window": max(windows) or 128,
        "layer_types": [SLIDING if window else FULL for window in windows],
        "swiglu_limit": CLAMP_LIMIT,
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
        "gpt_oss": Architecture(
            "GptOssForCausalLM",
            {
                "attention_bias": True,
                "head_dim": 64,
                "sliding_window": 128,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
                "rope_theta": 150_000.0,
            },
            {"swiglu_limit": CLAMP_LIMIT, "swiglu_alpha": CLAMP_ALPHA, "partial_rotary_factor": 1.0},
            _gpt_oss,
            _write_gpt_oss,
            yarn=True,
            quantization="mxfp4",
        ),
    }
)
"""The architectures that can be loaded and saved, keyed by ``model_type``."""
