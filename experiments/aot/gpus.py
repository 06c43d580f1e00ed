"""Descriptions of GPUs with which XLA compiles for them on a machine without a GPU.

Compute capability, shared memory and threads come from the table of technical specifications in the CUDA C++
Programming Guide. The other figures come from NVIDIA's data sheets and architecture white papers, with the highest
boost clock. The H100 is the SXM5 part, with 132 multiprocessors. Triton kernels depend only on the compute capability
and shared memory.
"""

import os
from typing import Any, Final, NamedTuple

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

KIB: Final = 1024


class Gpu(NamedTuple):
    """The properties of a GPU that the compiler needs."""

    kind: str
    """The device kind in JAX."""
    capability: tuple[int, int]
    """The compute capability."""
    cores: int
    """The number of multiprocessors."""
    fpus: int
    """The number of FP32 lanes of a multiprocessor."""
    threads: int
    """The largest number of threads on a multiprocessor."""
    clock: float
    """The clock rate in GHz."""
    memory: int
    """The device memory in GB."""
    bandwidth: int
    """The memory bandwidth in GB/s."""
    l2: int
    """The L2 cache in MiB."""
    shared: int
    """The shared memory of a multiprocessor in KiB; a block may use 1 KiB less."""

    @property
    def multiplies_float8(self) -> bool:
        """Whether its tensor cores multiply float8."""
        return self.capability >= (8, 9)

    @property
    def shared_of_block(self) -> int:
        """The bytes of shared memory that a block may use."""
        return (self.shared - 1) * KIB


GPUS: Final = {
    "A100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 1.41, 80, 2039, 40, 164),
    "A10": Gpu("NVIDIA A10", (8, 6), 72, 128, 1536, 1.695, 24, 600, 6, 100),
    "L40": Gpu("NVIDIA L40", (8, 9), 142, 128, 1536, 2.49, 48, 864, 96, 100),
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 1.98, 80, 3350, 50, 228),
    "B200": Gpu("NVIDIA B200", (10, 0), 148, 128, 2048, 1.965, 180, 8000, 126, 228),
    "RTX PRO 6000": Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 128, 1536, 2.6, 96, 1597, 128, 100
    ),
}
"""One GPU of each family for which kernels are compiled, by a short name."""


def target_config(gpu: Gpu) -> str:
    """Return XLA's GpuTargetConfig as text, with the accelerated features of the GPU if it has any."""
    major, minor = gpu.capability
    features = "feature_extension: ACCELERATED_FEATURES" if (9, 0) <= gpu.capability < (12, 0) else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory * 10**9}
  memory_bandwidth: {gpu.bandwidth * 10**9}
  l2_cache_size: {gpu.l2 * KIB**2}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {gpu.threads}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_block_optin: {gpu.shared_of_block}
  shared_memory_per_core: {gpu.shared * KIB}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{gpu.kind}"
"""


def described_devices(gpu: Gpu, *, nodes: int = 1, gpus_per_node: int = 1) -> list[Any]:
    """Return described GPUs, for which programs can be compiled but not run.

    Args:
        gpu: the GPU.
        nodes: the number of nodes.
        gpus_per_node: the number of GPUs in each node.

    Raises:
        RuntimeError: if the compiler for CUDA is not installed.
    """
    # The plugin looks for CUDA's libraries when it loads, but does not need them to compile.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name="gpus",
            topology=f"1x{nodes}x{gpus_per_node}",
            target_config=target_config(gpu),
        )
    except NotImplementedError as error:
        raise RuntimeError("jax-cuda13-plugin and jax-cuda13-pjrt are not installed; run make aot") from error
    return described.devices


def gpu_mesh(gpu: Gpu) -> Mesh:
    """Return a mesh with one axis, ``rank``, over one described GPU."""
    return Mesh(np.array(described_devices(gpu)), ("rank",), axis_types=(AxisType.Auto,))
