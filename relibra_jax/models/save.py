"""A `LanguageModel` as Hugging Face's tensors, in logical expert order, wherever its experts lie.

The tensors come one at a time, straight from the sharded model: an expert is broadcast from the rank that owns it, and
nothing is gathered.
"""

import collections
import functools
import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import DTypeLike

from relibra_jax.atomic_write import write_json
from relibra_jax.execution.mesh import LOCAL, NODE, RANKS
from relibra_jax.models.config import ModelConfig
from relibra_jax.models.hf_config import config_fields, differences, model_config, read_config
from relibra_jax.models.hf_tensors import EXPERTS, Part, tensor_parts
from relibra_jax.models.language_model import LanguageModel
from relibra_jax.models.tensor_files import write_tensors
from relibra_jax.nnx import get_homes

BESIDE: Final = (
    "tokenizer.json",
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


def pretrained_tensors(
    model: LanguageModel, *, dtype: DTypeLike | None = None
) -> Iterator[tuple[str, jax.Array]]:
    """The tensors of a model in Hugging Face's names, shapes and logical expert order, one at a time.

    It is what the weight updates of rollout engines take: ``(name, tensor)`` pairs, as vLLM's ``load_weights`` and
    SGLang's ``update_weights_from_tensor`` do. To torch they go without a copy by ``torch.from_dlpack(array)``.
    On several processes all of them iterate together.

    Args:
        model: the model, on a mesh; its experts lie in whatever homes.
        dtype: the dtype of the tensors; that of the parameters when None. Correction biases stay float32.

    Yields:
        Name and value, the value on all devices of the mesh.
    """
    state = nnx.to_pure_dict(nnx.state(model))
    home = get_homes(model)
    for (path, index), parts in itertools.groupby(tensor_parts(model.config), _place):
        parameter: Any = functools.reduce(lambda tree, key: tree[key], path, state)
        if path == EXPERTS:
            layer, expert = index
            value = _broadcast_expert(parameter, layer, home[layer, expert], mesh=parameter.sharding.mesh)
        else:
            value = _at(parameter, index)
        for part in parts:
            yield part.name, _as_tensor(value[part.at[2]] if path == EXPERTS else value, part, dtype)


def _place(part: Part) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """What is taken from the mesh at once: the matrices of an expert together, of all else a part."""
    return part.path, part.at[:2] if part.path == EXPERTS else part.at


@jax.jit
def _at(parameter: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    return parameter[index]


def _as_tensor(value: jax.Array, part: Part, dtype: DTypeLike | None) -> jax.Array:
    shape = part.tensor_shape
    value = value.reshape(shape[::-1]).T if part.transposed else value.reshape(shape)
    return value.astype(_tensor_dtype(part, value.dtype, dtype))


def _tensor_dtype(part: Part, own: DTypeLike, dtype: DTypeLike | None) -> jnp.dtype:
    return jnp.dtype(own if dtype is None or part.path[-1] == "correction_bias" else dtype)


@functools.partial(jax.jit, static_argnames="mesh")
def _broadcast_expert(experts: jax.Array, layer: Any, slot: Any, *, mesh: Mesh) -> jax.Array:
    """``[3, D, F]`` of the expert in a flat home slot, the same on all devices, to the last bit."""
    local, slots = experts.shape[2:4]

    def one(experts):
        rank, own = jnp.divmod(slot, slots)
        mine = (jax.lax.axis_index(NODE) == rank // local) & (jax.lax.axis_index(LOCAL) == rank % local)
        value = experts[layer, 0, 0, own]
        # As integers: a sum of floats would turn a negative zero into a positive one.
        bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
        bits = jax.lax.psum(jnp.where(mine, bits, 0), RANKS)
        return jax.lax.bitcast_convert_type(bits, value.dtype)

    spec = PartitionSpec(None, *RANKS)
    return jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)(experts)


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
            over; None writes a ``config.json`` of what the model is.
        dtype: the dtype of the tensors; that of the parameters when None.
        shard_bytes: the most bytes of tensors in a file. So many are held on the host.

    Raises:
        ValueError: if the folder is there, the source is a checkpoint of another model, or the architecture cannot have
            the model's sizes.
    """
    folder, config = Path(folder).absolute(), model.config
    if folder.exists():
        raise ValueError(f"{folder}: it is there already; a checkpoint is written to a new folder")
    fields = config_fields(config) if source is None else _fields_of_source(source, config)
    fields["torch_dtype"] = jnp.dtype(config.param_dtype if dtype is None else dtype).name
    parts = tensor_parts(config)
    sizes = {part.name: _tensor_bytes(part, config, dtype) for part in parts}
    tensors = ((name, np.asarray(value)) for name, value in pretrained_tensors(model, dtype=dtype))
    if jax.process_index():
        collections.deque(tensors, maxlen=0)
    else:
        _write_folder(folder, tensors, sizes, fields, source, shard_bytes)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder.name}")


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
    found = model_config(fields, dtype=config.dtype, param_dtype=config.param_dtype)
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
    return math.prod(part.tensor_shape) * _tensor_dtype(part, own, dtype).itemsize
