"""A check that all processes have the same plan before any of them takes the step.

Planning is deterministic and uses the routing of all samples, so every process that has all samples can compute the
plan. If processes differ (another version, another state, a lost sample), they would wait for rows that no process
sends. Comparing 32 bytes beforehand is cheap. If only one process plans,
`jax.experimental.multihost_utils.broadcast_one_to_all` can send its plan to the others.
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from relibra_jax.support.argument_types import checks_arguments


def digest(tree: Any) -> np.ndarray:
    """Compute the SHA-256 of the structure, shapes, dtypes and values of an array tree, ``uint8[32]``.

    >>> digest({"home": np.arange(4)}).tolist() == digest({"home": np.arange(4)[::-1]}).tolist()
    False
    """
    leaves, structure = jax.tree.flatten(tree)
    sha = hashlib.sha256(str(structure).encode())
    for leaf in map(np.asarray, leaves):
        sha.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
    return np.frombuffer(sha.digest(), np.uint8)


def processes_where(flag: bool) -> Int[np.ndarray, " P"]:
    """Return the numbers of the processes on which ``flag`` is true. Every process must call this function."""
    if jax.process_count() == 1:
        return np.arange(int(flag))
    return np.flatnonzero(multihost_utils.process_allgather(np.bool_(flag)))


@checks_arguments
def check_same_plan(tree: Any, *, what: str = "plan") -> None:
    """Raise on every process unless all processes have the same ``tree``. Every process must call this function.

    Args:
        tree: a plan, or another tree that must be equal, whose leaves this process can read.
        what: the name of the tree in the error.

    Raises:
        ValueError: if processes have different trees. The message has the processes that differ from process 0.
    """
    digests = np.reshape(multihost_utils.process_allgather(digest(tree)), (jax.process_count(), -1))
    different = np.flatnonzero((digests != digests[0]).any(-1)).tolist()
    if different:
        raise ValueError(f"{what}: processes {different} of {jax.process_count()} differ from process 0")


@contextlib.contextmanager
def fail_together(operation: str, error_of_others: type[Exception] = ValueError) -> Iterator[None]:
    """Run the body of the ``with`` statement on every process, and continue only if no process raised an error.

    Args:
        operation: a description of the body, for the error message on the processes that succeeded.
        error_of_others: the type of their error.

    Raises:
        Exception: the error of this process's body; of type ``error_of_others`` if the body failed on another process,
            with its number in the message.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = processes_where(error is not None)
    if error is not None:
        raise error
    if failed.size:
        raise error_of_others(f"{operation}: failed on processes {failed.tolist()} of {jax.process_count()}")


def add_up[T](tree: T) -> T:
    """Add up the host arrays of all processes, exactly for integers. Every process must call it, with equal shapes."""
    if jax.process_count() == 1:
        return tree
    first = [
        min((device for device in jax.devices() if device.process_index == process), key=lambda each: each.id)
        for process in range(jax.process_count())
    ]
    mesh = Mesh(np.array(first), ("process",))

    def spread(leaf: Any) -> jax.Array:
        mine = np.asarray(leaf)[None]
        shape = (jax.process_count(), *mine.shape[1:])
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, PartitionSpec("process")), lambda _: mine
        )

    return jax.device_get(_sums(mesh)(jax.tree.map(spread, tree)))


def gather_rows[T](tree: T, own: Int[np.ndarray, " b"], num_rows: int) -> T:
    """Put the rows that each process has of host arrays into the order of the whole. Every process must call it.

    Args:
        tree: arrays ``[b, ...]`` with the rows of this process.
        own: the number in the whole of each row. Every row is with one process.
        num_rows: B, the number of rows of the whole.
    """

    def place(leaf: np.ndarray) -> np.ndarray:
        whole = np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)
        whole[own] = leaf
        return whole

    return add_up(jax.tree.map(place, tree))


@functools.cache
def _sums(mesh: Mesh) -> Any:
    def add(tree):
        return jax.tree.map(lambda leaf: leaf.sum(0, dtype=leaf.dtype), tree)

    return jax.jit(add, out_shardings=NamedSharding(mesh, PartitionSpec()))
