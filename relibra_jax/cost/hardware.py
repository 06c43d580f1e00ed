"""Named clusters for `relibra_jax.cost`; every constant has its source and unit."""

import dataclasses
from typing import NamedTuple

import jax

from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The speeds and the memory of a rank. Peaks are the vendor's; efficiencies are assumptions where they are not
    measured."""

    matmul_flops: float
    """The peak of dense bfloat16 matrix products, FLOP/s."""
    fast_bandwidth: float
    """The bytes/s that a rank can send inside a node, and at the same time receive."""
    slow_bandwidth: float
    """The bytes/s that a rank can send to other nodes, and at the same time receive. If the ranks of a node share a
    link, it is an equal part of the link for each rank."""
    shared_link: bool = False
    """True if the ranks of a node share one link to other nodes, whose time is that of all their data together. False
    if each rank has its own link, and the busiest link determines the time."""
    host_bandwidth: float = 0.0
    """The bytes/s that a rank can read from its host's memory, beside what it sends; 0 if it is not known."""
    memory: float
    """The memory of a rank, bytes."""
    memory_bandwidth: float
    """The bytes/s at which a rank reads its memory."""
    matmul_efficiency: float
    """The share of the peak that grouped and dense products reach, where an MLP with gradients counts as nine products.
    Measured on H100 and H200, else assumed."""
    network_efficiency: float
    """The share of the bandwidth that collectives reach (assumed)."""
    memory_efficiency: float
    """The share of the memory bandwidth that reads reach. Measured on H100 and H200, else assumed."""
    tile: int
    """The rows of one tile of a grouped product. The rows of a slot cost as much as the full tiles that hold them."""
    wait_seconds: float = 0.0
    """The seconds for which ranks wait for each other at an exchange of tokens, besides its data. It is 0 for GPUs,
    where it has not been measured."""
    float8_flops: float = 0.0
    """The peak of dense matrix products of float8, FLOP/s; 0 if it has none."""
    float8_efficiency: float = 0.33
    """The share of that peak that grouped products of float8 with scales of blocks reach (modelled)."""
    choice_seconds: float = 0.0
    """The seconds for which a device waits where the host must read a choice from it, such as the length of a fitted
    exchange."""
    launch_seconds: float = 0.0
    """The least seconds of a kernel, with the gap before it. Only `relibra_jax.cost.layer_operations` counts them."""
    collective_seconds: float = 0.0
    """The least seconds of a collective, however few bytes it sends, likewise."""
    node_ranks: int = 8
    """The largest number of ranks that the fast network connects into one node: 8 GPUs in DGX and HGX nodes (NVIDIA
    data sheets)."""

    @property
    def rates(self) -> "Rates":
        """What a rank reaches of the bandwidths and of the peak."""
        return Rates(
            memory=self.memory_bandwidth * self.memory_efficiency,
            slow=self.slow_bandwidth * self.network_efficiency,
            fast=self.fast_bandwidth * self.network_efficiency,
            flops=self.matmul_flops * self.matmul_efficiency,
            host=self.host_bandwidth * self.network_efficiency,
        )

    @property
    def float8_rate(self) -> float:
        """The FLOP/s of grouped products of float8, or of the same numbers in bfloat16 where it has no float8."""
        return self.float8_flops * self.float8_efficiency or self.rates.flops


class Rates(NamedTuple):
    """The rates that a rank reaches."""

    memory: float
    """The bytes/s that it reads or writes in its memory."""
    slow: float
    """The bytes/s that it sends to other nodes."""
    fast: float
    """The bytes/s that it sends inside its node."""
    flops: float
    """The FLOP/s of grouped and dense products."""
    host: float
    """The bytes/s that it copies from its host's memory."""


# NVIDIA H100 SXM data sheet: 989 TFLOP/s bfloat16 without sparsity; 80 GB at 3.35 TB/s; NVLink 900 GB/s in both
# directions together. NVIDIA DGX H100 data sheet: 8 x 400 Gb/s InfiniBand for 8 GPUs. Tiles of 128 rows are what
# Hopper's warp-group products are built from (two 64-row groups). Measured on an H100 and an H200
# (experiments/results/kernels/gpu.md, 2026-11-26 and 2026-11-27): an MLP with gradients runs at 425 to 465 TFLOP/s for
# 1,024 rows in a group and at 566 for 7,281, and a choice takes 19 to 52 microseconds. On the H100 copies read and
# write 2.9 TB/s, and gathers of rows 2.4 TB/s. A layer with 4,100 rows takes 0.10 ms more than its experts, in four
# gathers of 10 microseconds and 17 further kernels: 3 microseconds each. An all-reduce of 8 bytes over two nodes takes
# 19 to 21 microseconds (NVIDIA/nccl-tests#150, with A100 and HDR InfiniBand); collectives inside a node are taken to be
# as slow. The data sheet has 1,979 TFLOP/s of float8 without sparsity. Products of float8 with scales of blocks
# (pallas_kernels.grouped_dot_float8) have not been measured. By the model that chooses their tiles
# (pallas_kernels.hopper.tile_sizes.estimate_cycles), an MLP of Qwen3-235B is 1.42 times as fast as in bfloat16, and so
# 0.33 of the peak: tiles are half as wide, because a product and its sum take the registers, and L2 feeds them too
# slowly. DeepGEMM, whose blocks share weights by multicast, has published 1,093 to 1,297 TFLOP/s on an H800 for groups
# of 4,096 and 8,192 rows, 0.55 to 0.66 (its README of April 2025).
# PCIe 5 x16 carries 128 GB/s in both directions together (NVIDIA H100 data sheet); copies from pinned host memory
# beside products reached 49 GB/s on the H100 (measured, as above), 0.77 of one direction.
_H100 = Cluster(
    matmul_flops=989e12,
    float8_flops=1979e12,
    fast_bandwidth=450e9,
    slow_bandwidth=50e9,
    host_bandwidth=64e9,
    shared_link=False,
    memory=80e9,
    memory_bandwidth=3.35e12,
    matmul_efficiency=0.47,
    network_efficiency=0.8,
    memory_efficiency=0.8,
    tile=128,
    choice_seconds=50e-6,
    launch_seconds=3e-6,
    collective_seconds=20e-6,
)

