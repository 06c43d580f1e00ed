"""Verdicts on implementations: whether one has passed its check on this machine (`pallas_kernels.self_check`).

A check runs in its own process, so a kernel that hangs or crashes ends only the check. The verdict is kept in the
user's cache folder until the device, the driver, JAX or the kernels change.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax

from pallas_kernels.user_cache import cache_folder, write_whole

SECONDS: Final = 180
"""The time in seconds after which a check counts as hung."""


class Verdict(NamedTuple):
    """The result of a check."""

    passed: bool
    reason: str
    """The reason why the check failed, in one line; empty if it passed."""


@functools.cache
def is_trusted(implementation: str, device_kind: str) -> bool:
    """Return whether an implementation passes its check on this machine; run the check if no verdict is cached.

    The kernels of attention have a check of their own, with the name "attention".

    If it does not pass, or if this machine has no such device, this prints the reason once to standard error. A program
    that is compiled for devices of another machine must name its implementation.
    """
    if device_kind in {device.device_kind for device in jax.local_devices()}:
        verdict = read_verdict(implementation) or run_check(implementation)
    else:
        verdict = Verdict(False, f"it has no {device_kind}")
    if not verdict.passed:
        print(
            f"pallas_kernels: implementation {implementation!r} is not chosen because it has not passed its check on"
            f" this machine ({verdict.reason}); run python -m pallas_kernels.self_check to check it again",
            file=sys.stderr,
        )
    return verdict.passed


def run_check(implementation: str) -> Verdict:
    """Check an implementation in a separate process, and store the verdict in the user's cache folder."""
    command = [sys.executable, "-m", "pallas_kernels.self_check", "--here", implementation]
    # The calling process may hold most of the device's memory, so the check must not preallocate.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **_same_device()}
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, env=environment
        )
        lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        verdict = Verdict(process.returncode == 0, "" if process.returncode == 0 else lines[-1][:300])
    except subprocess.TimeoutExpired:
        verdict = Verdict(False, f"it hung for {SECONDS} s")
    verdicts = {**_read_all(), _key(implementation): verdict._asdict()}
    write_whole(verdicts_path(), json.dumps(verdicts, indent=1) + "\n")
    return verdict


def _same_device() -> dict[str, str]:
    """Return the environment variable that limits another process to the first device of this one.

    The other GPUs of the machine may be in use by somebody else.
    """
    device = jax.local_devices()[0]
    if device.platform != "gpu" or device.local_hardware_id is None:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = device.local_hardware_id
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


def read_verdict(implementation: str) -> Verdict | None:
    """Return the cached verdict for this device, driver, version of JAX and code; None if there is none."""
    entry = _read_all().get(_key(implementation))
    return Verdict(**entry) if entry else None


def verdicts_path() -> Path:
    """Return the path of the file of verdicts, in the user's cache folder."""
    return cache_folder() / "self_check.json"


def _read_all() -> dict[str, Any]:
    try:
        return json.loads(verdicts_path().read_text())
    # There is no file, or another program wrote it.
    except (OSError, ValueError):
        return {}


def _key(implementation: str) -> str:
    device, digest = jax.local_devices()[0], hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    platform = " ".join(device.client.platform_version.split())
    parts = implementation, device.device_kind, platform, f"jax {jax.__version__}", digest.hexdigest()[:12]
    return ", ".join(parts)
