"""Agreement of all processes on the kernels that ``implementation=None`` chooses.

If one process runs a kernel and another one blocked XLA, their programs differ, and each waits forever for an exchange
that the other never starts. So in a program of several processes a kernel is chosen only if it has passed its check
(`pallas_kernels.self_check`) in all of them.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils

from pallas_kernels.flash_attention.api import CHECK as ATTENTION_CHECK
from pallas_kernels.grouped_dot_float8.api import CHECK as FLOAT8_CHECK
from pallas_kernels.implementation import why_not_ada, why_not_ampere, why_not_hopper
from pallas_kernels.verdicts import Verdict, find_verdict, has_agreed, trust_together

PLATFORM: Final = "gpu"
"""The platform of the devices that run kernels."""


def agree_on_kernels(devices: Sequence[Any] | None = None) -> None:
    """Check the kernels in every process, and from then on choose those that passed in all processes.

    Every process must call this function with the same devices. The first call may take minutes if no check is cached,
    later ones do nothing. `relibra_jax.execution.ExpertParallel` calls it with the devices of its mesh. Until then,
    processes choose no kernels.

    Args:
        devices: the devices for which programs are compiled. Nothing is done unless they are GPUs of this program, and
            all of its processes have some. None stands for all devices.
    """
    devices = jax.devices() if devices is None else devices
    processes = {device.process_index for device in devices}
    if jax.process_count() == 1 or has_agreed() or devices[0].platform != PLATFORM:
        return
    if processes != set(range(jax.process_count())) or devices[0] not in jax.devices():
        return
    own = {
        name: Verdict(False, reason) if reason else _own_verdict(name)
        for name, reason in reasons_not_to_check().items()
    }
    passed = multihost_utils.process_allgather(np.array([verdict.passed for verdict in own.values()]))
    agreed = {}
    for (name, verdict), column in zip(own.items(), passed.T, strict=True):
        failed = np.flatnonzero(~column).tolist()
        here = f": {verdict.reason}" if verdict.reason else ""
        agreed[name] = Verdict(not failed, f"processes {failed} of {len(column)}{here}" if failed else "")
    trust_together(agreed)


def _own_verdict(name: str) -> Verdict:
    """Return this process's verdict. Whatever fails here fails the check, since the other processes wait for it."""
    try:
        return find_verdict(name)
    except Exception as error:
        return Verdict(False, f"{type(error).__name__}: {error}".splitlines()[0])


def reasons_not_to_check() -> dict[str, str | None]:
    """Return the implementations to check, each with the reason why it cannot run on this machine, or None."""
    device = jax.local_devices()[0]
    ampere = why_not_ampere(device)
    return {
        "mosaic": why_not_hopper(device.device_kind),
        "triton": ampere,
        ATTENTION_CHECK: ampere,
        FLOAT8_CHECK: why_not_ada(device),
    }
