"""Compile the Hopper kernels at the shapes of published models, and check registers and shared memory.

The shapes are those of one rank of eight, with its home slots, two replica slots and 32,768 rows. One model also has
two resident slots. Another is also compiled with home slots alone and so few rows that tiles take one warpgroup. The
heuristic chooses the tile sizes; for two models, tiles of clusters, which tuning may choose, are compiled as well. The
assembler, ptxas, reports what makes kernels slow: registers that it spilled to memory, and products (wgmma) that it
serialised.

Two programs with bad tiles show that the checks reject them: one whose accumulators do not fit into registers, and one
whose steps do not fit into shared memory.
"""

import contextlib
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple
from unittest import mock

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.findings import Finding, print_findings
from experiments.aot.h100 import h100_mesh
from pallas_kernels import grouped_dot, grouped_mlp
from pallas_kernels.grouped_dot import mosaic as grouped_dot_mosaic
from pallas_kernels.grouped_mlp import mosaic as grouped_mlp_mosaic
from pallas_kernels.hopper.persistent_kernel import TileSizes
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS, REPLICAS, Problem, choose_tile_sizes
from relibra_jax.contract.types import Topology

type Part = Literal["products", "mlp"]
"""The computation of a program: the three grouped products, or the grouped MLP with gradients."""

ROWS: Final = 32_768
FEW_ROWS: Final = 1024
KERNELS: Final[Mapping[Part, int]] = {"products": 3, "mlp": 5}
"""The number of kernels of a program: three products, or for the MLP two forward and three backward."""
REQUIREMENTS: Final[Mapping[Part, str]] = {
    "products": "forward, input and weight gradient: one kernel each, within shared memory",
    "mlp": "grouped MLP with gradients: two kernels forward, three backward, within shared memory",
}
MOST_SPILLED: Final = 64
"""The bytes that a kernel may spill. A pointer that is read once per group may be spilled; spilled accumulators would
take thousands of bytes."""
BAD_TILES: Final = "bad tiles, which the checks must reject: they spill, or do not fit into shared memory"
SOUND: Final = f"at most {MOST_SPILLED} bytes spilled per kernel, no serialised product"


class KernelCase(NamedTuple):
    """One program to compile."""

    model: str
    part: Part
    rows: int = ROWS
    copies: tuple[int, ...] = (REPLICAS,)
    """The numbers of slots of the weight buffers other than the homes."""
    tiles: tuple[tuple[str, int], ...] = ()
    """The fields of every kernel's `TileSizes` that replace the heuristic's choice, by name."""
    sound: bool = True
    """Whether the tiles are good; the checks must reject bad ones."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The number of slots of each weight buffer."""
        return MODELS[self.model].experts // RANKS, *self.copies

    @property
    def name(self) -> str:
        """The name of the case in the table."""
        if self == KernelCase(self.model, self.part):
            return self.model
        tiles = "".join(f", {name}={value}" for name, value in self.tiles)
        return f"{self.model}, {self.rows} rows, {'+'.join(map(str, self.slots))} slots{tiles}"


PARTS: Final[tuple[Part, ...]] = ("mlp", "products")
RESIDENTS: Final = "DeepSeek-V3"
"""The model whose kernels are compiled with resident slots."""
KERNEL_CASES: Final = [
    *(KernelCase(model, part) for model in MODELS if model != RESIDENTS for part in PARTS),
    *(KernelCase(RESIDENTS, part, copies=(2, REPLICAS)) for part in PARTS),
    *(KernelCase("Qwen3-30B-A3B", part, FEW_ROWS, ()) for part in PARTS),
    # The matrices of the first model are whole tiles; the second model has partial tiles.
    *(
        KernelCase(model, part, tiles=(("cluster", 2),))
        for model in ("Qwen3-235B-A22B", "GPT-OSS-120B")
        for part in PARTS
    ),
    KernelCase("Qwen3-30B-A3B", "mlp", tiles=(("width", 192), ("stages", 3)), sound=False),
    KernelCase("Qwen3-30B-A3B", "products", tiles=(("stages", 9),), sound=False),
]


class Compiled(NamedTuple):
    """The measurements of a compiled program."""

    kernels: int
    """The number of kernels that it launches."""
    temporary: int
    """The bytes of its temporary buffers."""
    assembled: str
    """The text that ptxas printed."""


def check_kernels(model: str) -> None:
    """Compile and check the kernels at the shapes of a model."""
    print_findings(
        judge_kernels({case: compile_kernels(case) for case in KERNEL_CASES if case.model == model})
    )


