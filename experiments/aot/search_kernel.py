"""Compile the search for homes at the size of Qwen3-235B: 94 layers, 128 experts, 2 nodes of 8 ranks.

Both levels of the search are compiled, for 32 micro-batches: experts to nodes, then the experts of each node to its
ranks.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.findings import Finding
from experiments.aot.h100 import h100_mesh
from experiments.aot.kernels import with_ptxas
from pallas_kernels.swap_annealing import swap_annealing
from relibra_jax.contract.types import Topology

MICRO_BATCHES: Final = 32
REGISTERS: Final = 128
"""The largest number of registers of a thread with which four blocks of 128 threads fit on an SM."""


class SearchCase(NamedTuple):
    """One level of the search."""

    name: str
    """The name of the case in the table."""
    bins: int
    """The number of bins."""
    size: int
    """The number of items of a bin."""
    rows: int
    """The number of rows, each of which has one block."""
    steps: int
    """The default number of steps in `relibra_jax.planning.placement.place_experts`."""


SEARCH_CASES: Final = [
    SearchCase("search: experts to nodes", 2, 64, 94, 10_000),
    SearchCase("search: a node's experts to ranks", 8, 8, 188, 2_500),
]


def compile_search(case: SearchCase) -> str:
    """Compile the kernel of one level; returns ptxas's report, or the compiler's error message if compilation fails."""
    mesh = h100_mesh(Topology(num_nodes=1, ranks_per_node=1, num_experts=1, replica_slots=0))
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    items = case.bins * case.size
    lowered = jax.jit(swap_annealing).lower(
        array((items, MICRO_BATCHES, case.rows), "float32"),
        array((case.bins, items, case.rows), "float32"),
        array((case.bins, MICRO_BATCHES, case.rows), "float32"),
        array((case.steps,), "int32"),
        array((case.steps,), "int32"),
        array((case.steps, 1 + case.size), "float32"),
    )
    try:
        return with_ptxas(lowered.compile)[1]
    except (ValueError, RuntimeError) as error:
        return str(error).splitlines()[0][:120]


def judge_search(assembled: Mapping[SearchCase, str]) -> Iterator[Finding]:
    """Check that the compiled searches spill nothing and use few enough registers."""
    requirement = f"one kernel, nothing spilled, at most {REGISTERS} registers"
    for case, report in assembled.items():
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", report)]
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
        good = spilled == [0] and len(registers) == 1 and registers[0] <= REGISTERS
        result = f"{registers} registers, {spilled} bytes spilled" if registers else report
        yield Finding(case.name, requirement, result, good)
