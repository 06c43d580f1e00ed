"""Checks before a checkpoint is read: the name, shape and dtype of every tensor, and the memory of a rank."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from relibra_jax.models.config import ModelConfig
from relibra_jax.models.hf_architectures import Fields
from relibra_jax.models.hf_tensors import ALWAYS_FUSED, Part, tensor_parts
from relibra_jax.models.tensor_files import TensorFiles, group_names
from relibra_jax.support.limits import machine_memory

GIB = 2**30
DTYPES = ("F32", "BF16", "F16")
"""The supported dtypes of tensors, in the names of safetensors."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_tensors(files: TensorFiles, config: ModelConfig, fields: Fields) -> tuple[list[Part], str]:
    """Match a checkpoint's tensors with the parts of a model.

    Args:
        files: the tensors of the checkpoint.
        config: the model's sizes and architecture.
        fields: the fields of the checkpoint's ``config.json``.

    Returns:
        The parts, and the names of tensors that are ignored, as `transformers` does: layers for multi-token prediction,
        tables of rotary positions, and the head of a model that shares it with the embedding.

    Raises:
        ValueError: if tensors are missing, unexpected or of the wrong shape or dtype, or a shared head differs from the
            embedding. The message names all of them.
    """
    shapes = files.shapes()
    always_fused = config.architecture in ALWAYS_FUSED
    fused = not always_fused and any(name.endswith("experts.gate_up_proj") for name in shapes)
    parts = list(tensor_parts(config, fused=fused))
    expected = {part.name: part.tensor_shape for part in parts}
    skipped = [name for name in shapes.keys() - expected.keys() if _is_unused(name, config, fields)]
    problems = []
    missing = [name for name in expected if name not in shapes]
    extra = sorted(shapes.keys() - expected.keys() - set(skipped))
    if missing:
        problems.append(f"missing: {group_names(missing)}")
    if extra:
        problems.append(f"unexpected: {group_names(extra)}")
    wrong = [name for name, shape in expected.items() if shapes.get(name, shape) != shape]
    for stored, shape in sorted({(shapes[name], expected[name]) for name in wrong}):
        names = group_names(name for name in wrong if (shapes[name], expected[name]) == (stored, shape))
        problems.append(f"of shape {list(stored)} instead of {list(shape)}: {names}")
    unsupported = {
        name: dtype for name, dtype in files.dtypes().items() if name in expected and dtype not in DTYPES
    }
    for dtype in sorted(set(unsupported.values())):
        names = group_names(name for name, stored in unsupported.items() if stored == dtype)
        problems.append(f"of dtype {dtype} instead of {', '.join(DTYPES)}: {names}")
    if HEAD in skipped and not np.array_equal(files.read(HEAD), files.read(EMBEDDING)):
        problems.append(f"not equal although tie_word_embeddings is true: {HEAD} and {EMBEDDING}")
    if problems:
        form = "fused" if fused or always_fused else "separate"
        raise ValueError(
            f"{files.folder}: config.json describes a {config.architecture} model with {form} experts, but these"
            f" tensors do not match: {'; '.join(problems)}"
        )
    return parts, group_names(sorted(skipped))


def _is_unused(name: str, config: ModelConfig, fields: Fields) -> bool:
    if name.endswith("rotary_emb.inv_freq") or (config.tied and name == HEAD):
        return True
    default = 1 if config.architecture == "glm4_moe" else 0
    extra_layers = fields.get("num_nextn_predict_layers", fields.get("num_mtp_layers", default)) or 0
    extra_numbers = range(config.layers, config.layers + extra_layers)
    return any(name.startswith(f"model.layers.{layer}.") for layer in extra_numbers)


def rank_bytes(shapes: Any, shardings: Any) -> tuple[int, int]:
    """Return the bytes of a model's parameters on one rank: its parts of sharded ones, and those that every rank has.

    Args:
        shapes: the model's state, or its shapes.
        shardings: the sharding of every array of the state.
    """
    own = replicated = 0
    for array, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
        size = int(np.prod(sharding.shard_shape(array.shape), dtype=np.int64)) * array.dtype.itemsize
        if sharding.is_fully_replicated:
            replicated += size
        else:
            own += size
    return own, replicated


def check_device_memory(name: str, shapes: Any, shardings: Any, mesh: Mesh) -> None:
    """Raise an error if a rank's parameters exceed the memory of its device.

    Args:
        name: the name of the checkpoint, for the error message.
        shapes: the shapes of the model's state.
        shardings: the sharding of every array of the state.
        mesh: the device mesh.

    Raises:
        ValueError: if they do; the message has the computed sizes.
    """
    own, replicated = rank_bytes(shapes, shardings)
    available = memory_of_a_device(mesh)
    if own + replicated > available:
        raise ValueError(
            f"{name}: a rank's parameters take {(own + replicated) / GIB:.2f} GiB ({own / GIB:.2f} GiB are its parts of"
            f" sharded ones, and {replicated / GIB:.2f} GiB every rank has), but a device has only"
            f" {available / GIB:.2f} GiB; use more ranks, a smaller param_dtype, fsdp_axis or shard_dense=True"
        )


def memory_of_a_device(mesh: Mesh) -> int:
    """Return the memory of one device of ``mesh``, in bytes; a CPU device has a share of the machine's memory."""
    return memory_of_device(mesh.local_devices[0], shares=len(mesh.local_devices))


def memory_of_device(device: jax.Device, *, shares: int) -> int:
    """Return the memory of a device in bytes; a CPU device has a ``shares``-th part of the machine's memory."""
    statistics = device.memory_stats() or {}
    return statistics.get("bytes_limit", machine_memory() // shares)
