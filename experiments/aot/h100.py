"""Descriptions of nodes of H100 with which XLA compiles for them on a machine without a GPU."""

from jax.sharding import Mesh

from experiments.aot.gpus import GPUS, described_devices
from relibra_jax.contract.types import Topology
from relibra_jax.execution.mesh import expert_mesh


def h100_mesh(topology: Topology) -> Mesh:
    """Return the expert mesh of ``topology`` over described H100s.

    Raises:
        RuntimeError: if the compiler for CUDA is not installed.
    """
    devices = described_devices(GPUS["H100"], nodes=topology.num_nodes, gpus_per_node=topology.ranks_per_node)
    return expert_mesh(topology, devices=devices)
