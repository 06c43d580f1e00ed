"""The Triton kernels compiled for a GPU of each family: what does not fit into its shared memory fails here.

Each program is compiled by a process of its own, `experiments.aot.triton_program`. The assembler, ptxas, says how many
registers a kernel takes and what it spilled to memory; XLA says how much shared memory it will ask for at the launch.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from experiments.aot.findings import Finding
from experiments.aot.gpus import GPUS, KIB
from experiments.aot.kernels import KERNELS, MOST_SPILLED
from pallas_kernels.hopper.tile_sizes import REPLICAS

PROMISE: Final = (
    f"grouped product and MLP with gradients: {KERNELS['products']} and {KERNELS['mlp']} Triton kernels, at most"
    f" {MOST_SPILLED} bytes spilled a kernel, within shared memory"
)


class TritonCase(NamedTuple):
    """One program to compile."""

    gpu: str
    """A name in `GPUS`."""
    model: str = "Qwen3-30B-A3B"
    copies: tuple[int, ...] = (REPLICAS,)
    """The numbers of slots of the weight buffers beside that of the homes."""

    @property
    def name(self) -> str:
        """The case's line in the table."""
        major, minor = GPUS[self.gpu].capability
        return f"{self.gpu} (sm_{major}{minor}), {self.model}, {1 + len(self.copies)} weight buffers"


# One model has widths that are no multiples of 128: blocks of columns at its edges are full in part.
TRITON_CASES: Final = [*map(TritonCase, GPUS), TritonCase("A100", "GPT-OSS-120B", (2, REPLICAS))]


class Kernel(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    """Registers of a thread."""
    spilled: int
    """Bytes that a thread stores because it has no register for them."""
    shared: int
    """Bytes of shared memory of a block."""


def compile_triton(case: TritonCase) -> dict[str, Kernel] | str:
    """Compile one program in a process, and return its kernels by name, or the last line of its complaint."""
    with tempfile.TemporaryDirectory() as dump:
        command = [sys.executable, "-m", "experiments.aot.triton_program", case.gpu, case.model]
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}",
            # Only logs at this level have what ptxas printed.
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CPP_VMODULE": "subprocess_compilation=3",
            # The last line of an error is then its message.
            "JAX_TRACEBACK_FILTERING": "off",
        }
        done = subprocess.run(
            [*command, *map(str, case.copies)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return done.stderr.strip().splitlines()[-1][:120]
        launches = "".join(path.read_text() for path in Path(dump).glob("*.thunk_sequence.txt"))
    return read_kernels(done.stderr, launches)


def read_kernels(assembled: str, launches: str) -> dict[str, Kernel]:
    """Return the grouped kernels by name, of those that both sources tell of.

    Args:
        assembled: what ptxas printed.
        launches: XLA's list of the launches of a program.
    """
    of_kernel = r"entry function '(grouped_\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    taken = {name: numbers for name, *numbers in re.findall(of_kernel, assembled, re.DOTALL)}
    shared = dict(re.findall(r"(grouped_\w+) grid: .*shared_memory: (\d+) bytes", launches))
    return {
        name: Kernel(int(registers), int(spilled), int(shared[name]))
        for name, (spilled, registers) in taken.items()
        if name in shared
    }


def judge_triton(compiled: Mapping[TritonCase, Mapping[str, Kernel] | str]) -> Iterator[Finding]:
    """Yield the verdict on each program."""
    for case, kernels in compiled.items():
        if isinstance(kernels, str) or not kernels:
            yield Finding(case.name, PROMISE, str(kernels or "no kernels"), False)
            continue
        registers, spilled, shared = (max(numbers) for numbers in zip(*kernels.values(), strict=True))
        limit = GPUS[case.gpu].shared_of_block
        said = (
            f"{len(kernels)} kernels, at most {registers} registers, {spilled} bytes spilled,"
            f" {shared / KIB:.0f} of {limit // KIB} KiB"
        )
        good = len(kernels) == sum(KERNELS.values()) and spilled <= MOST_SPILLED and shared <= limit
        yield Finding(case.name, PROMISE, said, good)
