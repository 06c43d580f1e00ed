"""Digests of arrays in logical expert order, independent of their sharding and of the homes of their experts.

A digest is two sums modulo 2^32 over the 32-bit words of an array. Before a word is added, the digest adds to it a
number that depends on its index in the logical array, and scrambles the result. Sums do not depend on the order of
addition, so every rank adds up its own part in place and only the sums travel. Nothing is gathered or copied.

Scrambling is a permutation, so a single changed word always changes both sums. Other accidental changes (swapped rows,
a block of zeros, noise) go undetected with a probability of about 2^-64. The digest does not protect against an
adversary. The scrambling is lowbias32 of Chris Wellons' hash-prospector (nullprogram.com, 2018).
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt32

from relibra_jax.execution.expert_labels import ExpertLeaf

SEEDS: Final = (0x243F6A88, 0x13198A2E)
"""The seeds of the two sums, digits of pi."""
HOST_BLOCK: Final = 1 << 18
"""The number of elements of a NumPy array that are added up at a time, so that they stay in the processor's cache."""


def logical_digests(leaves: Mapping[str, ExpertLeaf], home: Int[np.ndarray, "L E"]) -> dict[str, str]:
    """Compute the digest of each leaf in logical expert order, ``[E, ...]`` or stacked ``[l, E, ...]``.

    A digest is the same for every mesh, sharding, memory kind and home, for NumPy and JAX arrays, and with 64-bit types
    on or off. If there are several processes, every process must call this function.

    Args:
        leaves: arrays with their labels, by name: NumPy arrays and global JAX arrays of any dtype except typed keys.
        home: ``[L, E]``, the current flat home slot of each expert.

    Returns:
        16 hexadecimal digits for each name.

    >>> rows = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    >>> arrays = {"rows": rows, "on a device": jnp.asarray(rows), "swapped": rows[::-1]}
    >>> leaves = {name: ExpertLeaf((), array, None) for name, array in arrays.items()}
    >>> list(logical_digests(leaves, np.zeros((0, 0), int)).values())
    ['c2f59827828a8eba', 'c2f59827828a8eba', '38c0e6ff95387f1b']
    """
    # Start all programs before the host waits for the first sum.
    sums = jax.device_get({name: list(_sums(leaf, home)) for name, leaf in leaves.items()})
    return {name: _hexadecimal(parts) for name, parts in sums.items()}


def _hexadecimal(parts: list[tuple[Any, ...]]) -> str:
    total = np.array(parts, np.uint32).reshape(-1, len(SEEDS)).sum(0, dtype=np.uint32)
    return "".join(f"{number:08x}" for number in total)


def _sums(leaf: ExpertLeaf, home: Int[np.ndarray, "L E"]) -> Iterator[tuple[Any, ...]]:
    """Compute the two sums of each part of a leaf. Arrays in host memory pass through device memory layer by layer."""
    array = leaf.array
    if array.size == 0:
        return
    if not isinstance(array, jax.Array):
        yield from _host_sums(array)
        return
    on_host = array.sharding.memory_kind not in (None, "device")
    sums = functools.partial(device_sums, stacked=leaf.stacked, on_host=on_host)
    experts = None if leaf.layers is None else _expert_of_slot(leaf, home)
    if experts is not None and leaf.stacked and on_host:
        for row in range(len(experts)):
            yield sums(array, experts[row : row + 1], np.int32(row))
    else:
        yield sums(array, experts, np.int32(0))


def _expert_of_slot(leaf: ExpertLeaf, home: Int[np.ndarray, "L E"]) -> UInt32[np.ndarray, "..."]:
    """Return the logical expert in each slot of a leaf, ``[N, G, H]`` or stacked ``[l, N, G, H]``."""
    slots = leaf.array.shape[: 3 + leaf.stacked]
    return np.argsort(home[list(leaf.layer_numbers)], axis=1).astype(np.uint32).reshape(slots)


