"""The device mesh: its axis names, its shardings, and the compiler options for overlap.

A mesh for expert parallelism ends with the axes ``node`` and ``local``; the caller's own axes (data, FSDP) come
first. Device ``(..., n, g)`` owns entry ``[..., n, g, ...]`` of every array over ranks.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.implementation import why_not_hopper
from relibra_jax.contract.types import Topology
from relibra_jax.support.argument_types import checks_arguments

NODE: Final = "node"
LOCAL: Final = "local"
RANKS: Final = (NODE, LOCAL)
"""The mesh axes of all ranks of an expert-parallel group, in flat order."""

OVERLAP_OPTIONS: Final = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_disable_hlo_passes": "while-loop-all-reduce-code-motion",
}
"""The compiler options with which XLA on GPUs sends replicas while attention computes.

The last one keeps sums of gradients over copies inside the loop over layers. XLA would move them after it, and keep
the sums of all layers twice.

Use them as ``jax.jit(..., compiler_options=OVERLAP_OPTIONS)``. XLA on CPU does not have these options.
"""


@checks_arguments
def expert_mesh(topology: Topology, *, devices: Sequence[jax.Device] | None = None, **others: int) -> Mesh:
    """Build the device mesh of a topology, with the caller's own axes in front.

    Devices are ordered by process, so that with one process per node every node of the mesh is a process.

    Args:
        topology: the expert-parallel group, with the sizes of ``node`` and ``local``.
        devices: the devices, exactly as many as the mesh has places. None takes all devices.
        others: the names and sizes of the caller's own axes, slowest first.

    Raises:
        ValueError: if the number of devices differs from the number of places.

    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> expert_mesh(topology, devices=jax.devices()[:1], data=1).axis_names
    ('data', 'node', 'local')
    """
    if devices is None:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    shape = (*others.values(), topology.num_nodes, topology.ranks_per_node)
    if len(devices) != np.prod(shape):
        names = " x ".join((*others, *RANKS))
        raise ValueError(
            f"a mesh of {names} = {' x '.join(map(str, shape))} needs {np.prod(shape)} devices, but there are"
            f" {len(devices)}"
        )
    places = np.asarray(devices, dtype=object).reshape(shape)
    return Mesh(places, (*others, *RANKS), axis_types=(AxisType.Auto,) * len(shape))


def check_mesh(mesh: Mesh, topology: Topology) -> None:
    """Raise unless the mesh has the topology's ranks.

    Raises:
        ValueError: if the axis node or local is missing or has a different size, or an axis is not of type Auto.
    """
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != AxisType.Auto:
            raise ValueError(f"mesh axis {name!r}: expected AxisType.Auto, found {kind}: see expert_mesh")
    for name, size in ((NODE, topology.num_nodes), (LOCAL, topology.ranks_per_node)):
        if mesh.shape.get(name) != size:
            actual = f"{mesh.shape[name]}" if name in mesh.shape else f"no such axis in {mesh.axis_names}"
            raise ValueError(f"mesh axis {name!r}: expected size {size} for {topology}, found {actual}")


def why_not_remote(devices: Sequence[Any]) -> str | None:
    """Return the reason why a kernel cannot read the memory of other devices of a mesh, or None if there is none.

    JAX 0.11 makes all devices of a mesh peers of a kernel, numbered in the order of the mesh. Only XLA finds out, when
    it requests peer access, whether the GPUs of a process can really reach each other (NVLink).

    Args:
        devices: all devices of the mesh, in its order.
    """
    if devices[0].platform not in ("gpu", "cuda"):
        return f"the devices of the mesh are of platform {devices[0].platform!r}, but the kernel is for GPUs"
    if reason := why_not_hopper(devices[0].device_kind):
        return reason
    processes = len({device.process_index for device in devices})
    if processes > 1:
        return f"the devices of the mesh belong to {processes} processes, which do not know each other's addresses"
    ids = [device.id for device in devices]
    if ids != list(range(len(ids))):
        return (
            f"the devices of the mesh have the ids {ids}, but the kernel needs 0 to {len(ids) - 1} in order"
        )
    return None


def why_not_nccl_ep(devices: Sequence[Any]) -> str | None:
    """Return the reason why NCCL EP cannot run on the devices of a mesh, or None if there is none.

    Args:
        devices: all devices of the mesh, in its order.
    """
    if devices[0].platform not in ("gpu", "cuda"):
        return f"the devices of the mesh are of platform {devices[0].platform!r}, but NCCL EP is for GPUs"
    if reason := why_not_hopper(devices[0].device_kind):
        return reason
    processes = [device.process_index for device in devices]
    if len(set(processes)) < len(devices):
        return f"{len(set(processes))} processes have {len(devices)} GPUs, but NCCL EP needs a process for each GPU"
    if processes != list(range(len(devices))):
        return f"the ranks of the mesh are processes {processes}, but NCCL EP needs 0 to {len(devices) - 1} in order"
    if importlib.util.find_spec("transformer_engine_jax") is None:
        return "TransformerEngine is not installed: see the extra nccl-ep, which is built against CUDA"
    return None


def why_not_ragged(devices: Sequence[Any]) -> str | None:
    """Return the reason why a ragged exchange cannot run between the devices of a mesh, or None if there is none."""
    if devices[0].platform != "cpu":
        return None
    return "XLA has none for CPUs, of which the mesh is; 'emulated' gives the same result, slowly, for tests"


def why_not_fitted(devices: Sequence[Any]) -> str | None:
    """Return the reason why a fitted exchange is not safe between the devices of a mesh, or None if there is none.

    A fitted exchange is a collective in a branch. XLA:CPU counts a branch as started before its copies end and its
    collective begins, so another collective can begin first. Gloo matches the collectives of processes by their order.
    With one thread for each process, a branch does not return before its collective has begun.

    Args:
        devices: all devices of the mesh.
    """
    processes = len({device.process_index for device in devices})
    if devices[0].platform != "cpu" or processes == 1 or os.environ.get("NPROC") == "1":
        return None
    return (
        f"on CPUs of {processes} processes, exchanges may start in another order on each process:"
        " set NPROC=1 before JAX starts, or use another exchange"
    )


@checks_arguments
def rank_sharding(mesh: Mesh, *, memory_kind: str | None = None) -> NamedSharding:
    """Return the sharding of an array ``[N, G, ...]``, such as expert parameters: each rank holds its own part."""
    return NamedSharding(mesh, PartitionSpec(*RANKS), memory_kind=memory_kind)


def varying_axes(array: jax.Array) -> tuple[str, ...]:
    """Return the mesh axes over which an array may differ, inside `jax.shard_map`."""
    return tuple(jax.typeof(array).manual_axis_type.varying)


def vary_over(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Mark ``array`` as varying over mesh axes, inside `jax.shard_map`. JAX then sums its gradient over them."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(array))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
