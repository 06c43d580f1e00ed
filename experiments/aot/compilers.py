"""Compile the Hopper kernels with another assembler and with the newest JAX, if these are installed.

``make aot-compilers`` installs them beside the environment of ``make aot``, which has the assembler, ptxas, of CUDA
13.5 and the oldest JAX that is supported. A process of its own compiles the kernels of one model with each.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

MODEL: Final = "Qwen3-30B-A3B"
"""The model whose kernels are compiled. Its cases have tiles of 64 and of 128 rows, and clusters."""


class Compiler(NamedTuple):
    """An installed compiler that differs from the one of ``make aot``."""

    folder: Path
    """The folder that ``make aot-compilers`` makes."""
    python: Path
    """The Python that compiles the kernels."""
    environment: Mapping[str, str]
    """The environment variables of the process that differ."""

    @property
    def why_not(self) -> str | None:
        """The reason why it cannot be used; None if it can."""
        ready = (self.folder / "installed").exists()
        return None if ready else f"{self.folder} is not installed: run make aot-compilers"


_PTXAS: Final = Path(".venv-aot-ptxas")
_NEWEST: Final = Path(".venv-aot-newest")
COMPILERS: Final = {
    # Mosaic assembles with the ptxas below CUDA_ROOT.
    "ptxas of CUDA 13.0": Compiler(
        _PTXAS, Path(sys.executable), {"CUDA_ROOT": str(Path.cwd() / _PTXAS / "nvidia" / "cu13")}
    ),
    "newest JAX": Compiler(_NEWEST, _NEWEST / "bin" / "python", {}),
}
"""The other compilers, by name."""


def check_compiler(name: str) -> None:
    """Compile and check the kernels with one of `COMPILERS`.

    Raises:
        subprocess.CalledProcessError: if a check fails, or the kernels cannot be compiled.
    """
    compiler = COMPILERS[name]
    command = [str(compiler.python), "-m", "experiments.aot.kernels", MODEL]
    subprocess.run(command, env={**os.environ, **compiler.environment}, check=True)
