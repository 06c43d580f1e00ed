"""A `LanguageModel` as a checkpoint in Hugging Face's format, whole or not at all."""

import collections
import math
import shutil
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import DTypeLike

from relibra_jax.atomic_write import write_json
from relibra_jax.models.agreement import together
from relibra_jax.models.config import ModelConfig, float_name
from relibra_jax.models.export import pretrained_tensors, tensor_dtype
from relibra_jax.models.hf_config import config_fields, differences, load_config, read_config
from relibra_jax.models.hf_tensors import Part, tensor_parts
from relibra_jax.models.language_model import LanguageModel
from relibra_jax.models.tensor_files import write_tensors

BESIDE: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""The files that a checkpoint may have beside its tensors and its config."""
SHARD_BYTES: Final = 4_000_000_000
"""The most bytes of tensors in a file."""


def save_pretrained(
    model: LanguageModel,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype: DTypeLike | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Save a model as a checkpoint in Hugging Face's format, experts a tensor each and in logical order.

    The folder appears when it is complete. On several processes all of them call it, and the first one writes.

    Args:
        model: the model, on a mesh; its experts lie in whatever homes.
        folder: the folder to make.
        source: the checkpoint that the model comes from, whose ``config.json``, tokenizer and chat template are taken
            over; None writes a ``config.json`` of what the model is, which knows no longest position and no tokens that
            begin or end a text.
        dtype: the dtype of the tensors; that of the parameters when None.
        shard_bytes: the most bytes of tensors in a file. So many are held on the host.

    Raises:
        ValueError: if the folder is there, ``dtype`` is none of float32, bfloat16 and float16, the source is a
            checkpoint of another model, or the architecture cannot have the model's sizes.
    """
    folder, config = Path(folder).absolute(), model.config
    with together(f"saving {folder}"):
        if folder.exists():
            raise ValueError(f"{folder}: it is there already; a checkpoint is written to a new folder")
        fields = config_fields(config) if source is None else _fields_of_source(source, config)
        fields["torch_dtype"] = float_name("dtype", config.param_dtype if dtype is None else dtype)
    parts = tensor_parts(config)
    sizes = {part.name: _tensor_bytes(part, config, dtype) for part in parts}
    tensors = ((name, np.asarray(value)) for name, value in pretrained_tensors(model, dtype=dtype))
    with together(f"saving {folder}"):
        try:
            if jax.process_index() == 0:
                _write_folder(folder, tensors, sizes, fields, source, shard_bytes)
        finally:  # others wait for this process to take its part in what is left
            collections.deque(tensors, maxlen=0)


def _write_folder(folder: Path, tensors, sizes, fields, source, shard_bytes: int) -> None:
    """Everything into a folder beside its place, which then is renamed into it."""
    unfinished = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_tensors(unfinished, tensors, sizes, shard_bytes=shard_bytes)
    for path in [] if source is None else [Path(source) / name for name in BESIDE]:
        if path.exists():
            shutil.copyfile(path, unfinished / path.name)
    write_json(unfinished / "config.json", fields)
    unfinished.rename(folder)


def _fields_of_source(source: str | Path, config: ModelConfig) -> dict[str, Any]:
    """The fields of a source's config.json, without the layers for multi-token prediction, which are not saved."""
    fields = dict(read_config(source))
    found = load_config(source, dtype=config.dtype, param_dtype=config.param_dtype)
    if lost := differences(found, config):
        other = ", ".join(f"{key}={getattr(found, key)!r}" for key in lost)
        own = ", ".join(f"{key}={value!r}" for key, value in lost.items())
        raise ValueError(f"{source}: a checkpoint of {other}, the model has {own}")
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if name in fields:
            fields[name] = 0
    fields.pop("dtype", None)
    return fields


def _tensor_bytes(part: Part, config: ModelConfig, dtype: DTypeLike | None) -> int:
    own = "float32" if part.path[-1] == "correction_bias" else config.param_dtype
    return math.prod(part.tensor_shape) * tensor_dtype(part, own, dtype).itemsize
