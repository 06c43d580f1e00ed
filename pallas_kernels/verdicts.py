"""Verdicts on implementations: whether one has passed its check on this machine (`pallas_kernels.self_check`).

A check runs in its own process, so a kernel that hangs or crashes ends only the check. The verdict is kept in the
user's cache folder until the device, the driver, JAX or the kernels change. Several processes trust what all of them
trust: `pallas_kernels.agreement`.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax

from pallas_kernels.user_cache import cache_folder, write_whole

SECONDS: Final = 180
"""The time in seconds after which a check counts as hung."""
END_SECONDS: Final = 10
"""The time in seconds for which a killed check is waited for. A process that waits for a driver may outlive SIGKILL."""
_AGREED: Final = dict[str, "Verdict"]()
"""The verdicts on which all processes of this program have agreed; none before they have."""


class Verdict(NamedTuple):
    """The result of a check."""

    passed: bool
    reason: str
    """The reason why the check failed, in one line; empty if it passed."""


@functools.cache
def is_trusted(implementation: str, device_kind: str) -> bool:
    """Return whether an implementation passes its check on this machine; run the check if no verdict is cached.

    The kernels of attention and of float8 products have checks of their own, "attention" and "float8". In a program of
    several processes, the answer is what they have agreed on, and False before they have.

    If it is False, or if this machine has no such device, this prints the reason once to standard error. A program that
    is compiled for devices of another machine must name its implementation.
    """
    if device_kind not in {device.device_kind for device in jax.local_devices()}:
        verdict = Verdict(False, f"this machine has no {device_kind}")
    elif jax.process_count() == 1:
        verdict = find_verdict(implementation)
    else:
        reason = "the processes have not agreed: all must call pallas_kernels.agree_on_kernels"
        verdict = _AGREED.get(implementation, Verdict(False, reason))
    if not verdict.passed:
        print(
            f"pallas_kernels: implementation {implementation!r} is not chosen because it has not passed its check"
            f" ({verdict.reason}); run python -m pallas_kernels.self_check to check it again",
            file=sys.stderr,
        )
    return verdict.passed


def trust_together(verdicts: Mapping[str, Verdict]) -> None:
    """From now on, trust what all processes of this program trust.

    Args:
        verdicts: the verdict of all processes on each implementation, equal in all of them except for the reasons.
    """
    _AGREED.update(verdicts)
    is_trusted.cache_clear()


def has_agreed() -> bool:
    """Return whether the processes of this program have agreed."""
    return bool(_AGREED)


def find_verdict(implementation: str) -> Verdict:
    """Return the cached verdict on an implementation, or check it. Of the processes of a user, one checks at a time.

    Without a cache folder that can be written, the implementation has not passed.
    """
    try:
        with _one_at_a_time():
            return read_verdict(implementation) or run_check(implementation)
    except OSError as error:
        return Verdict(False, f"it could not be checked: {error}")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock in the cache folder, or wait for the process that has it as long as its check may take."""
    path, deadline = verdicts_path().with_suffix(".lock"), time.monotonic() + SECONDS + END_SECONDS
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.2)
                continue
            except OSError:
                pass  # a file system without locks
            break
        yield


def run_check(implementation: str) -> Verdict:
    """Check an implementation in a separate process, and store the verdict in the user's cache folder."""
    command = [sys.executable, "-m", "pallas_kernels.self_check", "--here", implementation]
    # The calling process may hold most of the device's memory, so the check must not preallocate.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **_same_device()}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            verdict = Verdict(False, f"it hung for {SECONDS} s")
        else:
            errors.seek(0)
            lines = errors.read().strip().splitlines() or [f"exit status {status}"]
            verdict = Verdict(status == 0, "" if status == 0 else lines[-1][:300])
    keep_verdict(verdicts_path(), _key(implementation), verdict)
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
    return load_verdict(verdicts_path(), _key(implementation))


def verdicts_path() -> Path:
    """Return the path of the file of verdicts, in the user's cache folder."""
    return cache_folder() / "self_check.json"


def load_verdict(path: Path, key: str) -> Verdict | None:
    """Return the verdict with a key in a file of verdicts; None if there is none."""
    entry = _read_all(path).get(key)
    return Verdict(**entry) if entry else None


def keep_verdict(path: Path, key: str, verdict: Verdict) -> None:
    """Add a verdict to a file of verdicts, which may not exist."""
    write_whole(path, json.dumps({**_read_all(path), key: verdict._asdict()}, indent=1) + "\n")


def verdict_key(name: str, device: Any, code: Iterable[Path]) -> str:
    """Return the key of a verdict, which other devices, drivers, versions of JAX and code do not have.

    Args:
        name: what the verdict is about.
        device: one of the devices.
        code: the modules whose change makes the verdict void.
    """
    digest = hashlib.sha256()
    for path in code:
        digest.update(path.read_bytes())
    platform = " ".join(device.client.platform_version.split())
    return ", ".join((name, device.device_kind, platform, f"jax {jax.__version__}", digest.hexdigest()[:12]))


def _read_all(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    # There is no file, or another program wrote it.
    except (OSError, ValueError):
        return {}


def _key(implementation: str) -> str:
    return verdict_key(implementation, jax.local_devices()[0], sorted(Path(__file__).parent.rglob("*.py")))
