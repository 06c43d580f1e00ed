"""A run on several processes: which one this is, and what they exchange.

Every process executes the same program on the same data: it draws the same prompts, gets all samples of a rollout, and
computes the same plan from them. The first process does what must happen only once: it scores rewards, and writes all
files except checkpoints. `experiments.rl.process_group` connects the processes.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relibra_jax.execution import check_same_plan
from relibra_jax.execution.plan_agreement import add_up, processes_where


def process_count() -> int:
    """Return the number of processes. Unlike `jax.process_count` this starts no backend."""
    return global_state.num_processes


def is_first() -> bool:
    """Return whether this is the first process, which does what must happen only once."""
    return global_state.process_id == 0


def from_first[T](tree: T) -> T:
    """Return a tree of host arrays as the first process has it. All processes call it, with the same shapes."""
    return tree if process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def text_from_first(text: str) -> str:
    """Return a text as the first process has it. All processes call it."""
    length = int(from_first(np.int32(len(text.encode()))))
    encoded = text.encode()[:length].ljust(length)
    return bytes(np.asarray(from_first(np.frombuffer(encoded, np.uint8)))).decode()


def on_any(flag: bool) -> bool:
    """Return whether ``flag`` is true on any process. All processes call it."""
    return flag if process_count() == 1 else processes_where(flag).size > 0


def check_same(tree: Any, name: str) -> None:
    """Raise ValueError on every process unless all have the same host arrays. ``name`` is their name in the message."""
    if process_count() > 1:
        check_same_plan(tree, what=name)


def wait_for_all(name: str) -> None:
    """Wait until all processes have reached the barrier of this name."""
    if process_count() > 1:
        multihost_utils.sync_global_devices(name)


def on_every_host[T](tree: T, mesh: Mesh) -> T:
    """Copy arrays on ``mesh`` to the host, as `jax.device_get` does. Every process gets the whole arrays."""
    return jax.device_get(tree if process_count() == 1 else _replicated(mesh)(tree))


@functools.cache
def _replicated(mesh: Mesh) -> Any:
    def gather(tree):
        return tree

    return jax.jit(gather, out_shardings=NamedSharding(mesh, PartitionSpec()))


def texts_of_all(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of all processes, one process's after another's. All processes call it."""
    if process_count() == 1:
        return tuple(texts)
    mine = np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)
    sizes = np.zeros(process_count(), np.int32)
    sizes[jax.process_index()] = len(mine)
    sizes = add_up(sizes)
    encoded = np.zeros((process_count(), sizes.max()), np.uint8)
    encoded[jax.process_index(), : len(mine)] = mine
    parts = zip(add_up(encoded), sizes, strict=True)
    return tuple(text for row, size in parts for text in json.loads(row[:size].tobytes()))
