"""Compile the Triton kernels for a GPU of each family, and check registers and shared memory.

A separate process, `experiments.aot.triton_program`, compiles each program. The assembler, ptxas, reports the registers
of a kernel and the bytes that it spilled. XLA reports the shared memory that the launch of the kernel needs.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from experiments.aot.findings import Finding, print_findings
from experiments.aot.gpus import GPUS, KIB
from experiments.aot.kernels import KERNELS, MOST_SPILLED
from pallas_kernels.hopper.tile_sizes import REPLICAS

NUM_KERNELS: Final = (KERNELS["products"], KERNELS["mlp"], 3)
"""The numbers of kernels of the grouped product, of the MLP and of attention, with gradients. A GPU that multiplies
float8 has one more."""
REQUIREMENT: Final = (
    f"grouped product, MLP and attention with gradients: {', '.join(map(str, NUM_KERNELS))} Triton kernels, and one of"
    " float8 where the GPU multiplies it, at most"
    f" {MOST_SPILLED} bytes spilled per kernel, within shared memory"
)


class TritonCase(NamedTuple):
    """One program to compile."""

    gpu: str
    """The name of the GPU in `GPUS`."""
    model: str = "Qwen3-30B-A3B"
    copies: tuple[int, ...] = (REPLICAS,)
    """The numbers of slots of the weight buffers other than the homes."""

    @property
    def name(self) -> str:
        """The name of the case in the table."""
        major, minor = GPUS[self.gpu].capability
        return f"{self.gpu} (sm_{major}{minor}), {self.model}, {1 + len(self.copies)} weight buffers"


# The widths of GPT-OSS-120B are not multiples of 128, so its last blocks of columns are partial.
TRITON_CASES: Final = [*map(TritonCase, GPUS), TritonCase("A100", "GPT-OSS-120B", (2, REPLICAS))]


class Kernel(NamedTuple):
    """The resources of a compiled kernel."""

    registers: int
    """The number of registers of a thread."""
    spilled: int
    """The bytes that a thread spills to memory."""
    shared: int
    """The bytes of shared memory of a block."""


def check_triton(gpu: str) -> None:
    """Compile and check the Triton kernels for a GPU."""
    print_findings(judge_triton({case: compile_triton(case) for case in TRITON_CASES if case.gpu == gpu}))


def compile_triton(case: TritonCase) -> dict[str, Kernel] | str:
    """Compile one program in a separate process; returns its kernels by name, or the last line of the error."""
    with tempfile.TemporaryDirectory() as dump:
        command = [sys.executable, "-m", "experiments.aot.triton_program", case.gpu, case.model]
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}",
            # The output of ptxas is only in logs of this level.
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CPP_VMODULE": "subprocess_compilation=3",
            # With this option the last line of an error is its message.
            "JAX_TRACEBACK_FILTERING": "off",
        }
        process = subprocess.run(
            [*command, *map(str, case.copies)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            return process.stderr.strip().splitlines()[-1][:120]
        launches = "".join(path.read_text() for path in Path(dump).glob("*.thunk_sequence.txt"))
    return read_kernels(process.stderr, launches)


def read_kernels(assembled: str, launches: str) -> dict[str, Kernel]:
    """Return the kernels of `pallas_kernels` by name, of those that appear in both texts.

    Args:
        assembled: the text that ptxas printed.
        launches: XLA's list of the kernel launches of a program.
    """
    pattern = r"entry function '((?:grouped|flash)_\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    usage = {name: numbers for name, *numbers in re.findall(pattern, assembled, re.DOTALL)}
    shared = dict(re.findall(r"((?:grouped|flash)_\w+) grid: .*shared_memory: (\d+) bytes", launches))
    return {
        name: Kernel(int(registers), int(spilled), int(shared[name]))
        for name, (spilled, registers) in usage.items()
        if name in shared
    }


def judge_triton(compiled: Mapping[TritonCase, Mapping[str, Kernel] | str]) -> Iterator[Finding]:
    """Check each program."""
    for case, kernels in compiled.items():
        if isinstance(kernels, str) or not kernels:
            yield Finding(case.name, REQUIREMENT, str(kernels or "no kernels"), False)
            continue
        registers, spilled, shared = (max(numbers) for numbers in zip(*kernels.values(), strict=True))
        limit = GPUS[case.gpu].shared_of_block
        result = (
            f"{len(kernels)} kernels, at most {registers} registers, {spilled} bytes spilled,"
            f" {shared / KIB:.0f} of {limit // KIB} KiB"
        )
        expected = sum(NUM_KERNELS) + GPUS[case.gpu].multiplies_float8
        good = len(kernels) == expected and spilled <= MOST_SPILLED and shared <= limit
        yield Finding(case.name, REQUIREMENT, result, good)
