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
COUNT, INDEX = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
OPEN_MPI: Final = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
SLURM: Final = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
KUBERNETES: Final = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
LAUNCHERS: Final = (
    ((), (COUNT,), INDEX),
    (OPEN_MPI, ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK"),
    (SLURM, ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_PROCID"),
    (KUBERNETES, (), "JOB_COMPLETION_INDEX"),
)
"""For each launcher the variables by which JAX recognises it, the numbers of processes, and the index of this one.

A shell in an allocation of Slurm that is not a step of it has only some of the variables."""


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
    coordinator, has_client = environment.get(COORDINATOR), _has_kubernetes_client()
    counts: dict[str, int] = {}
    indices: dict[str, int] = {}
    for variables, count_names, index_name in LAUNCHERS:
        # The pods of an indexed job have an index even if they are independent of each other.
        independent = variables == KUBERNETES and not (coordinator or has_client)
        if not independent and all(name in environment for name in variables):
            counts |= _read_numbers(environment, count_names, least=1)
            indices |= _read_numbers(environment, (index_name,), least=0)
    count, index = _agreed_number(counts), _agreed_number(indices)
    if count is not None and index is not None and index >= count:
        raise ValueError(
            f"{_format(counts | indices)}: processes are counted from 0, so the last of {count} is {count - 1}"
        )
    if count == 1 or not (counts or indices or coordinator):
        return None
    detect = any(name != INDEX and (name not in KUBERNETES or has_client) for name in indices)
    settings = {COORDINATOR: coordinator, COUNT: count, INDEX: index}
    missing = [name for name, value in settings.items() if value is None]
    if missing and not detect:
        present = _format({name: value for name, value in settings.items() if value is not None})
        raise ValueError(f"{present} without {' and '.join(missing)}: without a launcher, set all three")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
        raise ValueError(f"{COORDINATOR}={coordinator} must be HOST:PORT of the first process")
    return Launch(coordinator, count, index, detect)


def _has_kubernetes_client() -> bool:
    """Return whether the package is installed with which JAX asks Kubernetes for the number of processes."""
    return importlib.util.find_spec("kubernetes") is not None


def _read_numbers(environment: Mapping[str, str], names: tuple[str, ...], *, least: int) -> dict[str, int]:
    """Read those of the named variables that are set."""
    numbers = {}
    for name in names:
        if (text := environment.get(name)) is not None:
            if not text.isdecimal() or int(text) < least:
                raise ValueError(f"{name}={text!r} must be a whole number of at least {least}")
            numbers[name] = int(text)
    return numbers


def _agreed_number(numbers: dict[str, int]) -> int | None:
    """Return the number on which all variables agree, or None if there are none."""
    if len(set(numbers.values())) > 1:
        raise ValueError(
            f"{_format(numbers)} contradict each other; unset the variable of the launcher that did not start Python"
            f" (env -u {list(numbers)[-1]} python ...)"
        )
    return next(iter(numbers.values()), None)


def _format(numbers: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={number}" for name, number in numbers.items())
