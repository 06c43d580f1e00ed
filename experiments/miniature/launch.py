"""Run a command on every rank of a miniature, and leave nothing behind.

    this process -> unshare: namespaces of processes, mounts and networks -> `inside`, their first process -> the ranks

When the first process of a process namespace ends, the kernel kills all others, and with them end the network
namespaces, their interfaces and mounts. The kernel also kills the first process when this one ends, however it does.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from experiments.miniature.cluster import Miniature
from experiments.miniature.faults import Fault
from experiments.miniature.quota import cpu_groups

PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "util-linux",
    "hostname": "hostname",
    "sysctl": "procps",
}
"""The programs that build a miniature, and the packages that have them."""


def run_on_ranks(miniature: Miniature, command: Sequence[str], *, faults: Sequence[Fault] = ()) -> int:
    """Build a miniature, run a command on every rank, and remove the miniature.

    Every rank's process has the variables with which `jax.distributed.initialize` finds the others. Rank 0 prints; the
    others print only errors.

    Args:
        miniature: the sizes.
        command: the command and its arguments.
        faults: the faults to cause meanwhile.

    Returns:
        The exit status: 0 if all ranks ended with 0.

    Raises:
        ValueError: if a fault is of a rank that is not there, or something is missing: a program, a right, or a
            feature of the kernel.
    """
    for fault in faults:
        fault.check(miniature)
    namespaces = _namespaces()
    with cpu_groups(miniature) as groups:
        settings = {
            "miniature": dataclasses.asdict(miniature),
            "groups": [str(part) for part in groups],
            "faults": list(faults),
            "command": list(command),
        }
        inside = [sys.executable, "-m", "experiments.miniature.inside", json.dumps(settings)]
        process = subprocess.Popen([*namespaces, *inside], stdin=subprocess.DEVNULL)
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal has interrupted the ranks as well, which now say where they stopped.
            process.wait()
            raise
        finally:
            process.kill()
            process.wait()


def why_not() -> str | None:
    """Return in one line why no miniature can be built here, or None if it can."""
    try:
        _namespaces()
        with cpu_groups(Miniature(nodes=1, ranks=1, core=0.5)):
            return None
    except ValueError as error:
        return str(error)


def _namespaces() -> list[str]:
    """Return the command that runs another one in new namespaces, after checking that it works."""
    for program, package in PROGRAMS.items():
        if not shutil.which(program):
            raise ValueError(f"the program {program!r} of {package} is missing, which builds the network")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *user, "--mount", "--net", "--pid", "--fork"]
    command += ["--kill-child", "--mount-proc"]
    tried = subprocess.run(
        [*command, "sh", "-c", "ip link add end0 type veth peer name end1 && tc qdisc add dev end0 root htb"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        raise ValueError(
            f"no network can be built ({tried.stderr.strip().splitlines()[-1]}): it takes root, or user namespaces,"
            " and a kernel with veth, bridges and HTB"
        )
    return command
