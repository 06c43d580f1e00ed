"""Two nodes of H100, described well enough for XLA to compile for them on a machine that has none.

The figures are NVIDIA's: "H100 Tensor Core GPU Architecture" (the SXM5 column: 132 SMs of 128 FP32 cores, 50 MB of
L2, 80 GB of HBM3) and the H100 data sheet (3.35 TB/s); limits of a block and of an SM are those of compute capability
9.0 in the CUDA C++ Programming Guide's table of technical specifications. 1.98 GHz is the highest boost clock.
"""

import os
from typing import Final

from jax.experimental import topologies
from jax.sharding import Mesh

from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.types import Topology

# A GpuTargetConfig of XLA as text. Features of sm_90a (wgmma) are compiled only where the accelerated set is named.
TARGET: Final = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 80000000000
  memory_bandwidth: 3350000000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100_mesh(topology: Topology) -> Mesh:
    """The expert mesh of ``topology`` over H100s that nobody has to own.

    Raises:
        RuntimeError: the compiler for CUDA is not installed here.
    """
    # The plugin looks for CUDA's libraries when it loads; to compile it needs none of them.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name="h100",
            topology=f"1x{topology.num_nodes}x{topology.ranks_per_node}",
            target_config=TARGET,
        )
    except NotImplementedError as error:
        raise RuntimeError("jax-cuda13-plugin and jax-cuda13-pjrt are not installed: run make aot") from error
    return expert_mesh(topology, devices=described.devices)
