"""Conversion between a Hugging Face ``config.json`` and the `ModelConfig` that it describes.

The fields follow `transformers` 5.23. Its spelling (``num_local_experts``, ``rope_parameters``, ``dtype``) and the
older one of most checkpoints (``num_experts``, ``rope_theta``, ``torch_dtype``) are both accepted. If a config asks for
features that `LanguageModel` does not have, one error names all their fields and values.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jaxtyping import DTypeLike

from relibra_jax.models.config import ModelConfig, float_name
from relibra_jax.models.hf_architectures import ARCHITECTURES, Architecture, Fields
from relibra_jax.support.json_text import parse_json

COMMON_REQUIRED: Final[Fields] = MappingProxyType({"hidden_act": "silu", "attention_dropout": 0.0})
"""The values that these fields must have, if present, in every architecture."""

ROPE_FIELDS: Final = ("rope_parameters", "rope_scaling")
PLAIN_ROPE: Final = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
"""The keys that `ROPE_FIELDS` may contain; any other key means rotary scaling, of which YaRN alone is supported."""
YARN_ROPE: Final = {"factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"}
"""The further keys for YaRN."""


def _is_int(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


TYPES: Final[Mapping[str, tuple[tuple[str, ...], Callable[[Any], bool]]]] = MappingProxyType(
    {
        "an integer above 0": (
            (
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "num_experts",
                "num_local_experts",
                "n_routed_experts",
                "num_experts_per_tok",
                "vocab_size",
                "moe_intermediate_size",
                "intermediate_size",
                "n_group",
                "topk_group",
                "sliding_window",
                "original_max_position_embeddings",
            ),
            _is_int(1),
        ),
        "an integer": (("first_k_dense_replace", "n_shared_experts"), _is_int(0)),
        "a number above 0": (
            (
                "rope_theta",
                "rms_norm_eps",
                "routed_scaling_factor",
                "partial_rotary_factor",
                "factor",
                "beta_fast",
                "beta_slow",
            ),
            lambda value: type(value) in (int, float) and 0 < value < math.inf,
        ),
        "true or false": (
            ("norm_topk_prob", "attention_bias", "tie_word_embeddings", "use_qk_norm", "truncate"),
            lambda value: type(value) is bool,
        ),
    }
)
"""For each required type, the fields that must have it and the function that checks a value."""

EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names under which configs store the number of experts E."""


