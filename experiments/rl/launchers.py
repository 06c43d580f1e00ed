"""What launchers tell a process: how many there are, which one it is, and where the first one is found.

JAX reads the variables of Slurm and Open MPI, asks Kubernetes, and takes the first launcher that it finds. Here what
they say is compared before anything connects: processes that count differently would wait for each other. By hand, or
where a launcher is none of these, ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` say it; JAX
itself reads only the first of them.
"""

import importlib.util
from collections.abc import Mapping
from typing import Final, NamedTuple

COORDINATOR: Final = "JAX_COORDINATOR_ADDRESS"
BY_HAND: Final = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
OF_SLURM: Final = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""JAX looks for all of them: a shell inside an allocation, which is no step of it, has only some."""
OF_OPEN_MPI: Final = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
OF_KUBERNETES: Final = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
COUNTS: Final = ("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
INDICES: Final = ("JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")


class Launch(NamedTuple):
    """What is known of the processes; JAX finds out what is None."""

    coordinator: str | None
    """Host and port of the first process."""
    num_processes: int | None
    """The number of processes."""
    process_id: int | None
    """Which of them this one is."""
    detect: bool
    """Whether a launcher that JAX knows has started them: it also says which devices are whose."""


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """What the variables of a process say; None if it runs alone.

    Args:
        environment: the variables, ``os.environ``.

    Raises:
        ValueError: if a variable is no number, an index is not below its count, launchers contradict each other, or
            what was said by hand is incomplete; with the variables and their numbers.

    >>> find_launch({}), find_launch({"JAX_NUM_PROCESSES": "1"})
    (None, None)
    >>> find_launch({"JAX_COORDINATOR_ADDRESS": "node1:9000", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"})
    Launch(coordinator='node1:9000', num_processes=2, process_id=1, detect=False)
    """
    found = _numbers_in_force(environment)
    count, index, coordinator = _agreed(found, COUNTS), _agreed(found, INDICES), environment.get(COORDINATOR)
    if count is not None and index is not None and index >= count:
        raise ValueError(
            f"{_shown(found)}: processes are counted from 0, so the last of {count} is {count - 1}"
        )
    if count == 1 or not (found or coordinator):
        return None
    detect = bool({"SLURM_PROCID", "OMPI_COMM_WORLD_RANK"} & found.keys()) or (
        "JOB_COMPLETION_INDEX" in found and _kubernetes_can_be_asked()
    )
    said = {COORDINATOR: coordinator, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": index}
    missing = [name for name, value in said.items() if value is None]
    if missing and not detect:
        given = _shown({name: value for name, value in said.items() if value is not None})
        raise ValueError(f"{given} without {' and '.join(missing)}: without a launcher all three are needed")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
        raise ValueError(f"{COORDINATOR}={coordinator} must be HOST:PORT, of the first process")
    return Launch(coordinator, count, index, detect)


def _numbers_in_force(environment: Mapping[str, str]) -> dict[str, int]:
    """The counts and indices that were said by hand, and of each launcher that has started this process."""
    names = [*BY_HAND]
    for launcher in (OF_OPEN_MPI, OF_SLURM):
        if all(name in environment for name in launcher):
            names += launcher
    # A pod of a job whose pods have nothing to do with each other has an index too.
    wanted = COORDINATOR in environment or _kubernetes_can_be_asked()
    if wanted and all(name in environment for name in OF_KUBERNETES):
        names += OF_KUBERNETES
    found = {}
    for name in (*COUNTS, *INDICES):
        of_step = name == "SLURM_STEP_NUM_TASKS" and "SLURM_NTASKS" in names
        if (name in names or of_step) and name in environment:
            text, least = environment[name], int(name in COUNTS)
            if not text.isdecimal() or int(text) < least:
                raise ValueError(f"{name}={text!r} must be a whole number of at least {least}")
            found[name] = int(text)
    return found


def _kubernetes_can_be_asked() -> bool:
    """Whether JAX can ask Kubernetes how many processes there are."""
    return importlib.util.find_spec("kubernetes") is not None


def _agreed(found: dict[str, int], names: tuple[str, ...]) -> int | None:
    """The one number that variables of one meaning hold, None if there is none of them."""
    said = {name: found[name] for name in names if name in found}
    if len(set(said.values())) > 1:
        raise ValueError(
            f"{_shown(said)} contradict each other; start Python without those of the launcher that did not start it"
            f" (env -u {list(said)[-1]} python ...)"
        )
    return next(iter(said.values()), None)


def _shown(numbers: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={number}" for name, number in numbers.items())
