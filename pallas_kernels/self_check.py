"""A check that the kernels compute correct results on this machine, run once and cached.

    python -m pallas_kernels.self_check

``implementation=None`` never chooses a kernel that has not passed this check: results must not come from a kernel that
was never verified on this GPU, with this driver and this version of JAX. The check compares the grouped MLP and all its
gradients with blocked XLA, for uneven and empty groups, NaN in the padding, and small and large tiles. It also checks
that repeated runs give the same bits. It takes seconds and runs in its own process, so a kernel that hangs or crashes
ends only the check. The verdict is kept in the user's cache folder until the device, the driver, JAX or the kernels
change.

On several hosts, run the command on each of them before the first launch, because all processes of a program must
choose the same implementation.
"""

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.compare import check_close, same_bits
from pallas_kernels.user_cache import cache_folder, write_whole

SECONDS: Final = 180
"""The time in seconds after which a check counts as hung."""
SIZES: Final = ((640, 256), (4096, 1024))
"""The pairs of number of rows and width that are checked; the first gives small tiles, the second large ones."""
REPEATS: Final = 20
"""The number of times that each result is computed again and compared bit for bit."""


class Verdict(NamedTuple):
    """The result of a check."""

    passed: bool
    reason: str
    """The reason why the check failed, in one line; empty if it passed."""


@functools.cache
def is_trusted(implementation: str, device_kind: str) -> bool:
    """Return whether an implementation passes its check on this machine; run the check if no verdict is cached.

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


def check_here(implementation: str) -> None:
    """Check an implementation in this process.

    Raises:
        ValueError: if a result is wrong, or if two runs differ in any bit.
    """
    slots = 4, 2
    pattern = np.array([3, 0, 1, 2, 0, 1])
    for rows, width in SIZES:
        keys = jax.random.split(jax.random.key(0), 3)
        sizes = (pattern * ((rows - 5) / pattern.sum())).astype(np.int32)
        weights = jax.random.normal(keys[0], (sum(slots), 3, width, width), jnp.bfloat16) * width**-0.5
        padding = np.arange(rows)[:, None] >= sizes.sum()
        x, d_out = (
            jnp.where(padding, jnp.nan, jax.random.normal(key, (rows, width), jnp.bfloat16))
            for key in keys[1:]
        )
        buffers = weights[: slots[0]], weights[slots[0] :]
        operands = x, buffers, jnp.asarray(sizes), jnp.linspace(0.5, 2, rows), d_out
        run_kernels, run_xla = (
            jax.jit(functools.partial(mlp_with_gradients, name)) for name in (implementation, "xla")
        )
        result = run_kernels(*operands)
        check_close(f"{rows} rows of {width}", result, run_xla(*operands))
        for _ in range(REPEATS):
            if not same_bits(result, run_kernels(*operands)):
                raise ValueError(f"{rows} rows of {width}: two runs gave different bits")


def mlp_with_gradients(
    implementation: str,
    x: jax.Array,
    weights: Sequence[jax.Array],
    sizes: jax.Array,
    scale: jax.Array,
    d_out: jax.Array,
) -> dict[str, Any]:
    """Return the output of the grouped MLP and all its gradients, by name."""
    # A module-level import would be circular: grouped_mlp imports this module to choose its implementation.
    from pallas_kernels import grouped_mlp

    def call(x, weights, scale):
        return grouped_mlp(x, weights, sizes, scale, implementation=implementation)

    out, pull = jax.vjp(call, x, weights, scale)
    d_x, d_weights, d_scale = pull(d_out)
    return {"out": out, "d_x": d_x, "d_weights": d_weights, "d_scale": d_scale}


def reasons_not_to_check() -> dict[str, str | None]:
    """Return the implementations to check, each with the reason why it cannot run on this machine, or None."""
    from pallas_kernels.implementation import why_not_ampere, why_not_hopper

    device = jax.local_devices()[0]
    return {"mosaic": why_not_hopper(device.device_kind), "triton": why_not_ampere(device)}


def main(arguments: list[str] | None = None) -> int:
    """Check again all implementations that can run on this machine; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.self_check", description=__doc__)
    parser.add_argument(
        "--here",
        metavar="IMPLEMENTATION",
        help="check one implementation in this process, without storing the verdict",
    )
    chosen = parser.parse_args(arguments).here
    if chosen:
        check_here(chosen)
        return 0
    failed = False
    for implementation, reason in reasons_not_to_check().items():
        if reason:
            print(f"{implementation}: not checked, {reason}")
        else:
            verdict = run_check(implementation)
            failed |= not verdict.passed
            print(f"{implementation}: {'passed' if verdict.passed else 'failed, ' + verdict.reason}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