CLUSTERS = {
    "h100": _H100,
    # NVIDIA H200 SXM data sheet: compute and NVLink of an H100, 141 GB at 4.8 TB/s. NVIDIA DGX H200 data sheet:
    # 8 x 400 Gb/s InfiniBand for 8 GPUs. A copy on an H200 reads and writes 3.2 to 3.3 TB/s (measured, as above).
    "h200": dataclasses.replace(_H100, memory=141e9, memory_bandwidth=4.8e12, memory_efficiency=0.67),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bfloat16 without sparsity, no float8; 80 GB at 2.039 TB/s; NVLink 600
    # GB/s in both directions together. NVIDIA DGX A100 data sheet: 8 x 200 Gb/s InfiniBand for 8 GPUs; PCIe 4 at 64
    # GB/s in both directions together. The rest is Hopper's.
    "a100": dataclasses.replace(
        _H100,
        matmul_flops=312e12,
        float8_flops=0.0,
        fast_bandwidth=300e9,
        slow_bandwidth=25e9,
        host_bandwidth=32e9,
        memory_bandwidth=2.039e12,
    ),
    # NVIDIA DGX B200 data sheet, for 8 GPUs: 36 PFLOP/s bfloat16 with sparsity, half of them without, which is 2.25
    # PFLOP/s per GPU, and 72 PFLOP/s of float8 likewise; 1,440 GB at 64 TB/s; NVLink 14.4 TB/s, 1.8 TB/s per GPU in
    # both directions; 8 x 400 Gb/s InfiniBand. The rest is Hopper's.
    "b200": dataclasses.replace(
        _H100,
        matmul_flops=2250e12,
        float8_flops=4500e12,
        fast_bandwidth=900e9,
        memory=180e9,
        memory_bandwidth=8e12,
    ),
    # NVIDIA GB200 NVL72 data sheet: 72 GPUs in one NVLink domain, so up to 72 ranks per node; 360 PFLOP/s bfloat16 with
    # sparsity, half of them without, which is 2.5 PFLOP/s per GPU, and twice as many of float8; 130 TB/s of NVLink
    # together, 1.8 TB/s per GPU in both directions; 13.4 TB of HBM3e at 576 TB/s, 186 GB at 8 TB/s per GPU. NVIDIA DGX
    # GB200 data sheet: 72 x 400 Gb/s InfiniBand. Blackwell's tensor cores compute tiles of 128 rows as well. The
    # efficiencies and the time of a choice are Hopper's. One Grace CPU and two GPUs share NVLink-C2C of 900 GB/s in
    # both directions together (NVIDIA's announcement of the GB200 Superchip, 2024-03-18), less in one direction than
    # Grace's memory delivers, 512 GB/s (GB200 NVL72 data sheet).
    "gb200-nvl72": dataclasses.replace(
        _H100,
        matmul_flops=2500e12,
        float8_flops=5000e12,
        fast_bandwidth=900e9,
        memory=186e9,
        memory_bandwidth=8e12,
        host_bandwidth=900e9 / 2 / 2,
        node_ranks=72,
    ),
    # HGX H100 nodes of 8 GPUs whose only link to other nodes is one Ethernet port of 200 Gb/s (IEEE 802.3bs) or
    # 100 Gb/s (IEEE 802.3ba), for 8 ranks together.
    "h100-ethernet-200": dataclasses.replace(_H100, slow_bandwidth=200e9 / 8 / 8, shared_link=True),
    "h100-ethernet-100": dataclasses.replace(_H100, slow_bandwidth=100e9 / 8 / 8, shared_link=True),
    # One of several devices that share the cores and the memory of a host, as in tests and in examples that need no
    # GPU. All numbers are assumed: the products of one core, and copies in memory for networks and host.
    "cpu-host": Cluster(
        matmul_flops=50e9,
        fast_bandwidth=5e9,
        slow_bandwidth=5e9,
        host_bandwidth=5e9,
        memory=4e9,
        memory_bandwidth=20e9,
        matmul_efficiency=0.6,
        network_efficiency=0.8,
        memory_efficiency=0.8,
        tile=1,
    ),
}
"""The named clusters."""

_DEVICES = {
    "H100": "h100",
    "H200": "h200",
    "A100-SXM4-80GB": "a100",
    "B200": "b200",
    "GB200": "gb200-nvl72",
    "cpu": "cpu-host",
}
"""The names of clusters, by the word for the device in the name of a device kind."""


def find_cluster(device_kind: str) -> str | None:
    """Find the named cluster for a kind of device.

    Args:
        device_kind: the name that JAX has for the device, `jax.Device.device_kind`.

    Returns:
        A key of `CLUSTERS`, or None if there is none for this device.

    >>> find_cluster("NVIDIA H100 80GB HBM3"), find_cluster("NVIDIA GH200 480GB")
    ('h100', None)
    """
    return next((_DEVICES[word] for word in device_kind.split() if word in _DEVICES), None)
