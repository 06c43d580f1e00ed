"""Load a Hugging Face checkpoint as a `LanguageModel` on a mesh; each process reads only the experts of its devices.

No process ever holds the whole model on its host: at most the experts of one device, or one other parameter, at a time.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import DTypeLike, Int

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.types import Array, Topology
from relibra_jax.execution.mesh import check_mesh
from relibra_jax.execution.plan_agreement import fail_together
from relibra_jax.models.config import ModelConfig
from relibra_jax.models.hf_config import load_config, read_config
from relibra_jax.models.hf_tensors import EXPERTS, Part
from relibra_jax.models.language_model import LanguageModel, abstract_model, model_maker
from relibra_jax.models.load_checks import check_device_memory, check_tensors
from relibra_jax.models.mxfp4 import Mxfp4Files
from relibra_jax.nnx import set_homes
from relibra_jax.support.argument_types import checks_arguments

EXPERT_AXES: Final = 5
"""The number of leading axes of the experts' array: layer, node, rank, slot and matrix."""

log = logging.getLogger(__name__)


@checks_arguments
def load_pretrained(
    folder: str | Path,
    mesh: Mesh,
    topology: Topology,
    *,
    home: Int[Array, "L E"] | None = None,
    dtype: DTypeLike = "float32",
    param_dtype: DTypeLike = "float32",
    fsdp_axis: str | None = None,
    shard_dense: bool = False,
) -> LanguageModel:
    """Load a checkpoint in Hugging Face's format.

    Args:
        folder: the folder with ``config.json`` and ``model.safetensors``, or with shards and their index. Experts may
            be separate tensors or fused; values may be bfloat16, float16 or float32, and experts of GPT-OSS MXFP4.
        mesh: the device mesh, from `relibra_jax.execution.mesh.expert_mesh`.
        topology: the expert-parallel group.
        home: the flat home slot of each expert. None places the experts in the order of their ids.
        dtype: the dtype of the computation.
        param_dtype: the dtype of the parameters, to which the values are converted.
        fsdp_axis, shard_dense: how parameters are sharded besides, as for `relibra_jax.models.make_model`.

    Returns:
        The model with its parameters on the mesh: experts are sharded over the ranks, all else is replicated or, with
        ``shard_dense``, sharded too.

    Raises:
        ValueError: if the architecture or a field of the config is not supported; if tensors are missing, unexpected or
            of the wrong shape or dtype, in which case the message names all of them; if model and topology have
            different numbers of experts; if ``home`` is invalid; if a rank's parameters exceed its device's memory; or
            if a value is not finite.
    """
    check_mesh(mesh, topology)
    with fail_together(f"loading {folder}"):
        config = load_config(folder, dtype=dtype, param_dtype=param_dtype)
        make = model_maker(config, topology, mesh, fsdp_axis=fsdp_axis, shard_dense=shard_dense)
        graph, shapes, shardings = abstract_model(make, mesh)
        check_device_memory(str(folder), shapes, shardings, mesh)
        files = Mxfp4Files(folder)
        parts, skipped = check_tensors(files, config, read_config(folder))
    if skipped:
        log.warning(
            "%s: these tensors are not loaded, because the model does not use them: %s", folder, skipped
        )
    with fail_together(f"loading {folder}"):
        return _build_model(graph, shapes, shardings, config, parts, files.read, topology, home)


def _build_model(
    graph: Any,
    shapes: Any,
    shardings: Any,
    config: ModelConfig,
    parts: list[Part],
    read: Callable[[str, tuple[int | slice, ...]], np.ndarray],
    topology: Topology,
    home: Int[Array, "L E"] | None,
) -> LanguageModel:
    """Build the model from the parts that ``read`` returns.

    Args:
        graph, shapes, shardings: the abstract model, from `relibra_jax.models.language_model.abstract_model`.
        config: the model's sizes.
        parts: all parts of all parameters.
        read: a function ``(tensor, rows) -> values``, for example `TensorFiles.read`. It is called for every part that
            a device of this process holds, once for devices that hold the same parts of the same experts.
        topology: the expert-parallel group.
        home: the flat home slot of each expert. None places the experts in the order of their ids.
    """
    if home is None:
        home = contiguous_homes(topology, config.moe_layers)
    home = check_homes(home, config.num_experts)
    if len(home) != config.moe_layers:
        raise ValueError(
            f"home has {len(home)} layers, but the model has {config.moe_layers} layers with experts"
        )
    by_path = defaultdict(list)
    for part in parts:
        by_path[part.path].append(part)

    def load(path, shape, sharding):
        names = tuple(key.key for key in path[:-1])
        parts_of_path = by_path.pop(names, [])
        if names == EXPERTS:
            return _read_experts(shape, sharding, parts_of_path, read, home)
        if not parts_of_path:  # the homes, which set_homes sets below
            zeros = np.zeros(shape.shape, shape.dtype)
            return jax.make_array_from_callback(shape.shape, sharding, lambda at: zeros[at])
        value = np.stack([_take(part, read, shape) for part in parts_of_path]).reshape(shape.shape)
        return jax.make_array_from_callback(shape.shape, sharding, lambda at: value[at])

    state = jax.tree.map_with_path(load, shapes, shardings)
    assert not by_path, f"parts that belong to no parameter: {list(by_path)}"
    model = nnx.merge(graph, state)
    set_homes(model, home)
    return model


def _read_experts(shape, sharding: NamedSharding, parts: list[Part], read, home) -> jax.Array:
    """Read the experts' array ``[L, N, G, H, 3, D, F]``, device by device."""
    parts_of = defaultdict(list)
    for part in parts:
        parts_of[part.at].append(part)
    layers, nodes, local, slots = shape.shape[:4]
    expert_at = np.argsort(home, axis=1).reshape(layers, nodes, local, slots)
    devices = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape.shape).items():
        assert index is not None
        place = tuple(each.indices(size)[:2] for each, size in zip(index, shape.shape, strict=True))
        devices[place].append(device)
    arrays = []
    for place, copies in devices.items():
        block = np.empty([end - begin for begin, end in place], shape.dtype)
        inner = tuple(slice(*each) for each in place[EXPERT_AXES:])
        for layer, node, rank, slot in np.ndindex(*block.shape[:4]):
            at = tuple(begin + i for (begin, _), i in zip(place[:4], (layer, node, rank, slot), strict=True))
            for matrix in range(block.shape[4]):
                parts_of_matrix = parts_of[at[0], int(expert_at[at]), matrix]
                block[layer, node, rank, slot, matrix] = _take_matrix(parts_of_matrix, read, shape)[inner]
        arrays += [jax.device_put(block, device) for device in copies]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, arrays)


def _take_matrix(parts: list[Part], read, shape) -> np.ndarray:
    """Read a matrix of an expert, followed by its bias if it has one."""
    matrix, *biases = (_take(part, read, shape) for part in parts)
    for bias in biases:
        columns = np.zeros((len(matrix), shape.shape[-1] - matrix.shape[1]), shape.dtype)
        columns.reshape(-1)[: bias.size] = bias
        matrix = np.concatenate([matrix, columns], axis=1)
    return matrix


def _take(part: Part, read, shape) -> np.ndarray:
    """Read one part in the dtype of its parameter and, unless it is an expert's, in the shape of one index ``at``."""
    value = read(part.name, part.rows)
    value = value.T if part.transposed else value
    if part.path != EXPERTS:
        value = value.reshape(shape.shape[len(part.at) :])
    value = value.astype(shape.dtype, copy=False)
    if not np.isfinite(value).all():
        raise ValueError(f"tensor {part.name}: a value is not finite in {shape.dtype.name}")
    return value
