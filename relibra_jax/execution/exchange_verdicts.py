"""Verdicts of `relibra_jax.execution.exchange_check`: whether a ragged exchange is right and faster on this machine.

They are kept in the user's cache folder until the GPUs, the driver, JAX, NCCL or the code of exchanges change.
"""

import functools
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import jax
from jax.sharding import Mesh

from pallas_kernels.user_cache import cache_folder
from pallas_kernels.verdicts import Verdict, keep_verdict, load_verdict, verdict_key
from relibra_jax.execution.mesh import LOCAL, NODE
from relibra_jax.execution.plan_agreement import processes_where

CODE: Final = (
    "execution/dispatch.py",
    "execution/exchange.py",
    "execution/gather.py",
    "execution/hop.py",
    "execution/pipeline.py",
    "routing/segments.py",
    "routing/slots.py",
)
"""The modules of `relibra_jax` whose change makes verdicts void."""
BEGAN: Final = Verdict(False, "its check did not end")
"""The verdict from the beginning of a check to its end, which stays if the check hangs or crashes."""


@functools.cache
def is_proven(mesh: Mesh) -> bool:
    """Return whether a ragged exchange has been measured as right and faster on the devices of a mesh.

    All processes have the same answer: True only if all have such a verdict. So every process must call this function,
    and not while it traces. If it is False, process 0 prints the reason once to standard error. The first answer for a
    mesh holds as long as the program runs, because tables and compiled programs follow it.

    Args:
        mesh: a mesh of GPUs with the axes node and local. If some processes have none of its devices, and so do not
            call this function, the answer is False.
    """
    here = set(mesh.devices.flat) <= set(jax.devices())
    if not here:  # the devices are descriptions, for which a program is compiled
        return False
    if len({device.process_index for device in mesh.devices.flat}) < jax.process_count():
        return False
    verdict = read_verdict(mesh) or Verdict(False, "it was never checked on this machine")
    missing = processes_where(not verdict.passed)
    if missing.size and not jax.process_index():
        where = f" on processes {missing.tolist()}" if jax.process_count() > 1 else ""
        print(
            f"relibra_jax: exchange 'ragged' is not chosen{where}:"
            f" {verdict.reason or 'it has not passed there'}; see python -m relibra_jax.execution.exchange_check",
            file=sys.stderr,
        )
    return not missing.size


def read_verdict(mesh: Mesh) -> Verdict | None:
    """Return this process's verdict on the devices of a mesh; None if there is none."""
    return load_verdict(_path(), _key(mesh))


def write_verdict(mesh: Mesh, verdict: Verdict) -> None:
    """Keep a verdict. Every process writes the same one, because hosts may have folders of their own."""
    keep_verdict(_path(), _key(mesh), verdict)


def _path() -> Path:
    return cache_folder() / "exchange_check.json"


def _key(mesh: Mesh) -> str:
    # Copies of a group along other axes exchange nothing with each other.
    group = mesh.devices.reshape(-1, mesh.shape[NODE] * mesh.shape[LOCAL])[0]
    processes = len({each.process_index for each in group})
    name = f"{mesh.shape[NODE]} x {mesh.shape[LOCAL]} ranks in {processes} processes, {_nccl()}"
    package = Path(__file__).parents[1]
    return verdict_key(name, mesh.devices.flat[0], [package / module for module in CODE])


def _nccl() -> str:
    """Return the installed packages of NCCL with their versions."""
    found = (each for each in distributions() if each.name.startswith("nvidia-nccl"))
    return " ".join(sorted(f"{each.name} {each.version}" for each in found)) or "no package of NCCL"
