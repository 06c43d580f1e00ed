"""Compile the Hopper kernels at the shapes of published models, and check registers and shared memory.

The shapes are those of one rank of eight, with its home slots, two replica slots and 32,768 rows. One model also has
two resident slots. Another is also compiled with home slots alone and so few rows that row products have tiles of 64
rows. The heuristic chooses the tile sizes. Tiles of clusters, which tuning may choose, are compiled as well, of 128
rows for two models and of 64 for one.

The assembler, ptxas, reports what makes kernels slow: registers that it spilled to memory, and products (wgmma) that it
serialised. It also reports the registers of a thread. With too many, a kernel cannot be launched. With too few, its
warpgroups wait for more forever.

The float8 products of `experiments.float8` are also disassembled, if the disassembler, nvdisasm, is installed: their
instructions must be those of float8 tensor cores.

Two programs with bad tiles show that the checks reject them: one whose accumulators do not fit into registers, and one
whose steps do not fit into shared memory.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from unittest import mock

import jax
from jax.experimental.mosaic.gpu import core as mosaic_core
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.findings import Finding, print_findings
from experiments.aot.h100 import h100_mesh
from experiments.float8.grouped_mlp import grouped_mlp_float8
from pallas_kernels import grouped_dot, grouped_mlp
from pallas_kernels.grouped_dot import mosaic as grouped_dot_mosaic
from pallas_kernels.grouped_dot_float8 import mosaic as grouped_dot_float8_mosaic
from pallas_kernels.grouped_mlp import mosaic as grouped_mlp_mosaic
from pallas_kernels.hopper.persistent_kernel import (
    COPY_REGISTERS,
    MULTIPLY_REGISTERS,
    SHARED_MEMORY_BYTES,
    WARPGROUP_HEIGHT,
    TileSizes,
)
from pallas_kernels.hopper.tile_sizes import (
    MODELS,
    RANKS,
    REPLICAS,
    Problem,
    choose_float8_tile_sizes,
    choose_tile_sizes,
)
from relibra_jax.contract.types import Topology

type Part = Literal["products", "mlp", "float8"]
"""The computation of a program: the three grouped products, the grouped MLP with gradients, or its forward pass with
float8 products."""

ROWS: Final = 32_768
FEW_ROWS: Final = 512
KERNELS: Final[Mapping[Part, int]] = {"products": 3, "mlp": 5, "float8": 2}
"""The number of kernels of a program: three products, for the MLP two forward and three backward, and in float8 one for
gate and up and one for down."""
REQUIREMENTS: Final[Mapping[Part, str]] = {
    "products": "forward, input and weight gradient: one kernel each, within shared memory",
    "mlp": "grouped MLP with gradients: two kernels forward, three backward, within shared memory",
    "float8": "grouped MLP with float8 products: two kernels, within shared memory",
}
MOST_SPILLED: Final = 64
"""The bytes that a kernel may spill. A pointer that is read once per group may be spilled; spilled accumulators would
take thousands of bytes."""
WARPGROUP_THREADS: Final = 128
BLOCK_REGISTERS: Final = 65_536
"""The registers of a multiprocessor, and so the most of a block, on compute capability 9.0."""
REGISTERS: Final = "registers: enough to launch, and to move between warpgroups"
FLOAT8: Final = "float8: tensor cores multiply e4m3 (QGMMA), and nothing else (HGMMA)"
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
    *(KernelCase("Qwen3-30B-A3B", part, tiles=(("height", 64), ("cluster", 2))) for part in PARTS),
    KernelCase("Qwen3-30B-A3B", "float8"),
    KernelCase("Qwen3-30B-A3B", "float8", FEW_ROWS, ()),
    KernelCase(RESIDENTS, "float8", copies=(2, REPLICAS)),
    KernelCase("Qwen3-30B-A3B", "mlp", tiles=(("width", 192), ("stages", 3)), sound=False),
    KernelCase("Qwen3-30B-A3B", "products", tiles=(("stages", 9),), sound=False),
]


class Compiled(NamedTuple):
    """The measurements of a compiled program."""

    kernels: int
    """The number of kernels that it launches."""
    temporary: int
    """The bytes of its temporary buffers."""
    shared: int
    """The most bytes of shared memory that a block of one of its kernels uses."""
    heights: frozenset[int]
    """The numbers of rows of its kernels' tiles."""
    assembled: str
    """The text that ptxas and, for float8, nvdisasm printed."""


def check_kernels(model: str, compiler: str = "") -> None:
    """Compile and check the kernels at the shapes of a model.

    Args:
        model: the model's name in `MODELS`.
        compiler: the versions of the compiler, which are added to the names of programs.
    """
    findings = judge_kernels({case: compile_kernels(case) for case in KERNEL_CASES if case.model == model})
    print_findings(finding._replace(program=finding.program + compiler) for finding in findings)


def versions() -> str:
    """Return the versions of JAX and of the assembler that Mosaic uses."""
    text = subprocess.run(
        [cuda_program("ptxas"), "--version"], capture_output=True, text=True, check=True
    ).stdout
    (version,) = re.findall(r"\bV([\d.]+)", text)
    return f"JAX {jax.__version__}, ptxas {version}"


def cuda_program(name: str) -> Path:
    """Return the path of a program of the CUDA toolkit that Mosaic uses; it need not exist."""
    return Path(os.environ["MOSAIC_GPU_CUDA_ROOT"]) / "bin" / name


