"""Export a `LanguageModel` as Hugging Face's tensors, in logical expert order, independent of the experts' homes.

The tensors come one at a time from the sharded model, which is never gathered. An expert is read from the device that
owns it; if several processes share the model, that device broadcasts it. Where all experts of a layer are in one tensor
(GPT-OSS), it is put together in host memory.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import DTypeLike

from relibra_jax.execution.memory import in_host_memory, take, to_device
from relibra_jax.execution.mesh import LOCAL, NODE, RANKS
from relibra_jax.models.hf_tensors import EXPERTS, Part, tensor_parts
from relibra_jax.models.language_model import LanguageModel
from relibra_jax.nnx import get_homes
from relibra_jax.nnx.variables import expert_fsdp_axis, expert_spec
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
def pretrained_tensors(
    model: LanguageModel, *, dtype: DTypeLike | None = None
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the tensors of a model in Hugging Face's names, shapes and logical expert order, one at a time.

    Rollout engines take such ``(name, tensor)`` pairs as weight updates: vLLM in ``load_weights``, SGLang in
    ``update_weights_from_tensor``. ``torch.from_dlpack(array)`` passes an array to torch without a copy.
    With several processes, all of them must iterate together, and each gets every tensor.

    Args:
        model: the model, on a mesh, with its experts in any homes.
        dtype: the dtype of the tensors. None keeps the dtype of the parameters. Correction biases stay float32.

    Yields:
        The name and value of each tensor. A value is on one device of this process; an expert is on the device that
        owns it if that device belongs to this process, and all experts of a layer are in host memory.
    """
    config = model.config
    fused: dict[str, np.ndarray] = {}
    state = nnx.to_pure_dict(nnx.state(model))
    home = get_homes(model)
    for (path, index), parts in itertools.groupby(tensor_parts(config), _place):
        parameter: Any = functools.reduce(lambda tree, key: tree[key], path, state)
        if path == EXPERTS:
            value = _take_expert(parameter, index[0], int(home[index]))
        else:
            value = _take_dense(parameter, index)
        for part in parts:
            own_dtype = tensor_dtype(part, value.dtype, dtype)
            if path == EXPERTS:
                whole = np.broadcast_to(False, part.tensor_shape)
                options = {"shape": whole[part.rows].shape, "matrix": part.at[2], "bias": part.bias}
                tensor = _as_expert_tensor(
                    value, transposed=part.transposed, dtype=own_dtype, hidden=config.expert_width, **options
                )
            else:
                tensor = _as_tensor(
                    value, shape=part.tensor_shape, transposed=part.transposed, dtype=own_dtype
                )
            if part.rows:
                whole = fused.setdefault(part.name, np.empty(part.tensor_shape, own_dtype))
                whole[part.rows] = tensor
            else:
                yield part.name, tensor
        if fused and index[1] == config.num_experts - 1:
            host = jax.local_devices(backend="cpu")[0]
            while fused:
                name = next(iter(fused))
                yield name, jax.device_put(fused.pop(name), host)


def tensor_dtype(part: Part, own: DTypeLike, dtype: DTypeLike | None) -> jnp.dtype:
    """Return the dtype in which a part is exported, given the parameter's own dtype and the requested one.

    Args:
        part: the part of the model.
        own: the dtype of the parameter.
        dtype: the requested dtype. None keeps ``own``, and so do correction biases.
    """
    return jnp.dtype(own if dtype is None or part.path[-1] == "correction_bias" else dtype)


def _place(part: Part) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the path and index of what is read at once: all matrices of an expert, or else a single part."""
    return part.path, part.at[:2] if part.path == EXPERTS else part.at


def _take_expert(experts: Any, layer: int, slot: int) -> jax.Array:
    """Read the weights ``[3, D, F]`` of the expert in a flat home slot, onto one device."""
    local, slots = experts.shape[2:4]
    rank, own = divmod(slot, slots)
    fsdp_axis = expert_fsdp_axis(tuple(experts.sharding.spec), experts.ndim)
    if fsdp_axis or not experts.is_fully_addressable:
        where = {"mesh": experts.sharding.mesh, "fsdp_axis": fsdp_axis}
        return _broadcast(experts, layer, own, rank, **where).addressable_data(0)
    place = (rank // local, rank % local)
    [data, *_] = [
        shard.data
        for shard in experts.addressable_shards
        if tuple(at.start or 0 for at in shard.index[1:3]) == place
    ]
    return _at(data, (layer, 0, 0, own))


def _take_dense(parameter: Any, index: tuple[int, ...]) -> jax.Array:
    """Read one part of a dense parameter, onto one device; a sharded one is gathered for it, part by part."""
    if parameter.is_fully_replicated:
        return _at(parameter.addressable_data(0), index)
    return _gathered(parameter, index, mesh=parameter.sharding.mesh).addressable_data(0)


@functools.partial(jax.jit, static_argnames="mesh")
def _gathered(array: jax.Array, index: tuple[Any, ...], *, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(to_device(array[index]), NamedSharding(mesh, PartitionSpec()))


@jax.jit
def _at(array: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    return to_device(array[index])


@functools.partial(jax.jit, static_argnames=("shape", "transposed", "dtype", "hidden", "bias"))
def _as_expert_tensor(
    value: jax.Array,
    *,
    matrix: Any,
    bias: bool,
    hidden: int,
    shape: tuple[int, ...],
    transposed: bool,
    dtype: DTypeLike,
) -> jax.Array:
    """Return a matrix of an expert ``[3, D, F + C]``, or its bias."""
    value = to_device(value[matrix])
    value = value[:, hidden:].reshape(-1)[: math.prod(shape)] if bias else value[:, :hidden]
    return (value.T if transposed else value).reshape(shape).astype(dtype)


@functools.partial(jax.jit, static_argnames=("shape", "transposed", "dtype"))
def _as_tensor(value: jax.Array, *, shape: tuple[int, ...], transposed: bool, dtype: DTypeLike) -> jax.Array:
    value = to_device(value)
    value = value.reshape(shape[::-1]).T if transposed else value.reshape(shape)
    return value.astype(dtype)


@functools.partial(jax.jit, static_argnames=("mesh", "fsdp_axis"))
def _broadcast(
    experts: jax.Array, layer: Any, own: Any, rank: Any, *, mesh: Mesh, fsdp_axis: str | None
) -> jax.Array:
    """Broadcast the weights ``[3, D, F]`` of one rank's expert to all devices, bit for bit."""
    if in_host_memory(experts):
        experts, layer = take(experts, layer)[None], 0
    local = experts.shape[2]

    def on_rank(experts):
        is_owner = (jax.lax.axis_index(NODE) == rank // local) & (jax.lax.axis_index(LOCAL) == rank % local)
        value = experts[layer, 0, 0, own]
        # The sum is over integers, because a sum of floats would turn a negative zero into a positive one.
        bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
        bits = jax.lax.psum(jnp.where(is_owner, bits, 0), RANKS)
        if fsdp_axis is not None:
            bits = jax.lax.all_gather(bits, fsdp_axis, axis=1, tiled=True)
        return jax.lax.bitcast_convert_type(bits, value.dtype)

    spec = PartitionSpec(None, *expert_spec(fsdp_axis))
    return jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)(
        experts
    )