def read_config(folder: str | Path) -> Fields:
    """Read the fields of a checkpoint's ``config.json``.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        ValueError: if the file does not exist, or does not contain a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        fields = parse_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{path}: there is no such file; a checkpoint has one beside its tensors") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    return fields


def saved_dtype(folder: str | Path) -> str | None:
    """Read the dtype of a checkpoint's tensors from its ``config.json``. None if it does not say.

    For a quantized checkpoint, whose tensors are saved without quantization, it is bfloat16.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        ValueError: if `read_config` rejects the file.
    """
    fields = read_config(folder)
    if fields.get("quantization_config"):
        return "bfloat16"
    return fields.get("dtype") or fields.get("torch_dtype")


def load_config(
    folder: str | Path, *, dtype: DTypeLike = "float32", param_dtype: DTypeLike = "float32"
) -> ModelConfig:
    """Read a model's sizes and options from a checkpoint's ``config.json``.

    Args:
        folder: the folder of the checkpoint.
        dtype: the dtype of the computation.
        param_dtype: the dtype of the parameters.

    Raises:
        ValueError: if `read_config` or `model_config` rejects the file.
    """
    fields = read_config(folder)
    try:
        return model_config(fields, dtype=dtype, param_dtype=param_dtype)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from error


def model_config(
    fields: Fields, *, dtype: DTypeLike = "float32", param_dtype: DTypeLike = "float32"
) -> ModelConfig:
    """Convert the fields of a ``config.json`` to a model's sizes and options.

    Args:
        fields: the fields, as `read_config` returns them.
        dtype: the dtype of the computation.
        param_dtype: the dtype of the parameters.

    Raises:
        ValueError: if the architecture is not supported, a field is missing, or a field has an unsupported value. The
            message lists all unsupported fields with their values and the values that are supported.

    >>> model_config({"model_type": "llama"})
    Traceback (most recent call last):
    ValueError: model_type='llama' must be one of qwen3_moe, glm4_moe, olmoe, mixtral, gpt_oss
    """
    name = fields.get("model_type", "")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"model_type={name!r} must be one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    all_fields = {**architecture.defaults, **_without_none(fields), **_rope(fields)}
    _check_supported(name, all_fields, architecture)
    try:
        specific = architecture.read(all_fields)
        heads, width = all_fields["num_attention_heads"], all_fields["hidden_size"]
        return ModelConfig(
            width=width,
            layers=all_fields["num_hidden_layers"],
            heads=heads,
            kv_heads=all_fields.get("num_key_value_heads", heads),
            head_width=all_fields.get("head_dim", width // heads),
            num_experts=next(all_fields[spelling] for spelling in EXPERT_COUNTS if spelling in all_fields),
            vocabulary=all_fields["vocab_size"],
            tied=all_fields["tie_word_embeddings"],
            rope_theta=float(all_fields.get("rope_theta", 10_000.0)),
            rotary_fraction=float(all_fields.get("partial_rotary_factor", 1.0)),
            norm_epsilon=float(all_fields["rms_norm_eps"]),
            dtype=float_name("dtype", dtype),
            param_dtype=float_name("param_dtype", param_dtype),
            architecture=name,
            **specific,
        )
    except StopIteration as error:
        raise ValueError(f"{name}: the field {' or '.join(EXPERT_COUNTS)} is missing") from error
    except KeyError as error:
        raise ValueError(f"{name}: the field {error} is missing") from error


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` fields of a model, in the spelling that `transformers` 4.51 and later read.

    Args:
        config: the model's sizes and architecture.

    Raises:
        ValueError: if the architecture is unknown or cannot represent some fields of `config`; the message names them.
    """
    name = config.architecture
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture={name!r} must be one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    fields = {
        "architectures": [architecture.class_name],
        "model_type": name,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "num_experts_per_tok": config.top_k,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "torch_dtype": config.param_dtype,
        **architecture.write(config),
    }
    round_trip = model_config(fields, dtype=config.dtype, param_dtype=config.param_dtype)
    if unsupported := differences(round_trip, config):
        values = ", ".join(f"{key}={value!r}" for key, value in unsupported.items())
        raise ValueError(f"architecture {name} cannot represent {values}")
    return fields


def differences(one: ModelConfig, other: ModelConfig) -> dict[str, Any]:
    """Return the fields in which two configs differ, with the values of ``other``."""
    pairs = zip(vars(one).items(), vars(other).values(), strict=True)
    return {key: value for (key, before), value in pairs if before != value}


def _without_none(fields: Fields) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _rope(fields: Fields) -> dict[str, Any]:
    """Return the contents of ``rope_parameters`` (new) and ``rope_scaling`` (old), to merge with the other fields."""
    both = (fields.get(name) for name in ROPE_FIELDS)
    return {key: value for rope in both if isinstance(rope, dict) for key, value in rope.items()}


def _supports_rope(architecture: Architecture, rope: Any) -> bool:
    if not isinstance(rope, dict):
        return False
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    if architecture.yarn and kinds and all(kind == "yarn" for kind in kinds):
        return rope.keys() <= PLAIN_ROPE | YARN_ROPE
    return rope.keys() <= PLAIN_ROPE and all(kind == "default" for kind in kinds)


def _check_supported(name: str, fields: Fields, architecture: Architecture) -> None:
    required = {**COMMON_REQUIRED, **architecture.required}
    wrong = [
        f"{field}={fields[field]!r} (must be {value!r})"
        for field, value in required.items()
        if fields.get(field, value) != value
    ]
    wrong += [
        f"{field}={fields[field]!r} (must be {kind})"
        for kind, (names, fits) in TYPES.items()
        for field in names
        if field in fields and not fits(fields[field])
    ]
    for field in ROPE_FIELDS:
        rope = fields.get(field) or {}
        if not _supports_rope(architecture, rope):
            other = " or by YaRN" if architecture.yarn else ""
            wrong.append(f"{field}={rope!r} (must be without scaling{other})")
    quantization = fields.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in (None, architecture.quantization):
        wrong.append(f"quantization_config={quantization!r} (must be {architecture.quantization})")
    dense = fields.get("mlp_only_layers") or []
    if dense != list(range(len(dense) if isinstance(dense, list) else 0)):
        wrong.append(f"mlp_only_layers={dense!r} (must be the first layers, [0, 1, ...])")
    if wrong:
        raise ValueError(f"{name} is supported, but not with {'; '.join(wrong)}")