def compile_kernels(case: KernelCase) -> Compiled | str:
    """Compile one program; returns its measurements, or the compiler's error message if compilation fails."""

    heights, shared = set[int](), list[int]()
    count_bytes = mosaic_core._smem_tree_size

    def recorded(choose: Callable[[Problem], TileSizes]) -> Callable[[Problem], TileSizes]:
        def choose_and_record(problem: Problem) -> TileSizes:
            tiles = choose(problem)._replace(**dict(case.tiles))
            heights.add(tiles.height)
            return tiles

        return choose_and_record

    def record_bytes(buffers: Any) -> int:
        shared.append(count_bytes(buffers))
        return shared[-1]

    with contextlib.ExitStack() as stack:
        for module, choose in (
            (grouped_dot_mosaic, choose_tile_sizes),
            (grouped_mlp_mosaic, choose_tile_sizes),
            (grouped_dot_float8_mosaic, choose_float8_tile_sizes),
        ):
            stack.enter_context(mock.patch.object(module, choose.__name__, recorded(choose)))
        stack.enter_context(mock.patch.object(mosaic_core, "_smem_tree_size", record_bytes))
        compiled = _compile(case)
    if isinstance(compiled, str):
        return compiled
    program, assembled = compiled
    text, memory = program.as_text(), program.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError("this backend does not provide the text or the memory use of the compiled program")
    kernels = text.count('custom_call_target="mosaic_gpu')
    return Compiled(kernels, memory.temp_size_in_bytes, max(shared), frozenset(heights), assembled)


def _compile(case: KernelCase) -> tuple[jax.stages.Compiled, str] | str:
    """Return the compiled program and what ptxas printed, or the error message."""
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

    # What is computed from arguments is for the mesh's devices only inside shard_map.
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    def float8(rows, weights, sizes, scale):
        return grouped_mlp_float8(rows, weights, sizes, scale, implementation="mosaic")

    try:
        if case.part == "float8":
            lowered = jax.jit(float8).lower(rows, weights, sizes, scale)
        elif case.part == "products":
            lowered = jax.jit(products).lower(rows, weights, sizes, array(case.rows, shape.expert_width))
        else:
            lowered = jax.jit(mlp).lower(rows, weights, sizes, scale, rows)
        return with_ptxas(lowered.compile, disassemble=case.part == "float8")
    except (ValueError, RuntimeError) as error:
        return str(error).splitlines()[0][:120]


def with_ptxas[T](compile_program: Callable[[], T], *, disassemble: bool = False) -> tuple[T, str]:
    """Compile a program; returns it and the text that ptxas printed about its kernels.

    Mosaic's compiler prints the text from C++ if an environment variable is set.

    Args:
        compile_program: the function that compiles it.
        disassemble: whether the text also contains the instructions of the kernels, if nvdisasm is installed.
    """
    variables = ["MOSAIC_GPU_DUMP_PTXAS"]
    if disassemble and cuda_program("nvdisasm").exists():
        variables.append("MOSAIC_GPU_DUMP_SASS")
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        stdout = os.dup(1)
        stack.callback(os.close, stdout)
        os.dup2(output.fileno(), 1)
        stack.callback(os.dup2, stdout, 1)
        for variable in variables:
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
    result = (
        f"{program.kernels}, {program.temporary / 1e6:.0f} MB temporary,"
        f" {program.shared:,} of {SHARED_MEMORY_BYTES:,} bytes of shared memory"
    )
    good = program.kernels == KERNELS[case.part] and program.shared <= SHARED_MEMORY_BYTES
    yield Finding(case.name, REQUIREMENTS[case.part], result, good)
    yield _judge_assembled(case, program.assembled)
    yield _judge_registers(case, program)
    if case.part == "float8":
        yield _judge_float8(case, program.assembled)


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


def _judge_registers(case: KernelCase, program: Compiled) -> Finding:
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", program.assembled)]
    good = len(registers) == KERNELS[case.part] and all(
        any(_registers_fit(count, height) for height in program.heights) for count in registers
    )
    heights = " or ".join(map(str, sorted(program.heights)))
    result = f"{', '.join(map(str, registers))} for a thread, in tiles of {heights} rows"
    return Finding(case.name, f"{case.part}: {REGISTERS}", result, good)


def _judge_float8(case: KernelCase, assembled: str) -> Finding:
    products, others = (
        len(re.findall(name, assembled)) for name in (r"\bQGMMA\.\S*\.E4M3\.E4M3\b", r"\bHGMMA\.")
    )
    if not products + others:
        return Finding(case.name, FLOAT8, "nvdisasm is not installed", None)
    result = f"{products} instructions of float8, {others} of other products"
    return Finding(case.name, FLOAT8, result, products > 0 and not others)


def _registers_fit(count: int, height: int) -> bool:
    """Return whether blocks for tiles of a height can be launched with so many registers for each thread.

    All warpgroups start with as many. Then the one that copies gives some back, and the others wait until they have got
    more. So the sum must not grow, or they wait forever.
    """
    # A warp gets registers in units of 256.
    count = -(-count // 8) * 8
    multiplying = height // WARPGROUP_HEIGHT
    threads = (multiplying + 1) * WARPGROUP_THREADS
    moved = multiplying * MULTIPLY_REGISTERS + COPY_REGISTERS
    return count * threads <= BLOCK_REGISTERS and moved <= count * (multiplying + 1)


if __name__ == "__main__":
    check_kernels(sys.argv[1], f" ({versions()})")
