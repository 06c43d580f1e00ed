"""The first process of a miniature's namespaces: it builds the network, starts the ranks and waits for them."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from experiments.miniature.cluster import Miniature, host_name
from experiments.miniature.faults import Fault, cause
from experiments.miniature.quota import Groups

GRACE_SECONDS: Final = 120
"""The time that the other ranks have to end by themselves after one has ended with an error."""
_ENTER: Final = 'hostname "$1"; echo 0 > "$2"; shift 2; exec "$@"'
"""A shell program that takes a host name, enters a control group and runs a command."""


def build(miniature: Miniature) -> None:
    """Build the network in this process's own namespaces.

    Raises:
        ValueError: if a command fails, with its message.
    """
    hosts = Path("/run/hosts")
    _run("mount -t tmpfs tmpfs /run")
    hosts.write_text(miniature.hosts())
    _run(f"mount --bind {hosts} /etc/hosts")
    for command in miniature.network_commands():
        _run(command)


def start(miniature: Miniature, groups: Groups, command: Sequence[str], rank: int) -> subprocess.Popen:
    """Start the process of a rank in its namespaces and its control group."""
    name = host_name(rank)
    enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "sh", "-c", _ENTER, "sh", name]
    return subprocess.Popen(
        [*enter, str(groups.processes(rank)), *command],
        env=os.environ | miniature.environment(rank) | groups.environment(rank),
        stdout=subprocess.DEVNULL if rank else None,
    )


def wait(processes: Sequence[subprocess.Popen]) -> int:
    """Wait until all ranks have ended; return the first exit status that is not 0, or 0."""
    deadline = None
    while any(process.poll() is None for process in processes):
        failed = any(process.returncode for process in processes)
        deadline = deadline or (time.monotonic() + GRACE_SECONDS if failed else None)
        if deadline and time.monotonic() > deadline:
            hung = [host_name(rank) for rank, process in enumerate(processes) if process.poll() is None]
            print(
                f"error: {', '.join(hung)} did not end within {GRACE_SECONDS} s of another rank",
                file=sys.stderr,
            )
            return 1
        time.sleep(0.05)
    return next((process.returncode for process in processes if process.returncode), 0)


def main(settings: dict[str, Any]) -> int:
    """Build the miniature and run the command on every rank."""
    miniature = Miniature(**settings["miniature"])
    folder, *rest = settings["groups"]
    groups = Groups(Path(folder), *rest)
    try:
        build(miniature)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    processes = [start(miniature, groups, settings["command"], rank) for rank in range(miniature.size)]
    cause([Fault(*fault) for fault in settings["faults"]], miniature, processes)
    try:
        return wait(processes)
    except KeyboardInterrupt:
        wait(processes)
        return 130


def _run(command: str) -> None:
    result = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"`{command}` failed: {result.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
