"""Loops over groups of rows, and over the row tiles of each group, in plain XLA for any platform.

A group is the set of consecutive rows that one weight slot multiplies. The trip counts of the loops are data: the loops
compute only the rows of groups, and read the weights in place. A group is cut into tiles of the largest size, and the
remaining rows into tiles of the smallest size. The last tile of a group may overlap the next group. It reads those rows
as zeros and does not change them when it writes, so padding needs no special treatment.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

TILE_ROWS: Final = (256, 64)
"""The numbers of rows of a tile, largest first. With large tiles, weights are read and weight gradients summed less
often; small tiles waste fewer rows at the end of a group. The two sizes suit groups of ten rows as well as of
thousands. Measured on two CPU cores, for 32,768 rows in 64 uneven groups, forward and backward take 1.2 times as long
as a dense MLP with sizes 256 and 64, 1.3 times with 64 alone, and 1.5 times with 256 alone."""


class Tile(NamedTuple):
    """Consecutive rows, some or all of which belong to one group."""

    first: jax.Array
    """The index of the tile's first row, int32."""
    mask: jax.Array
    """The mask of the rows that belong to the group, boolean ``[tile, 1]``."""

    def read(self, array: jax.Array) -> jax.Array:
        """Return the tile's rows of ``array[r, ...]``; rows of other groups are replaced by zeros."""
        return jnp.where(self.mask, self._slice(array), 0)

    def write(self, array: jax.Array, values: jax.Array) -> jax.Array:
        """Return ``array`` with those rows of the tile that belong to the group replaced by ``values``."""
        rows = jnp.where(self.mask, values.astype(array.dtype), self._slice(array))
        return jax.lax.dynamic_update_slice_in_dim(array, rows, self.first, 0)

    def _slice(self, array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.mask.shape[0])


def loop_over_groups(of_group: Callable[[jax.Array, Any], Any], carry: Any, weights: jax.Array) -> Any:
    """Call a function once for every slot of a weight buffer, and return the final carry.

    Args:
        of_group: the function ``(slot, carry) -> carry``.
        carry: the initial carry.
        weights: the weight buffer, ``[slots, ...]``.

    Returns:
        The carry that the last call returned.
    """
    return jax.lax.fori_loop(0, weights.shape[0], of_group, carry)


def with_bounds(weights: Sequence[jax.Array], bounds: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield each weight buffer with the bounds of the groups that it multiplies.

    Args:
        weights: the weight buffers, each ``[slots, ...]``, in the order of their groups.
        bounds: the bounds of all groups, as `group_bounds` returns them.

    >>> [ends.tolist() for _, ends in with_bounds([jnp.ones(2), jnp.ones(1)], jnp.array([0, 2, 5, 9]))]
    [[0, 2, 5], [5, 9]]
    """
    first = 0
    for buffer in weights:
        last = first + buffer.shape[0]
        yield buffer, bounds[first : last + 1]
        first = last


def loop_over_tiles(
    of_tile: Callable[[Tile, Any], Any], carry: Any, start: jax.Array, end: jax.Array, num_rows: int
) -> Any:
    """Call a function for every tile of one group, and return the final carry.

    The group is cut into as many tiles of the largest size as fit, followed by tiles of the smallest size.

    Args:
        of_tile: the function ``(tile, carry) -> carry``.
        carry: the initial carry.
        start: the index of the group's first row.
        end: the index after the group's last row.
        num_rows: the number of rows of the arrays that the tiles index.

    Returns:
        The carry that the last call returned.
    """
    sizes = sorted({min(size, num_rows) for size in TILE_ROWS}, reverse=True)
    for size in sizes:
        left = end - start
        count = left // size if size > sizes[-1] else -(-left // size)

        def visit(index: jax.Array, carry: Any, size: int = size, start: jax.Array = start) -> Any:
            begin = start + index * size
            # A tile that would reach beyond the array starts earlier, and owns only the rows that are still to do.
            first = jnp.minimum(begin, num_rows - size)
            row = first + jnp.arange(size, dtype=jnp.int32)[:, None]
            return of_tile(Tile(first, (row >= begin) & (row < end)), carry)

        carry = jax.lax.fori_loop(0, count, visit, carry)
        start = start + count * size
    return carry


def group_bounds(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Return the index of each group's first row, and the index after the last group's last row.

    Args:
        group_sizes: the number of rows of each group, integer ``[groups]``. Sizes below 0 count as 0.
        num_rows: the total number of rows. Groups that would extend beyond it are cut off there.

    Returns:
        The bounds, int32 ``[groups + 1]``, each between 0 and ``num_rows``.

    >>> group_bounds(jnp.array([2, -1, 3, 9]), 8).tolist()
    [0, 2, 2, 5, 8]
    """
    ends = jnp.cumsum(jnp.clip(group_sizes, 0, num_rows).astype(jnp.int32), dtype=jnp.int32)
    return jnp.minimum(jnp.pad(ends, (1, 0)), num_rows)


def runtime_zeros(shape: tuple[int, ...], dtype: Any, bounds: jax.Array, after: jax.Array) -> jax.Array:
    """Return an array of zeros that XLA cannot recognise as a constant.

    A constant would occupy a buffer during the whole program, and a loop that writes into it would copy it first.

    Args:
        shape: the shape of the result.
        dtype: the dtype of the result.
        bounds: the group bounds, as `group_bounds` returns them. The value zero is computed from them.
        after: an array that must be available before the zeros are created.
    """
    zero = (
        jnp.where(bounds[-1] < 0, after[(0,) * after.ndim], 0) if after.size else jnp.minimum(bounds[-1], 0)
    )
    return jnp.full(shape, zero, dtype)


def contract(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Return the product of two matrices, contracted over one axis of each and summed in `accumulator_dtype`."""
    dimensions = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=accumulator_dtype(a))


def accumulator_dtype(array: jax.Array) -> Any:
    """Return the dtype in which products of an array are summed: float32, or float64 for a float64 array."""
    return jnp.promote_types(array.dtype, jnp.float32)