def compile_kernels(case: KernelCase) -> Compiled | str:
    """Compile one program; returns its measurements, or the compiler's error message if compilation fails."""

    def choose(problem: Problem) -> TileSizes:
        return choose_tile_sizes(problem)._replace(**dict(case.tiles))

    with contextlib.ExitStack() as stack:
        for module in (grouped_dot_mosaic, grouped_mlp_mosaic):
            stack.enter_context(mock.patch.object(module, "choose_tile_sizes", choose))
        return _compile(case)


def _compile(case: KernelCase) -> Compiled | str:
    shape = MODELS[case.model]
    mesh = h100_mesh(Topology(num_nodes=1, ranks_per_node=1, num_experts=1, replica_slots=0))

    def array(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    matrices = () if case.part == "products" else (3,)
    rows, scale = array(case.rows, shape.width), array(case.rows, dtype="float32")
    weights = [array(count, *matrices, shape.width, shape.expert_width) for count in case.slots]
    sizes = array(sum(case.slots), dtype="int32")

    def products(rows, weights, sizes, d_out):
        dot = functools.partial(grouped_dot, group_sizes=sizes, implementation="mosaic")
        out, pull = jax.vjp(dot, rows, weights)
        return out, *pull(d_out)

    def mlp(rows, weights, sizes, scale, d_out):
        def call(rows, weights, scale):
            return grouped_mlp(rows, weights, sizes, scale, implementation="mosaic")

        out, pull = jax.vjp(call, rows, weights, scale)
        return out, *pull(d_out)

    try:
        if case.part == "products":
            lowered = jax.jit(products).lower(rows, weights, sizes, array(case.rows, shape.expert_width))
        else:
            lowered = jax.jit(mlp).lower(rows, weights, sizes, scale, rows)
        compiled, assembled = with_ptxas(lowered.compile)
    except (ValueError, RuntimeError) as error:
        return str(error).splitlines()[0][:120]
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError("this backend does not provide the text or the memory use of the compiled program")
    return Compiled(text.count('custom_call_target="mosaic_gpu'), memory.temp_size_in_bytes, assembled)


def with_ptxas[T](compile_program: Callable[[], T]) -> tuple[T, str]:
    """Compile a program; returns it and the text that ptxas printed about its kernels.

    Mosaic's compiler prints the text from C++ if an environment variable is set.
    """
    variable = "MOSAIC_GPU_DUMP_PTXAS"
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        stdout = os.dup(1)
        stack.callback(os.close, stdout)
        os.dup2(output.fileno(), 1)
        stack.callback(os.dup2, stdout, 1)
        os.environ[variable] = "1"
        stack.callback(os.environ.pop, variable)
        program = compile_program()
        output.seek(0)
        return program, output.read()


def judge_kernels(compiled: Mapping[KernelCase, Compiled | str]) -> Iterator[Finding]:
    """Check the number of kernels in each compiled program, and the report of ptxas.

    Bad tiles yield one finding, which is good if the checks reject them.
    """
    for case, program in compiled.items():
        findings = list(_judge_kernels(case, program))
        if case.sound:
            yield from findings
        else:
            failures = [finding.result for finding in findings if not finding.good]
            result = "rejected: " + "; ".join(failures) if failures else "accepted"
            yield Finding(case.name, BAD_TILES, result, bool(failures))


def _judge_kernels(case: KernelCase, program: Compiled | str) -> Iterator[Finding]:
    if isinstance(program, str):
        yield Finding(case.name, REQUIREMENTS[case.part], program, False)
        return
    result = f"{program.kernels}, {program.temporary / 1e6:.0f} MB temporary"
    yield Finding(case.name, REQUIREMENTS[case.part], result, program.kernels == KERNELS[case.part])
    yield _judge_assembled(case, program.assembled)


def _judge_assembled(case: KernelCase, assembled: str) -> Finding:
    spilled = [int(count) for count in re.findall(r"stack frame, (\d+) bytes spill stores", assembled)]
    wait = assembled.count("wgmma.mma_async instructions are serialized")
    # setmaxnreg moves registers from the copying warpgroup to the multiplying ones; ptxas may ignore it.
    ignored = assembled.count("(C7508)")
    result = (
        f"{len(spilled)} kernels, {max(spilled, default=0)} bytes spilled, {wait} serialised,"
        f" {ignored} without setmaxnreg"
    )
    good = len(spilled) == KERNELS[case.part] and max(spilled) <= MOST_SPILLED and not wait + ignored
    return Finding(case.name, f"{case.part}: {SOUND}", result, good)
