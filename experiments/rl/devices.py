"""The devices of a run, and its compiler options."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Final

import jax

from experiments.rl.processes import process_count
from relibra_jax.execution import OVERLAP_OPTIONS

EXTRA_OPTIONS: Final = "xla_backend_extra_options"
FSDP: Final = "fsdp"
"""The mesh axis over which experts are sharded along the model width."""


def host_devices(count: int) -> list[jax.Device]:
    """Return the first ``count`` devices, in equal shares from all processes.

    On a CPU, this makes that many host devices, if JAX has not started yet. XLA:CPU runs the programs of all devices on
    one pool of threads, which has as many threads as there are cores or devices, whichever number is larger. With more
    devices than cores, a second program that waits in the pool can take the last thread that the first one needs, and
    both wait forever (jaxlib 0.11.2). With two threads for each device this does not happen, so ``NPROC`` is set to
    that number.

    Args:
        count: the number of devices over all processes.

    Returns:
        The devices, ordered by process.

    Raises:
        ValueError: if there are fewer devices, or ``count`` does not divide evenly over the processes.
    """
    processes = process_count()
    if count % processes:
        raise ValueError(f"{count} ranks do not divide evenly over {processes} processes")
    share = count // processes
    os.environ.setdefault("NPROC", str(max(2 * share, os.cpu_count() or 1)))
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # If the backend has started already, it keeps its devices.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", share)
    chosen = []
    for index in range(processes):
        devices = [device for device in jax.devices() if device.process_index == index]
        if len(devices) < share:
            by_process = (
                ""
                if processes == 1
                else f" ({share} in each process, and process {index} has {len(devices)})"
            )
            raise ValueError(
                f"{count} ranks need {count} devices{by_process}, but there are {len(jax.devices())}"
            )
        chosen += devices[:share]
    return chosen


def copies_of_group(data: int, fsdp: int) -> dict[str, int]:
    """Return the mesh axes of the copies of an expert-parallel group, for `relibra_jax.execution.mesh.expert_mesh`.

    >>> copies_of_group(2, 1), copies_of_group(2, 4)
    ({'data': 2}, {'data': 2, 'fsdp': 4})
    """
    return {name: size for name, size in (("data", data), (FSDP, fsdp)) if size > 1}


def compile_quickly() -> None:
    """Make XLA's CPU compiler use its older loop emitters, which build no MLIR pipeline for every fusion.

    The programs of a tiny policy then compile in a quarter less time and run as fast as before. Call this before JAX
    starts. It changes nothing on GPUs, and nothing if ``XLA_FLAGS`` sets these options already.
    """
    _add_flags({EXTRA_OPTIONS: "xla_cpu_disable_new_fusion_emitters"})


def overlap_exchanges() -> None:
    """Make XLA's GPU compiler overlap exchanges and computation (`relibra_jax.execution.OVERLAP_OPTIONS`).

    Call this before JAX starts. It changes nothing on CPUs, and no option that ``XLA_FLAGS`` sets already.
    """
    _add_flags(OVERLAP_OPTIONS)


def _add_flags(options: Mapping[str, Any]) -> None:
    """Add options to ``XLA_FLAGS`` that it does not have."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    for name, value in options.items():
        if not any(flag.partition("=")[0] == f"--{name}" for flag in flags):
            flags.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    os.environ["XLA_FLAGS"] = " ".join(flags)
