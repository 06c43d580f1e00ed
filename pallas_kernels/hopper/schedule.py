"""Which rows make a tile: groups cut into tiles, as a small table that is data to the kernels.

A tile belongs to one group and starts at a multiple of 8 rows, so that the hardware can copy it: the first tile of a
group may hold up to 7 rows of the group before, which it does not own. Rows beyond the last group make one more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.launch import ALIGNED


class Schedule(NamedTuple):
    """Tiles of rows, in order of their rows; t is room for any sizes."""

    group: jax.Array
    """``[t]`` int32; the number of groups stands for the rows beyond the last."""
    first: jax.Array
    """``[t]`` int32, a multiple of 8: where the tile starts."""
    start: jax.Array
    """``[t]`` int32, the first row that the tile owns."""
    end: jax.Array
    """``[t]`` int32, after the last row that it owns. Never falls."""
    counts: jax.Array
    """``[2]`` int32: tiles of groups, and all tiles; entries from there on mean nothing."""


def cut(bounds: jax.Array, num_rows: int, tile: int) -> Schedule:
    """Cut groups into tiles.

    Args:
        bounds: ``[groups + 1]`` int32, where each group starts and the last one ends.
        num_rows: of the array; what lies behind ``bounds[-1]`` is one more group.
        tile: rows of a tile, a multiple of 8.

    Returns:
        The schedule.

    >>> table = cut(jnp.array([0, 5, 5, 24]), 32, 8)
    >>> [column.tolist() for column in (table.group[:5], table.first[:5], table.start[:5], table.end[:5])]
    [[0, 2, 2, 2, 3], [0, 0, 8, 16, 24], [0, 5, 8, 16, 24], [5, 8, 16, 24, 32]]
    >>> table.counts.tolist()
    [4, 5]
    """
    ends = jnp.append(bounds[1:], jnp.int32(num_rows))
    firsts = bounds // ALIGNED * ALIGNED
    tiles = jnp.where(ends > bounds, (ends - firsts + tile - 1) // tile, 0)
    last = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange((num_rows + bounds.shape[0] * (tile + ALIGNED)) // tile, dtype=jnp.int32)
    group = jnp.searchsorted(last, index, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, bounds.shape[0] - 1)
    first = firsts[group] + (index - (last - tiles)[group]) * tile
    start, end = jnp.maximum(first, bounds[group]), jnp.minimum(first + tile, ends[group])
    return Schedule(group, first, start, end, last[-2:])
