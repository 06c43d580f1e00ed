"""Arrays in the memory of the host, from which the devices take one micro-batch or one layer at a time.

A batch's tables take gigabytes, and masters and moments take most of a model's memory, but a step needs only a part of
them at a time. They may lie in the host's memory (memory kind ``pinned_host``), whole or sharded over the devices.
Compiled programs take their parts from there with `take`, and put results back with `to_host`. XLA copies the next part
while the devices compute, where its schedule allows it.
"""

from typing import Any, Final

import jax
from jaxtyping import Int, PyTree

from relibra_jax.contract.types import Array

HOST: Final = "pinned_host"
"""The memory kind of arrays in the host's memory from which devices copy."""
MEMORY_KINDS: Final = ("device", HOST)
"""The memory kinds that arrays of a batch may have."""


def take[T: PyTree](tree: T, index: Int[Array, ""] | int) -> T:
    """Return one entry of the first axis of arrays, in device memory. Works under jit.

    Args:
        tree: arrays with a common first axis, of micro-batches or of layers, in the memory of host or devices.
        index: the entry.

    >>> numbers = to_host(jax.numpy.arange(6).reshape(3, 2))
    >>> jax.jit(lambda numbers, index: take(numbers, index) + 1)(numbers, 2).tolist()
    [5, 6]
    """
    return to_device(
        jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)
    )


def to_device[T: PyTree](tree: T) -> T:
    """Copy arrays to device memory; those that are there stay. Works under jit."""
    return jax.tree.map(lambda leaf: _move(leaf, jax.memory.Space.Device), tree)


def to_host[T: PyTree](tree: T) -> T:
    """Copy arrays to host memory. Works under jit."""
    return jax.tree.map(lambda leaf: _move(leaf, jax.memory.Space.Host), tree)


def in_host_memory(leaf: Any) -> bool:
    """Return whether an array, traced or not, is in the host's memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _move(leaf: Array, space: Any) -> Array:
    return leaf if jax.typeof(leaf).memory_space == space else jax.device_put(leaf, space)
