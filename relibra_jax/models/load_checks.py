"""What is looked at before a checkpoint is read: every tensor's name and shape, and the memory of a rank."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from relibra_jax.limits import machine_memory
from relibra_jax.models.config import ModelConfig
from relibra_jax.models.hf_architectures import Fields
from relibra_jax.models.hf_tensors import Part, tensor_parts
from relibra_jax.models.tensor_files import TensorFiles, group_names
from relibra_jax.nnx import ExpertParam
from relibra_jax.types import Topology

GIB = 2**30
DTYPES = ("F32", "BF16", "F16")
"""The dtypes of tensors, as safetensors names them."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_tensors(files: TensorFiles, config: ModelConfig, fields: Fields) -> tuple[list[Part], str]:
    """Find every part of a model in a checkpoint.

    Args:
        files: the tensors of the checkpoint.
        config: the model's sizes.
        fields: the checkpoint's ``config.json``.

    Returns:
        The parts, and the names of tensors that `transformers` leaves out as well: layers for multi-token prediction,
        tables of rotary positions, the head of a model whose head is the embedding, if they are equal.

    Raises:
        ValueError: if tensors are missing, left over or of other shapes or dtypes: all of their names.
    """
    shapes = files.shapes()
    fused = any(name.endswith("experts.gate_up_proj") for name in shapes)
    parts = list(tensor_parts(config, fused=fused))
    expected = {part.name: part.tensor_shape for part in parts}
    skipped = [name for name in shapes.keys() - expected.keys() if _is_unused(name, config, fields)]
    problems = []
    missing = [name for name in expected if name not in shapes]
    extra = sorted(shapes.keys() - expected.keys() - set(skipped))
    if missing:
        problems.append(f"missing: {group_names(missing)}")
    if extra:
        problems.append(f"left over: {group_names(extra)}")
    wrong = [name for name, shape in expected.items() if shapes.get(name, shape) != shape]
    for found, shape in sorted({(shapes[name], expected[name]) for name in wrong}):
        names = group_names(name for name in wrong if (shapes[name], expected[name]) == (found, shape))
        problems.append(f"of shape {list(found)} instead of {list(shape)}: {names}")
    odd = {name: dtype for name, dtype in files.dtypes().items() if name in expected and dtype not in DTYPES}
    for dtype in sorted(set(odd.values())):
        names = group_names(name for name, found in odd.items() if found == dtype)
        problems.append(f"of dtype {dtype} instead of {', '.join(DTYPES)}: {names}")
    if HEAD in skipped and not np.array_equal(files.read(HEAD), files.read(EMBEDDING)):
        problems.append(f"not equal though tie_word_embeddings is true: {HEAD} and {EMBEDDING}")
    if problems:
        form = "fused" if fused else "separate"
        raise ValueError(
            f"{files.folder}: no {config.architecture} with {form} experts as its config.json describes it; tensors"
            f" {'; '.join(problems)}"
        )
    return parts, group_names(sorted(skipped))


def _is_unused(name: str, config: ModelConfig, fields: Fields) -> bool:
    if name.endswith("rotary_emb.inv_freq") or (config.tied and name == HEAD):
        return True
    default = 1 if config.architecture == "glm4_moe" else 0
    extra_layers = fields.get("num_nextn_predict_layers", fields.get("num_mtp_layers", default)) or 0
    behind = range(config.layers, config.layers + extra_layers)
    return any(name.startswith(f"model.layers.{layer}.") for layer in behind)


def rank_bytes(shapes: Any, topology: Topology) -> tuple[int, int]:
    """The bytes of a model's parameters on one rank: those of its own experts, and those that all ranks have.

    Args:
        shapes: the model's state, or the shapes of it.
        topology: the expert-parallel group.
    """
    own = replicated = 0
    for variable in jax.tree.leaves(shapes, is_leaf=lambda leaf: hasattr(leaf, "get_raw_value")):
        value = variable.get_raw_value()
        size = int(np.prod(value.shape, dtype=np.int64)) * value.dtype.itemsize
        if isinstance(variable, ExpertParam):
            own += size // topology.num_ranks
        else:
            replicated += size
    return own, replicated


def check_device_memory(name: str, shapes: Any, mesh: Mesh, topology: Topology) -> None:
    """Raise unless every rank's device has room for its parameters.

    Args:
        name: the checkpoint, for the error.
        shapes: the shapes of the model's state.
        mesh: the device mesh.
        topology: the expert-parallel group.

    Raises:
        ValueError: if not, with the computed sizes.
    """
    own, replicated = rank_bytes(shapes, topology)
    there = memory_of_a_device(mesh)
    if own + replicated > there:
        raise ValueError(
            f"{name}: a rank's parameters take {(own + replicated) / GIB:.2f} GiB ({own / GIB:.2f} GiB of experts, a"
            f" share of {topology.num_ranks} ranks, and {replicated / GIB:.2f} GiB that every rank has); there are"
            f" {there / GIB:.2f} GiB for a device: take more ranks, or parameters of fewer bytes (param_dtype)"
        )


def memory_of_a_device(mesh: Mesh) -> int:
    """The bytes that a device of ``mesh`` may hold; for CPU devices their share of the machine's memory."""
    device = mesh.local_devices[0]
    statistics = device.memory_stats() or {}
    return statistics.get("bytes_limit", machine_memory() // len(mesh.local_devices))
