"""Plans saved as files."""

import os
from typing import Any

import numpy as np

from relibra_jax.contract.check import check_slots
from relibra_jax.contract.types import Plan, Topology
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.atomic_write import write_atomically


@checks_arguments
def save_plan(path: str | os.PathLike, plan: Plan, topology: Topology) -> None:
    """Save a plan and its topology as ``.npz``: the arrays of `Plan` and the numbers of `Topology`, by field name.

    Args:
        path: the file to write or replace. It is written atomically.
        plan: a plan that `relibra_jax.contract.check.check_plan` accepts.
        topology: the expert-parallel group of the plan.

    Raises:
        ValueError: if `relibra_jax.contract.check.check_slots` rejects the plan; nothing is written then.
        OSError: if the file cannot be written.
    """
    check_slots(plan, topology, across_nodes=True)
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in plan._asdict().items()}
    arrays |= {name: np.int64(value) for name, value in vars(topology).items()}
    with write_atomically(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)


@checks_arguments
def load_plan(path: str | os.PathLike) -> tuple[Plan, Topology]:
    """Load a plan that `save_plan` wrote, and check everything about it that can be checked without a load.

    Args:
        path: the file to read.

    Returns:
        The plan as NumPy arrays, and its topology.

    Raises:
        ValueError: if the file is truncated or contains no plan, or if `relibra_jax.contract.check.check_slots` rejects
            the plan.
        OSError: if the file does not exist or cannot be opened.
    """
    with open(path, "rb") as handle:
        try:
            with np.load(handle, allow_pickle=False) as file:
                plan = Plan(**{name: file[name] for name in Plan._fields})
                names = [name for name in Topology.__dataclass_fields__ if name in file]
                topology = Topology(**{name: int(file[name]) for name in names})
        except Exception as error:  # a damaged archive can raise errors of zipfile, zlib and the decoders
            raise ValueError(f"{path}: not a plan, or truncated ({error!r})") from error
    try:
        check_slots(plan, topology, across_nodes=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return plan, topology
