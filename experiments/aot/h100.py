"""Nodes of H100, described well enough for XLA to compile for them on a machine that has none."""

from jax.sharding import Mesh

from experiments.aot.gpus import GPUS, described_devices
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.types import Topology


def h100_mesh(topology: Topology) -> Mesh:
    """The expert mesh of ``topology`` over H100s that nobody has to own.

    Raises:
        RuntimeError: the compiler for CUDA is not installed here.
    """
    devices = described_devices(GPUS["H100"], nodes=topology.num_nodes, gpus_per_node=topology.ranks_per_node)
    return expert_mesh(topology, devices=devices)
