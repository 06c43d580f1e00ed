"""The environment variables of launchers: the number of processes, the index of this one, and the coordinator.

JAX reads the variables of Slurm and Open MPI, asks Kubernetes, and uses the first launcher that it finds. This module
compares what they say before anything connects, because processes that disagree on their number would wait for each
other. To start processes by hand, or under another launcher, set ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
``JAX_PROCESS_ID``. JAX itself reads only the first of the three.
"""

import importlib.util
from collections.abc import Mapping
from typing import Final, NamedTuple

COORDINATOR: Final = "JAX_COORDINATOR_ADDRESS"
BY_HAND: Final = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM: Final = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""The variables by which JAX recognises Slurm. A shell in an allocation that is not a step of it has only some."""
OPEN_MPI: Final = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
KUBERNETES: Final = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
COUNT_VARIABLES: Final = ("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
INDEX_VARIABLES: Final = ("JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")


class Launch(NamedTuple):
    """The arguments of `jax.distributed.initialize`. JAX finds out the values that are None."""

    coordinator: str | None
    """The host and port of the first process."""
    num_processes: int | None
    """The number of processes."""
    process_id: int | None
    """The index of this process."""
    detect: bool
    """Whether a launcher that JAX knows has started the processes. It then also tells JAX which devices are whose."""


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """Read how a process was launched from its environment variables.

    Args:
        environment: the environment variables, ``os.environ``.

    Returns:
        The launch, or None for a process that runs alone.

    Raises:
        ValueError: if a variable is not a number, an index is not below the number of processes, launchers contradict
            each other, or the variables set by hand are incomplete. The message names the variables and their values.

    >>> find_launch({}), find_launch({"JAX_NUM_PROCESSES": "1"})
    (None, None)
    >>> find_launch({"JAX_COORDINATOR_ADDRESS": "node1:9000", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"})
    Launch(coordinator='node1:9000', num_processes=2, process_id=1, detect=False)
    """
    numbers = _read_numbers(environment)
    count, index = _agreed_number(numbers, COUNT_VARIABLES), _agreed_number(numbers, INDEX_VARIABLES)
    coordinator = environment.get(COORDINATOR)
    if count is not None and index is not None and index >= count:
        raise ValueError(
            f"{_format(numbers)}: processes are counted from 0, so the last of {count} is {count - 1}"
        )
    if count == 1 or not (numbers or coordinator):
        return None
    detect = bool({"SLURM_PROCID", "OMPI_COMM_WORLD_RANK"} & numbers.keys()) or (
        "JOB_COMPLETION_INDEX" in numbers and _has_kubernetes_client()
    )
    settings = {COORDINATOR: coordinator, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": index}
    missing = [name for name, value in settings.items() if value is None]
    if missing and not detect:
        present = _format({name: value for name, value in settings.items() if value is not None})
        raise ValueError(f"{present} without {' and '.join(missing)}: without a launcher, set all three")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
        raise ValueError(f"{COORDINATOR}={coordinator} must be HOST:PORT of the first process")
    return Launch(coordinator, count, index, detect)


def _read_numbers(environment: Mapping[str, str]) -> dict[str, int]:
    """Read the counts and indices that are set by hand, and those of every launcher that started this process."""
    names = [*BY_HAND]
    for launcher in (OPEN_MPI, SLURM):
        if all(name in environment for name in launcher):
            names += launcher
    # The pods of an indexed job have an index even if they are independent of each other.
    distributed = COORDINATOR in environment or _has_kubernetes_client()
    if distributed and all(name in environment for name in KUBERNETES):
        names += KUBERNETES
    numbers = {}
    for name in (*COUNT_VARIABLES, *INDEX_VARIABLES):
        of_step = name == "SLURM_STEP_NUM_TASKS" and "SLURM_NTASKS" in names
        if (name in names or of_step) and name in environment:
            text, minimum = environment[name], int(name in COUNT_VARIABLES)
            if not text.isdecimal() or int(text) < minimum:
                raise ValueError(f"{name}={text!r} must be a whole number of at least {minimum}")
            numbers[name] = int(text)
    return numbers


def _has_kubernetes_client() -> bool:
    """Return whether the package is installed with which JAX asks Kubernetes for the number of processes."""
    return importlib.util.find_spec("kubernetes") is not None


def _agreed_number(numbers: dict[str, int], names: tuple[str, ...]) -> int | None:
    """Return the number on which all these variables agree, or None if none of them is set."""
    values = {name: numbers[name] for name in names if name in numbers}
    if len(set(values.values())) > 1:
        raise ValueError(
            f"{_format(values)} contradict each other; unset the variable of the launcher that did not start Python"
            f" (env -u {list(values)[-1]} python ...)"
        )
    return next(iter(values.values()), None)


def _format(numbers: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={number}" for name, number in numbers.items())
