"""Rows in groups, in plain XLA for any platform: loops over groups, and over tiles of rows inside each.

Trip counts are data, so only rows that exist are computed, and weights are read where they lie. A group's rows go in
tiles of the largest size, the rest of them in tiles of the smallest. The last tile of a group may reach into its
neighbour: it reads those rows as zeros and leaves them alone when it writes, so padding needs no care of its own.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

TILES: Final = (256, 64)
"""Rows of a tile, largest first. Large tiles read weights and sum weight gradients seldom, small ones waste few rows
at the end of a group; the pair serves groups of ten rows and of thousands. On two CPU cores, 32,768 rows in 64 uneven
groups, forward and backward against a dense MLP: 1.2 for 256 and 64, 1.3 for 64 alone, 1.5 for 256 alone."""


class Tile(NamedTuple):
    """Consecutive rows, of which a group owns some."""

    first: jax.Array
    """The first row, int32."""
    own: jax.Array
    """``[tile, 1]``, True where the row belongs to the group."""

    def read(self, array: jax.Array) -> jax.Array:
        """The tile of ``array[r, ...]``, zero where another owns the row."""
        return jnp.where(self.own, self._slice(array), 0)

    def write(self, array: jax.Array, values: jax.Array) -> jax.Array:
        """``array`` with the group's own rows of the tile replaced."""
        kept = jnp.where(self.own, values.astype(array.dtype), self._slice(array))
        return jax.lax.dynamic_update_slice_in_dim(array, kept, self.first, 0)

    def _slice(self, array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.own.shape[0])


def over_groups(of_group: Callable[[jax.Array, Any], Any], carry: Any, weights: jax.Array) -> Any:
    """Visit the slots of one weight buffer: ``(slot, carry) -> carry``."""
    # A loop of no steps would still be traced, and index a buffer without slots.
    return jax.lax.fori_loop(0, weights.shape[0], of_group, carry) if weights.shape[0] else carry


def over_tiles(
    of_tile: Callable[[Tile, Any], Any], carry: Any, start: jax.Array, end: jax.Array, num_rows: int
) -> Any:
    """Visit tiles that cover rows ``start..end``: as many of each size as fit, and of the smallest one more."""
    sizes = sorted({min(size, num_rows) for size in TILES}, reverse=True)
    for size in sizes:
        left = end - start
        count = left // size if size > sizes[-1] else -(-left // size)

        def visit(index: jax.Array, carry: Any, size: int = size, start: jax.Array = start) -> Any:
            begin = start + index * size
            # The array's last tile starts earlier than asked, and owns only what is left to do.
            first = jnp.minimum(begin, num_rows - size)
            row = first + jnp.arange(size, dtype=jnp.int32)[:, None]
            return of_tile(Tile(first, (row >= begin) & (row < end)), carry)

        carry = jax.lax.fori_loop(0, count, visit, carry)
        start = start + count * size
    return carry


def group_bounds(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Where each group starts and the last one ends, int32 ``[H + R + 1]``.

    Whatever the sizes are, nothing lies before the rows or beyond them.
    """
    ends = jnp.cumsum(jnp.clip(group_sizes, 0, num_rows).astype(jnp.int32), dtype=jnp.int32)
    return jnp.minimum(jnp.pad(ends, (1, 0)), num_rows)


def zeros(shape: tuple[int, ...], dtype: Any, bounds: jax.Array, after: jax.Array) -> jax.Array:
    """Zeros that XLA does not know to be constant, and makes no earlier than ``after`` is there.

    A constant holds a buffer from a program's start to its end, and a loop that writes into it copies it first.
    """
    zero = (
        jnp.where(bounds[-1] < 0, after[(0,) * after.ndim], 0) if after.size else jnp.minimum(bounds[-1], 0)
    )
    return jnp.full(shape, zero, dtype)


def dot(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    """The product of two matrices over one dimension of each, in `accumulator`."""
    dimensions = (((contract_a,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=accumulator(a))


def accumulator(array: jax.Array) -> Any:
    """The dtype that products of an array are summed in: float32, or float64 for float64."""
    return jnp.promote_types(array.dtype, jnp.float32)
