"""The Hopper kernels compiled at the shapes of named models: what does not fit into shared memory fails here.

The shapes are those of one rank of eight: its home slots, two replica slots and 32,768 rows; for one model two resident
slots as well; for another also as few rows as take tiles of one warpgroup, and home slots alone. The assembler, ptxas,
says what it did to the kernels: registers that it spilled to memory, and products (wgmma) that it made wait for each
other, would cost the speed that the kernels are for.
"""

import contextlib
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.findings import Finding
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
    copies: tuple[int, ...] = (REPLICAS,)
    """The numbers of slots of the weight buffers beside that of the homes."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The number of slots of each weight buffer."""
        return MODELS[self.model].experts // RANKS, *self.copies

    @property
    def name(self) -> str:
        """The case's line in the table."""
        if self == KernelCase(self.model, self.part):
            return self.model
        return f"{self.model}, {self.rows} rows, {'+'.join(map(str, self.slots))} slots"


PARTS: Final[tuple[Part, ...]] = ("mlp", "products")
RESIDENTS: Final = "DeepSeek-V3"
"""The model whose kernels are compiled with residents."""
KERNEL_CASES: Final = [
    *(KernelCase(model, part) for model in MODELS if model != RESIDENTS for part in PARTS),
    *(KernelCase(RESIDENTS, part, copies=(2, REPLICAS)) for part in PARTS),
    *(KernelCase("Qwen3-30B-A3B", part, FEW_ROWS, ()) for part in PARTS),
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
        raise RuntimeError("this backend says neither what it compiled nor what memory that takes")
    return Compiled(text.count('custom_call_target="mosaic_gpu'), memory.temp_size_in_bytes, assembled)


def with_ptxas[T](compile_program: Callable[[], T]) -> tuple[T, str]:
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
