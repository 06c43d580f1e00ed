"""Whether kernels are right on this machine: found out once, in a process of its own, and remembered.

    python -m pallas_kernels.self_check

No implementation is chosen by itself before it has passed here: a kernel that nobody has seen run on this GPU, with
this driver and this version of JAX, must not compute anybody's numbers. The check compares the grouped MLP and all its
gradients with blocked XLA, over uneven and empty groups with NaN in padding, in small and in large tiles, and its bits
from run to run. It takes seconds; in a process of its own, a kernel that hangs or crashes ends the check and nothing
else. What was found is kept in the user's cache folder until the device, the driver, JAX or the kernels change.

On several hosts, run the command on each of them before the first launch: processes of one program have to choose
alike.
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
"""The time after which a check has hung."""
SIZES: Final = ((640, 256), (4096, 1024))
"""Rows and width: for small tiles, and for large ones."""
REPEATS: Final = 20
"""How often each result is computed again."""


class Verdict(NamedTuple):
    """What a check has found."""

    passed: bool
    reason: str
    """Why it has not passed, in one line; empty if it has."""


@functools.cache
def is_trusted(implementation: str, device_kind: str) -> bool:
    """Whether an implementation has passed on this machine; checks it now if that is not known.

    Says once, on standard error, if it has not, or if there is no such device here: programs that are compiled for
    devices elsewhere name their implementation.
    """
    if device_kind in {device.device_kind for device in jax.local_devices()}:
        verdict = read_verdict(implementation) or run_check(implementation)
    else:
        verdict = Verdict(False, f"no {device_kind} is here")
    if not verdict.passed:
        print(
            f"pallas_kernels: implementation {implementation!r} is not chosen, it has not passed its check on this"
            f" machine ({verdict.reason}); python -m pallas_kernels.self_check checks it again",
            file=sys.stderr,
        )
    return verdict.passed


def run_check(implementation: str) -> Verdict:
    """Check an implementation in a process of its own, and keep what was found."""
    command = [sys.executable, "-m", "pallas_kernels.self_check", "--here", implementation]
    # The process that asks may hold most of the device's memory, and does not give it away.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **_same_device()}
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, env=environment
        )
        lines = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
        verdict = Verdict(ran.returncode == 0, "" if ran.returncode == 0 else lines[-1][:300])
    except subprocess.TimeoutExpired:
        verdict = Verdict(False, f"it hung for {SECONDS} s")
    verdicts = {**_read_all(), _key(implementation): verdict._asdict()}
    write_whole(verdicts_path(), json.dumps(verdicts, indent=1) + "\n")
    return verdict


def _same_device() -> dict[str, str]:
    """The variable by which another process sees this process's first device alone: others may be others' GPUs."""
    device = jax.local_devices()[0]
    if device.platform != "gpu" or device.local_hardware_id is None:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = device.local_hardware_id
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


def read_verdict(implementation: str) -> Verdict | None:
    """What an earlier check has found for this device, driver, version of JAX and code; None if there was none."""
    found = _read_all().get(_key(implementation))
    return Verdict(**found) if found else None


def verdicts_path() -> Path:
    """The file of verdicts, in the user's cache folder."""
    return cache_folder() / "self_check.json"


def _read_all() -> dict[str, Any]:
    try:
        return json.loads(verdicts_path().read_text())
    # None was written, or not by us.
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
        ValueError: if a result is wrong, or is not the same in every run.
    """
    slots = 4, 2
    pattern = np.array([3, 0, 1, 2, 0, 1])
    for rows, width in SIZES:
        keys = jax.random.split(jax.random.key(0), 3)
        sizes = (pattern * ((rows - 5) / pattern.sum())).astype(np.int32)
        weights = jax.random.normal(keys[0], (sum(slots), 3, width, width), jnp.bfloat16) * width**-0.5
        beyond = np.arange(rows)[:, None] >= sizes.sum()
        x, d_out = (
            jnp.where(beyond, jnp.nan, jax.random.normal(key, (rows, width), jnp.bfloat16))
            for key in keys[1:]
        )
        buffers = weights[: slots[0]], weights[slots[0] :]
        operands = x, buffers, jnp.asarray(sizes), jnp.linspace(0.5, 2, rows), d_out
        ours, theirs = (
            jax.jit(functools.partial(mlp_with_gradients, name)) for name in (implementation, "xla")
        )
        first = ours(*operands)
        check_close(f"{rows} rows of {width}", first, theirs(*operands))
        for _ in range(REPEATS):
            if not same_bits(first, ours(*operands)):
                raise ValueError(f"{rows} rows of {width}: two runs are not the same bit for bit")


def mlp_with_gradients(
    implementation: str,
    x: jax.Array,
    weights: Sequence[jax.Array],
    sizes: jax.Array,
    scale: jax.Array,
    d_out: jax.Array,
) -> dict[str, Any]:
    """Return the grouped MLP and all its gradients, by name."""
    # Imported late: the calls of this package ask this module which implementation to choose.
    from pallas_kernels import grouped_mlp

    def call(x, weights, scale):
        return grouped_mlp(x, weights, sizes, scale, implementation=implementation)

    out, pull = jax.vjp(call, x, weights, scale)
    d_x, d_weights, d_scale = pull(d_out)
    return {"out": out, "d_x": d_x, "d_weights": d_weights, "d_scale": d_scale}


def reasons_not_to_check() -> dict[str, str | None]:
    """The implementations that are checked, each with the reason why it cannot run on this machine's device."""
    from pallas_kernels.implementation import why_not_ampere, why_not_hopper

    device = jax.local_devices()[0]
    return {"mosaic": why_not_hopper(device.device_kind), "triton": why_not_ampere(device)}


def main(arguments: list[str] | None = None) -> int:
    """Check the implementations that can run here anew; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.self_check", description=__doc__)
    parser.add_argument(
        "--here", metavar="IMPLEMENTATION", help="check one in this process, and keep nothing"
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
