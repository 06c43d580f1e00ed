"""The devices of a run."""

import contextlib
import os

import jax


def host_devices(count: int) -> list[jax.Device]:
    """The first ``count`` devices; on a CPU so many host devices are made, if JAX has not started yet.

    Raises:
        ValueError: if there are fewer.
    """
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # A backend that has started keeps its devices.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) < count:
        raise ValueError(f"{count} ranks need as many devices, there are {len(jax.devices())}")
    return jax.devices()[:count]