@functools.partial(jax.jit, static_argnames=("stacked", "on_host"))
def device_sums(
    array: jax.Array, experts: jax.Array | None, row: jax.Array, *, stacked: bool, on_host: bool
) -> tuple[jax.Array, ...]:
    """Compute the two sums of an array, the only program that `logical_digests` runs on devices.

    Args:
        array: any array; with experts ``[N, G, H, ...]``, or stacked ``[l, N, G, H, ...]``.
        experts: the logical expert in each slot, ``uint32[N, G, H]`` or ``[l, N, G, H]``. None without experts.
        row: the row of a stacked array in host memory to add up, int32; ``experts`` then has only that row. Not used
            for other arrays.
        stacked: whether the array has a leading dimension of layers.
        on_host: whether the array is in host memory.

    Returns:
        Two uint32 scalars.
    """
    if stacked and on_host:
        array = jax.lax.dynamic_slice_in_dim(array, row, 1)
    if on_host:
        array = jax.device_put(array, jax.memory.Space.Device)
    words = _device_words(array)
    place = [_index_along(words.shape, axis, jnp) for axis in range(words.ndim)]
    if experts is not None:
        place[stacked : stacked + 3] = [jnp.expand_dims(experts, range(experts.ndim, words.ndim))]
    if stacked and on_host:
        place[0] += row.astype(jnp.uint32)
    # One reduction computes both sums. XLA on CPU fuses it with its operands; with two it would store the operands.
    scrambled = tuple(_shift_and_scramble(words, place, seed) for seed in SEEDS)
    zeros, axes = (np.uint32(0),) * len(SEEDS), tuple(range(words.ndim))
    return tuple(jax.lax.reduce(scrambled, zeros, lambda a, b: tuple(map(jnp.add, a, b)), axes))


def _host_sums(array: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Compute the two sums of each block of rows of a NumPy array."""
    array = np.atleast_1d(array)
    rows = max(1, HOST_BLOCK // math.prod(array.shape[1:]))
    for start in range(0, len(array), rows):
        words = _host_words(array[start : start + rows])
        place = [_index_along(words.shape, axis, np) for axis in range(words.ndim)]
        place[0] += np.uint32(start)
        yield tuple(_shift_and_scramble(words, place, seed).sum(dtype=np.uint32) for seed in SEEDS)


def _index_along(shape: Sequence[int], axis: int, xp: Any) -> Any:
    """Return the indices 0, 1, 2, ... along one axis, with length 1 along all other axes."""
    ones = [1] * len(shape)
    ones[axis] = shape[axis]
    return xp.arange(shape[axis], dtype=np.uint32).reshape(ones)


def _shift_and_scramble(words: Any, place: Sequence[Any], seed: int) -> Any:
    """Shift and scramble each word by its ``place``: its index along every logical axis and inside its element."""
    # The index inside the element comes first, so that a scalar has the digest of an array with one element, which is
    # how NumPy treats it.
    coordinates = [place[-1], *place[:-1]]
    factors = _scramble(np.arange(len(coordinates), dtype=np.uint32) + np.uint32(seed)) | 1
    words = words + np.uint32(seed)
    for coordinate, factor in zip(coordinates, factors, strict=True):
        words = words + coordinate * factor
    return _scramble(words)


def _scramble(numbers: Any) -> Any:
    """Apply lowbias32, a permutation of the 32-bit numbers."""
    numbers = (numbers ^ (numbers >> 16)) * np.uint32(0x7FEB352D)
    numbers = (numbers ^ (numbers >> 15)) * np.uint32(0x846CA68B)
    return numbers ^ (numbers >> 16)


def _device_words(array: jax.Array) -> jax.Array:
    """Convert an array to the words of its bits, ``uint32[..., words of an element]``."""
    parts = jnp.stack([array.real, array.imag], -1) if jnp.iscomplexobj(array) else array
    parts = parts.astype(jnp.uint8) if jnp.issubdtype(parts.dtype, jnp.bool) else parts
    words = jax.lax.bitcast_convert_type(parts, f"uint{min(_bits(parts.dtype), 32)}").astype(jnp.uint32)
    return words.reshape(*array.shape, -1)


def _host_words(array: np.ndarray) -> np.ndarray:
    """Convert a NumPy array to words as `_device_words` does. NumPy stores numbers of fewer than 8 bits in a byte."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    words = array.view(f"uint{min(8 * array.itemsize, 32)}").astype(np.uint32).reshape(*array.shape, -1)
    return words & np.uint32(2 ** _bits(array.dtype) - 1) if array.itemsize == 1 else words


def _bits(dtype: np.dtype) -> int:
    if jnp.issubdtype(dtype, jnp.bool):
        return 8
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
