"""The share of a core that a process may use: Linux control groups, version 1 or 2, one for each rank.

A rank starts with its share, and may lift it while it compiles. The groups are the only thing of a miniature that does
not end with its processes, so a small process that outlives them removes the groups.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from experiments.miniature.cluster import Miniature, host_name

MOUNT: Final = Path("/sys/fs/cgroup")
PERIOD: Final = 10_000
"""The period in which a group may use its share, in microseconds. A rank that has used it up waits for the next one."""
QUOTA_FILE, UNLIMITED = "RELIBRA_QUOTA_FILE", "RELIBRA_NO_QUOTA"
"""The variables that tell a rank the file of its quota, and the text that lifts it."""
_REMOVE: Final = """cat
for _ in $(seq 100); do rmdir "$0"/rank* "$0" 2>/dev/null; test -d "$0" || exit 0; sleep 0.1; done"""
"""Wait for the end of the input, then remove the groups, as soon as the kernel has ended the last process in them."""


class Groups(NamedTuple):
    """The control groups of a miniature."""

    folder: Path
    """The folder of the group that contains one group for each rank."""
    file: str
    """The name of the file that has the quota of a group."""
    limited: str
    """The text of the file that sets the quota."""
    unlimited: str
    """The text of the file that lifts it."""

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables by which a rank's process finds its quota."""
        path = self.folder / host_name(rank) / self.file
        return {QUOTA_FILE: str(path), UNLIMITED: self.unlimited}

    def processes(self, rank: int) -> Path:
        """Return the file to which a process writes 0 to enter the group of a rank."""
        return self.folder / host_name(rank) / "cgroup.procs"


@contextlib.contextmanager
def cpu_groups(miniature: Miniature) -> Iterator[Groups]:
    """Make the control groups of all ranks, and remove them however this process ends.

    Raises:
        ValueError: if this user may not make control groups that limit the CPU, or the system has none.
    """
    groups = _find_groups(miniature.core)
    try:
        _make(groups, miniature.size)
    except OSError as error:
        _remove(groups)
        raise ValueError(
            f"the CPU of the ranks cannot be limited ({error}): run as root, or in a control group whose cpu"
            " controller is delegated to this user"
        ) from error
    # A session of its own, so that Ctrl-C does not reach it. Its input ends when this process does.
    remover = subprocess.Popen(
        ["sh", "-c", _REMOVE, str(groups.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield groups
    finally:
        assert remover.stdin is not None
        remover.stdin.close()
        remover.wait()


def _find_groups(core: float) -> Groups:
    quota, name = round(core * PERIOD), f"relibra-{os.getpid()}"
    own = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for controllers, path in own.items():
        if "cpu" in controllers.split(","):
            parent = MOUNT / controllers / path.lstrip("/")
            return Groups(parent / name, "cpu.cfs_quota_us", str(quota), "-1")
    if "" not in own or not (MOUNT / "cgroup.controllers").exists():
        raise ValueError(f"the CPU of the ranks cannot be limited: {MOUNT} has no control groups for the CPU")
    parent = MOUNT / own[""].lstrip("/")
    return Groups(parent / name, "cpu.max", f"{quota} {PERIOD}", f"max {PERIOD}")


def _make(groups: Groups, size: int) -> None:
    second_version = groups.file == "cpu.max"
    if second_version and "cpu" not in (groups.folder.parent / "cgroup.subtree_control").read_text().split():
        (groups.folder.parent / "cgroup.subtree_control").write_text("+cpu")
    groups.folder.mkdir()
    if second_version:
        (groups.folder / "cgroup.subtree_control").write_text("+cpu")
    for rank in range(size):
        folder = groups.folder / host_name(rank)
        folder.mkdir()
        if not second_version:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD))
        (folder / groups.file).write_text(groups.limited)


def _remove(groups: Groups) -> None:
    for folder in (*groups.folder.glob("rank*"), groups.folder):
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def whole_core() -> Iterator[None]:
    """Lift the quota of this rank's process in a block, for example to compile. Outside a miniature it does nothing."""
    if QUOTA_FILE not in os.environ:
        yield
        return
    path = Path(os.environ[QUOTA_FILE])
    before = path.read_text()
    path.write_text(os.environ[UNLIMITED])
    try:
        yield
    finally:
        path.write_text(before)
