"""Check layers like those of `experiments.aot.checks` in which a kernel pulls the replicas, on one node of 8 H100."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from experiments.aot.bytes import count_sent, transfer_content
from experiments.aot.checks import BUFFER, phase_of
from experiments.aot.expected_bytes import expected_sent
from experiments.aot.findings import Finding, print_findings, read_compiled
from experiments.aot.h100 import h100_mesh
from experiments.aot.kernels import with_ptxas
from experiments.aot.stack import compile_step, input_shapes, parameter_shapes
from experiments.aot.ways import EXPERT, MODEL, capacities_of
from relibra_jax.contract.types import Topology
from relibra_jax.execution import fetch_replicas
from relibra_jax.execution.parallel import ExpertParallel

PROGRAM: Final = "remote, scanned, 1 node x 8"
TOPOLOGY: Final = Topology(num_nodes=1, ranks_per_node=8, num_experts=64, replica_slots=2)
LAYERS: Final = 8
PULLS: Final = 3
"""The number of pulling kernels: one in the forward loop over layers, one in the backward loop, which fetches again,
and one in the loop of `_compile_kept`."""
_PULL: Final = re.compile(r"= \((\w+)\[([\d,]+)\][^)]*\) custom-call.*uses_xla_collective_metadata = true")
_ASSEMBLED: Final = re.compile(r"'pull_rows\w*'.*?(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


class Remote(NamedTuple):
    """The measurements of the program."""

    pulled: list[int]
    """The number of output elements of each kernel that reads other devices' memory."""
    merged: int
    """The number of these kernels that are inside a fusion, in the program and in `_compile_kept`."""
    exchanges: dict[str, float]
    """The number of collectives of experts or their gradients per layer, by phase."""
    extra: int
    """The bytes of temporary memory in addition to that of the same program without replicas."""
    assembled: list[tuple[int, int]]
    """The spilled bytes and the registers of each kernel."""
    sent: int
    """The counted bytes of experts and their gradients that a device sends in exchanges."""
    expected: int
    """The bytes that it should send."""


def check_remote() -> None:
    """Compile and check the program."""
    print_findings(judge_remote(measure_remote()))


def measure_remote() -> Remote:
    """Compile the program with and without replicas, and measure both."""
    parallel = _parallel(TOPOLOGY)
    compiled, assembled = with_ptxas(lambda: _compile(parallel))
    program, temporary = read_compiled(compiled)
    _, without = read_compiled(_compile(_parallel(replace(TOPOLOGY, replica_slots=0))))
    transfers = list(program.transfers())
    exchanges: dict[str, float] = defaultdict(float)
    for transfer in transfers:
        if transfer_content(transfer) == "replicas":
            exchanges[phase_of(transfer)] += transfer.times / LAYERS
    text: Any = compiled.as_text()
    kept: Any = _compile_kept(parallel).as_text()
    pulled, merged = read_pulls(text)
    pulled_kept, merged_kept = read_pulls(kept)
    return Remote(
        [*pulled, *pulled_kept],
        merged + merged_kept,
        dict(exchanges),
        temporary - without,
        [(int(spilled), int(registers)) for spilled, registers in _ASSEMBLED.findall(assembled)],
        count_sent(transfers, parallel.mesh.shape)["replicas", "local"],
        expected_sent(MODEL, parallel, layers=LAYERS)["replicas", "local"],
    )


def read_pulls(text: str) -> tuple[list[int], int]:
    """Return the output elements of each pulling kernel in a program's text, and the number of kernels inside fusions.

    A kernel inside a fusion that slices its operands receives the addresses of the wrong buffers.
    """
    pulled, merged, computation = [], 0, ""
    for line in text.splitlines():
        if not line.startswith(" "):
            computation = line
        if match := _PULL.search(line):
            pulled.append(prod(int(size) for size in match[2].split(",")))
            merged += "fusion" in computation.split("(")[0]
    return pulled, merged


def judge_remote(measured: Remote) -> Iterator[Finding]:
    """Check the measurements of the program."""
    slots = TOPOLOGY.replica_slots
    experts = [elements / EXPERT for elements in measured.pulled]
    yield Finding(
        PROGRAM,
        f"one kernel fetches, one refetches, one fetches to keep: R = {slots} experts each, none fused with a slice",
        f"{experts} experts, {measured.merged} fused",
        experts == [slots] * PULLS and not measured.merged,
    )
    yield Finding(
        PROGRAM,
        "fetching uses no exchange; gradients return in 2 exchanges",
        f"{measured.exchanges}",
        measured.exchanges == {"return": 2.0},
    )
    yield Finding(
        PROGRAM,
        "MB of experts that a device sends in exchanges: exactly those of the gradients",
        f"{measured.sent / 1e6:.1f}, expected {measured.expected / 1e6:.1f}",
        measured.sent == measured.expected,
    )
    yield Finding(
        PROGRAM,
        f"temporary memory of replicas, in buffers of {BUFFER / 1e6:.1f} MB",
        f"{measured.extra / BUFFER:.2f}",
        None,
    )
    yield Finding(
        PROGRAM,
        "the kernel spills no registers",
        ", ".join(f"{registers} registers, {spilled} bytes" for spilled, registers in measured.assembled),
        bool(measured.assembled) and not any(spilled for spilled, _ in measured.assembled),
    )


def _parallel(topology: Topology) -> ExpertParallel:
    return ExpertParallel(
        mesh=h100_mesh(topology),
        topology=topology,
        capacities=capacities_of(topology, LAYERS),
        path="flat",
        exchange="padded",
        fetch="remote",
        implementation="mosaic",
    )


def _compile(parallel: ExpertParallel) -> jax.stages.Compiled:
    return compile_step(MODEL, parallel, layers=LAYERS, scanned=True)


def _compile_kept(parallel: ExpertParallel) -> jax.stages.Compiled:
    """Compile a loop over layers that keeps their replicas; XLA might fuse its kernel with the slice that it writes."""
    params = parameter_shapes(MODEL, parallel, (LAYERS,), jnp.bfloat16)
    inputs = input_shapes(MODEL, parallel, (), LAYERS)

    def fetch(x, layer):
        experts, prepared = layer
        weights, x = fetch_replicas(experts, prepared, x, parallel)
        return x, weights.replicas

    step = jax.jit(lambda x, layers: jax.lax.scan(fetch, x, layers))
    return step.lower(inputs.x, (params.experts, inputs.prepared)).compile()
