"""Save a `LanguageModel` as a checkpoint in Hugging Face's format, atomically."""

import collections
import math
import shutil
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import DTypeLike

from relibra_jax.execution.plan_agreement import fail_together
from relibra_jax.models.config import ModelConfig, float_name
from relibra_jax.models.export import pretrained_tensors, tensor_dtype
from relibra_jax.models.hf_config import config_fields, differences, load_config, read_config
from relibra_jax.models.hf_tensors import Part, tensor_parts
from relibra_jax.models.language_model import LanguageModel
from relibra_jax.models.tensor_files import write_tensors
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.atomic_write import write_json

COPIED_FILES: Final = (
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
"""The files that are copied from the source checkpoint, if it has them."""
SHARD_BYTES: Final = 4_000_000_000
"""The default limit on the bytes of tensors in one file."""


@checks_arguments
def save_pretrained(
    model: LanguageModel,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype: DTypeLike | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Save a model as a checkpoint in Hugging Face's format, with experts in logical order and without quantization.

    Experts are separate tensors; those of GPT-OSS are fused.

    The folder appears only when it is complete. With several processes, all of them must call it; process 0 writes.

    Args:
        model: the model, on a mesh, with its experts in any homes.
        folder: the folder to create.
        source: the checkpoint from which the model was loaded; its ``config.json``, tokenizer and chat template are
            copied. None writes a ``config.json`` from the model's own config, which has no maximum position and no ids
            of the tokens that begin or end a text.
        dtype: the dtype of the tensors. None keeps the dtype of the parameters.
        shard_bytes: the largest number of bytes of tensors in one file, which is also held in host memory.

    Raises:
        ValueError: if the folder exists, ``dtype`` is not float32, bfloat16 or float16, the source is a checkpoint of a
            different model, or the architecture cannot represent the model's config.
    """
    folder, config = Path(folder).absolute(), model.config
    with fail_together(f"saving {folder}"):
        if folder.exists():
            raise ValueError(f"{folder} already exists; a checkpoint needs a new folder")
        fields = config_fields(config) if source is None else _fields_of_source(source, config)
        fields["torch_dtype"] = float_name("dtype", config.param_dtype if dtype is None else dtype)
    parts = tensor_parts(config)
    sizes = {part.name: _tensor_bytes(part, config, dtype) for part in parts}
    tensors = ((name, np.asarray(value)) for name, value in pretrained_tensors(model, dtype=dtype))
    with fail_together(f"saving {folder}"):
        try:
            if jax.process_index() == 0:
                _write_folder(folder, tensors, sizes, fields, source, shard_bytes)
        finally:  # the other processes wait for this one to take part in the remaining broadcasts
            collections.deque(tensors, maxlen=0)


def _write_folder(folder: Path, tensors, sizes, fields, source, shard_bytes: int) -> None:
    """Write all files to a temporary sibling folder, and then rename it to ``folder``."""
    unfinished = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_tensors(unfinished, tensors, sizes, shard_bytes=shard_bytes)
    for path in [] if source is None else [Path(source) / name for name in COPIED_FILES]:
        if path.exists():
            shutil.copyfile(path, unfinished / path.name)
    write_json(unfinished / "config.json", fields)
    unfinished.rename(folder)


def _fields_of_source(source: str | Path, config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a source's config.json without what is not saved: multi-token prediction, quantization."""
    fields = dict(read_config(source))
    source_config = load_config(source, dtype=config.dtype, param_dtype=config.param_dtype)
    if changed_fields := differences(source_config, config):
        other = ", ".join(f"{key}={getattr(source_config, key)!r}" for key in changed_fields)
        own = ", ".join(f"{key}={value!r}" for key, value in changed_fields.items())
        raise ValueError(f"{source} is a checkpoint with {other}, but the model has {own}")
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if name in fields:
            fields[name] = 0
    for name in ("dtype", "quantization_config"):
        fields.pop(name, None)
    return fields


def _tensor_bytes(part: Part, config: ModelConfig, dtype: DTypeLike | None) -> int:
    own = "float32" if part.path[-1] == "correction_bias" else config.param_dtype
    return math.prod(part.tensor_shape) * tensor_dtype(part, own, dtype).itemsize
