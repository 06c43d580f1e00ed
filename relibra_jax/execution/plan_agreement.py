"""All processes hold the same plan, or none of them takes the step.

A plan is computed from the routing of all samples, so every process that has them can compute it: planning is
deterministic. Processes that differ (another version, another state, a lost sample) would wait for rows that nobody
sends. Comparing 32 bytes beforehand is cheap. Where one process plans alone,
`jax.experimental.multihost_utils.broadcast_one_to_all` hands its plan to the others.
"""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Int


def digest(tree: Any) -> np.ndarray:
    """SHA-256 of the structure, shapes, dtypes and values of an array tree, ``uint8[32]``.

    >>> digest({"home": np.arange(4)}).tolist() == digest({"home": np.arange(4)[::-1]}).tolist()
    False
    """
    leaves, structure = jax.tree.flatten(tree)
    sha = hashlib.sha256(str(structure).encode())
    for leaf in map(np.asarray, leaves):
        sha.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
    return np.frombuffer(sha.digest(), np.uint8)


def processes_where(flag: bool) -> Int[np.ndarray, " P"]:
    """The numbers of the processes on which ``flag`` is true. Collective: all processes have to call it."""
    if jax.process_count() == 1:
        return np.arange(int(flag))
    return np.flatnonzero(multihost_utils.process_allgather(np.bool_(flag)))


def check_same_plan(tree: Any, *, what: str = "plan") -> None:
    """Raise on every process unless all hold the same ``tree``. Collective: all processes have to call it.

    Args:
        tree: a plan, or another tree that has to agree, whose leaves this process can read.
        what: the name of the tree in the error.

    Raises:
        ValueError: if processes differ; names those that differ from process 0.
    """
    everywhere = np.reshape(multihost_utils.process_allgather(digest(tree)), (jax.process_count(), -1))
    differ = np.flatnonzero((everywhere != everywhere[0]).any(-1)).tolist()
    if differ:
        raise ValueError(
            f"{what}: processes {differ} of {jax.process_count()} hold another one than process 0"
        )
