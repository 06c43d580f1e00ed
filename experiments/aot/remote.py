"""Replicas that a kernel pulls inside a node of 8 H100: layers like those of `experiments.aot.checks`."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from experiments.aot.bytes import count_sent, what_is_sent
from experiments.aot.checks import BUFFER, phase_of
from experiments.aot.expected_bytes import expected_sent
from experiments.aot.findings import Finding, read_compiled
from experiments.aot.h100 import h100_mesh
from experiments.aot.kernels import with_ptxas
from experiments.aot.stack import compile_step, input_shapes, parameter_shapes
from experiments.aot.ways import EXPERT, MODEL, capacities_of
from relibra_jax.execution import fetch_replicas
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.types import Topology

PROGRAM: Final = "remote, scanned, 1 node x 8"
TOPOLOGY: Final = Topology(num_nodes=1, ranks_per_node=8, num_experts=64, replica_slots=2)
LAYERS: Final = 8
PULLS: Final = 3
"""Kernels: one in the loop over layers forward, one in the loop backward, which fetches again; one in the loop of
`_compile_kept`."""
_PULL: Final = re.compile(r"= \((\w+)\[([\d,]+)\][^)]*\) custom-call.*uses_xla_collective_metadata = true")
_ASSEMBLED: Final = re.compile(r"'pull_rows\w*'.*?(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


class Remote(NamedTuple):
    """What the checks need to know about the program."""

    pulled: list[int]
    """Elements of the output of each kernel that reads other devices' memory."""
    merged: int
    """How many of these kernels are inside a fusion, in the program and in `_compile_kept`."""
    exchanges: dict[str, float]
    """Collectives of experts or their gradients in a layer, by phase."""
    extra: int
    """Bytes of temporary memory beside that of the same program without replicas."""
    assembled: list[tuple[int, int]]
    """Bytes that each of the kernels spills, and its registers."""
    sent: int
    """Bytes of experts and their gradients that a device sends through exchanges, counted."""
    expected: int
    """Bytes that it should send."""


def measure_remote() -> Remote:
    """Compile the program, and the same one without replicas, and read them."""
    parallel = _parallel(TOPOLOGY)
    compiled, said = with_ptxas(lambda: _compile(parallel))
    program, temporary = read_compiled(compiled)
    _, without = read_compiled(_compile(_parallel(replace(TOPOLOGY, replica_slots=0))))
    transfers = list(program.transfers())
    exchanges: dict[str, float] = defaultdict(float)
    for transfer in transfers:
        if what_is_sent(transfer) == "replicas":
            exchanges[phase_of(transfer)] += transfer.times / LAYERS
    text: Any = compiled.as_text()
    kept: Any = _compile_kept(parallel).as_text()
    pulled, merged = read_pulls(text)
    of_kept, merged_kept = read_pulls(kept)
    return Remote(
        [*pulled, *of_kept],
        merged + merged_kept,
        dict(exchanges),
        temporary - without,
        [(int(spilled), int(registers)) for spilled, registers in _ASSEMBLED.findall(said)],
        count_sent(transfers, TOPOLOGY)["replicas", "local"],
        expected_sent(MODEL, parallel, layers=LAYERS)["replicas", "local"],
    )


def read_pulls(text: str) -> tuple[list[int], int]:
    """The elements that each pulling kernel of a program's text returns, and how many kernels are inside a fusion.

    A kernel inside a fusion that slices its operands is told the addresses of other buffers than its own.
    """
    pulled, merged, computation = [], 0, ""
    for line in text.splitlines():
        if not line.startswith(" "):
            computation = line
        if found := _PULL.search(line):
            pulled.append(prod(int(size) for size in found[2].split(",")))
            merged += "fusion" in computation.split("(")[0]
    return pulled, merged


def judge_remote(found: Remote) -> Iterator[Finding]:
    """Hold the program to what is promised."""
    slots = TOPOLOGY.replica_slots
    experts = [elements / EXPERT for elements in found.pulled]
    yield Finding(
        PROGRAM,
        f"a kernel fetches, one fetches again, one fetches to keep: R = {slots} experts each, none merged with a slice",
        f"{experts} experts, {found.merged} merged",
        experts == [slots] * PULLS and not found.merged,
    )
    yield Finding(
        PROGRAM,
        "nothing is exchanged to fetch; gradients return in 2 exchanges",
        f"{found.exchanges}",
        found.exchanges == {"return": 2.0},
    )
    yield Finding(
        PROGRAM,
        "MB of experts that a device sends through exchanges: those of the gradients, to the byte",
        f"{found.sent / 1e6:.1f}, expected {found.expected / 1e6:.1f}",
        found.sent == found.expected,
    )
    yield Finding(
        PROGRAM,
        f"temporary memory of replicas, in buffers of {BUFFER / 1e6:.1f} MB",
        f"{found.extra / BUFFER:.2f}",
        None,
    )
    yield Finding(
        PROGRAM,
        "the kernel spills no register",
        ", ".join(f"{registers} registers, {spilled} bytes" for spilled, registers in found.assembled),
        bool(found.assembled) and not any(spilled for spilled, _ in found.assembled),
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
    """A loop over layers that keeps their replicas: XLA is tempted to merge the kernel with the slice that it fills."""
    params = parameter_shapes(MODEL, parallel, (LAYERS,), jnp.bfloat16)
    inputs = input_shapes(MODEL, parallel, (), LAYERS)

    def fetch(x, layer):
        experts, prepared = layer
        held, x = fetch_replicas(experts, prepared, x, parallel)
        return x, held.replicas

    step = jax.jit(lambda x, layers: jax.lax.scan(fetch, x, layers))
    return step.lower(inputs.x, (params.experts, inputs.prepared)).compile()
