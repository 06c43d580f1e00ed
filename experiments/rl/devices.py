"""The devices of a run, and how programs are compiled for them."""

import contextlib
import os
from typing import Final

import jax

from experiments.rl.processes import process_count

EXTRA_OPTIONS: Final = "xla_backend_extra_options"


def host_devices(count: int) -> list[jax.Device]:
    """The first ``count`` devices, of several processes each its share; on a CPU so many host devices are made, if JAX
    has not started yet.

    XLA:CPU runs every device's program on a thread of one pool, which is as large as there are cores or devices,
    whichever are more. Where devices are more than cores, a second program that waits in the pool for the first may
    keep it from its last thread, and both wait forever (jaxlib 0.11.2). With two threads a device this does not happen;
    ``NPROC`` says how many.

    Raises:
        ValueError: if there are fewer, or the processes have no equal shares.
    """
    processes = process_count()
    if count % processes:
        raise ValueError(f"{count} ranks do not divide evenly over {processes} processes")
    share = count // processes
    os.environ.setdefault("NPROC", str(max(2 * share, os.cpu_count() or 1)))
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # A backend that has started keeps its devices.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", share)
    chosen = []
    for index in range(processes):
        devices = [device for device in jax.devices() if device.process_index == index]
        if len(devices) < share:
            of_process = (
                "" if processes == 1 else f" ({share} of each process), process {index}: {len(devices)}"
            )
            raise ValueError(
                f"{count} ranks need as many devices{of_process}, there are {len(jax.devices())}"
            )
        chosen += devices[:share]
    return chosen


def compile_quickly() -> None:
    """Let XLA's CPU compiler emit loops by its former method, which builds no MLIR pipeline for every fusion.

    The programs of a tiny policy then take a quarter less to compile and the same time to run. It works until JAX has
    started, changes nothing on GPUs, and leaves alone what the caller has set in ``XLA_FLAGS``.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if EXTRA_OPTIONS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{EXTRA_OPTIONS}=xla_cpu_disable_new_fusion_emitters".strip()
