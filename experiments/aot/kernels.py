"""The Hopper kernels compiled at the shapes of named models: what does not fit into shared memory fails here.

The shapes are those of one rank of eight: its home slots, two replica slots and 32,768 rows; for one model also as few
rows as take tiles of one warpgroup, and no replica slots. The assembler, ptxas, says what it did to the kernels:
registers that it spilled to memory, and products (wgmma) that it made wait for each other, would cost the speed that
the kernels are for.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.checks import Finding
from experiments.aot.h100 import h100_mesh
from pallas_kernels import grouped_dot, grouped_mlp
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS, REPLICAS
from relibra_jax.types import Topology

type Part = Literal["products", "mlp"]
"""What a program computes: the three grouped products, or the grouped MLP with gradients."""

ROWS: Final = 32_768
FEW_ROWS: Final = 1024
KERNELS: Final[Mapping[Part, int]] = {"products": 3, "mlp": 5}
"""The number of kernels of a program: three products, or two of the MLP forward and three backward."""
PROMISES: Final[Mapping[Part, str]] = {
    "products": "forward, input and weight gradient: one kernel each, within shared memory",
    "mlp": "grouped MLP with gradients: two kernels forward, three backward, within shared memory",
}
MOST_SPILLED: Final = 64
"""The bytes that a kernel may spill: a pointer that is read once a group may go to memory; accumulators would take
thousands."""
SOUND: Final = f"at most {MOST_SPILLED} bytes spilled a kernel, no product made to wait for another"


class KernelCase(NamedTuple):
    """One program to compile."""

    model: str
    part: Part
    rows: int = ROWS
    replicas: int = REPLICAS

    @property
    def name(self) -> str:
        """The case's line in the table."""
        others = f", {self.rows} rows, R={self.replicas}" if self != KernelCase(self.model, self.part) else ""
        return f"{self.model}{others}"


PARTS: Final[tuple[Part, ...]] = ("mlp", "products")
KERNEL_CASES: Final = [
    *(KernelCase(model, part) for model in MODELS for part in PARTS),
    *(KernelCase("Qwen3-30B-A3B", part, FEW_ROWS, 0) for part in PARTS),
]


class Compiled(NamedTuple):
    """What the checks need to know about a compiled program."""

    kernels: int
    """The number of kernels that it launches."""
    temporary: int
    """The bytes of its temporary buffers."""
    assembled: str
    """What ptxas printed."""


def compile_kernels(case: KernelCase) -> Compiled | str:
    """Compile one program, and return what was compiled, or the compiler's complaint if that fails."""
    shape = MODELS[case.model]
    mesh = h100_mesh(Topology(num_nodes=1, ranks_per_node=1, num_experts=1, replica_slots=0))

    def array(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    homes = shape.experts // RANKS
    matrices = () if case.part == "products" else (3,)
    matrix = (*matrices, shape.width, shape.expert_width)
    rows = array(case.rows, shape.width)
    operands = (rows, array(homes, *matrix), array(case.replicas, *matrix))
    sizes, scale = array(homes + case.replicas, dtype="int32"), array(case.rows, dtype="float32")

    def products(rows, home, replica, sizes, d_out):
        out, pull = jax.vjp(
            lambda rows, home, replica: grouped_dot(rows, home, replica, sizes, implementation="mosaic"),
            rows,
            home,
            replica,
        )
        return out, *pull(d_out)

    def mlp(rows, home, replica, sizes, scale, d_out):
        out, pull = jax.vjp(
            lambda rows, home, replica, scale: grouped_mlp(
                rows, home, replica, sizes, scale, implementation="mosaic"
            ),
            rows,
            home,
            replica,
            scale,
        )
        return out, *pull(d_out)

    try:
        if case.part == "products":
            lowered = jax.jit(products).lower(*operands, sizes, array(case.rows, shape.expert_width))
        else:
            lowered = jax.jit(mlp).lower(*operands, sizes, scale, rows)
        compiled, assembled = _with_ptxas(lowered.compile)
    except (ValueError, RuntimeError) as error:
        return str(error).splitlines()[0][:120]
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError("this backend says neither what it compiled nor what memory that takes")
    return Compiled(text.count('custom_call_target="mosaic_gpu'), memory.temp_size_in_bytes, assembled)


def _with_ptxas[T](compile_program: Callable[[], T]) -> tuple[T, str]:
    """Compile a program, and return it with what ptxas said of its kernels.

    Mosaic's compiler prints that, from C++, if it is asked to.
    """
    variable = "MOSAIC_GPU_DUMP_PTXAS"
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(tempfile.TemporaryFile("w+"))
        own = os.dup(1)
        stack.callback(os.close, own)
        os.dup2(printed.fileno(), 1)
        stack.callback(os.dup2, own, 1)
        os.environ[variable] = "1"
        stack.callback(os.environ.pop, variable)
        program = compile_program()
        printed.seek(0)
        return program, printed.read()


def judge_kernels(compiled: Mapping[KernelCase, Compiled | str]) -> Iterator[Finding]:
    """Yield the verdicts on compiled programs: how many kernels there are, and what ptxas made of them."""
    for case, found in compiled.items():
        if isinstance(found, str):
            yield Finding(case.name, PROMISES[case.part], found, False)
        else:
            said = f"{found.kernels}, {found.temporary / 1e6:.0f} MB temporary"
            yield Finding(case.name, PROMISES[case.part], said, found.kernels == KERNELS[case.part])
            yield _judge_assembled(case, found.assembled)


def _judge_assembled(case: KernelCase, assembled: str) -> Finding:
    spilled = [int(count) for count in re.findall(r"stack frame, (\d+) bytes spill stores", assembled)]
    wait = assembled.count("wgmma.mma_async instructions are serialized")
    # Registers go from the warpgroup that copies to those that multiply: a hint that ptxas may ignore.
    ignored = assembled.count("(C7508)")
    said = f"{len(spilled)} kernels, {max(spilled, default=0)} bytes, {wait} serialized, {ignored} without registers"
    good = len(spilled) == KERNELS[case.part] and max(spilled) <= MOST_SPILLED and not wait + ignored
    return Finding(case.name, f"{case.part}: {SOUND}", said, good)
