"""Plans as files."""

import os

import numpy as np

from relibra_jax.atomic_write import write_atomically
from relibra_jax.plan_check import check_slots
from relibra_jax.types import Plan, Topology


def save_plan(path: str | os.PathLike, plan: Plan, topology: Topology) -> None:
    """Write a plan and its topology as ``.npz``: the arrays of `Plan` and the numbers of `Topology` by name.

    Args:
        path: the file, written whole or not at all.
        plan: a plan that `relibra_jax.plan_check.check_plan` accepts.
        topology: the expert-parallel group of the plan.
    """
    numbers = {name: np.int64(value) for name, value in vars(topology).items()}
    with write_atomically(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **{k: np.asarray(v) for k, v in plan._asdict().items()}, **numbers)  # type: ignore[arg-type]


def load_plan(path: str | os.PathLike) -> tuple[Plan, Topology]:
    """Read what `save_plan` wrote, and check everything about it that can be known without the load.

    Args:
        path: the file.

    Returns:
        The plan, NumPy arrays, and its topology.

    Raises:
        ValueError: if the file is truncated or holds no plan, or the plan breaks a rule of
            `relibra_jax.plan_check.check_slots`.
        OSError: if there is no such file, or it cannot be opened.
    """
    try:
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
            plan = Plan(**{name: file[name] for name in Plan._fields})
            names = [name for name in Topology.__dataclass_fields__ if name in file]
            topology = Topology(**{name: int(file[name]) for name in names})
    except Exception as error:  # damaged archives fail in many ways, down to zlib and the decoders
        raise ValueError(f"{path}: not a plan, or truncated ({error!r})") from error
    try:
        check_slots(plan, topology, across_nodes=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return plan, topology
