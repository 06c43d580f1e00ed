"""Which rows make a tile: a table that a few small operations make from the group sizes, before a kernel starts.

A tile belongs to one group and starts anywhere: loads have masks, so no rows of a neighbour need care. The rows beyond
the last group are one more group, whose tiles are written as zeros. The table is as long as any split of the rows can
make it; entries that are left over belong to no group, and their blocks end at once.

The search for a tile's group could also be done by each block of a kernel. It is done before, because all kernels of a
grouped MLP then share one table, and because a block that searches holds all groups in registers while it does.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.group_loops import group_bounds

GROUP, START, END = 0, 1, 2
"""The rows of a table of tiles."""


def count_tiles(num_groups: int, num_rows: int, height: int) -> int:
    """Return the largest number of tiles that rows in groups and padding may be cut into.

    >>> count_tiles(num_groups=3, num_rows=10, height=4)
    5
    """
    return (num_rows + (num_groups + 1) * (height - 1)) // height


def row_tiles(group_sizes: jax.Array, num_rows: int, height: int) -> jax.Array:
    """Return the tiles of rows of all groups and of the padding behind them, in order.

    Args:
        group_sizes: ``[groups]`` integer, the number of rows of each group.
        num_rows: the number of rows of the row operand; rows behind the last group are padding.
        height: the largest number of rows of a tile.

    Returns:
        ``[3, tiles]`` int32: the group of each tile, its first row, and the row after its last one. The number of
        groups stands for padding, one more for an entry without a tile, which has no rows.

    >>> row_tiles(jnp.array([5, 0, 3]), 10, 4).tolist()
    [[0, 0, 2, 3, 4], [0, 4, 5, 8, 10], [4, 5, 8, 10, 10]]
    """
    bounds = group_bounds(group_sizes, num_rows)
    ends = jnp.pad(bounds[1:], (0, 2), constant_values=num_rows)
    starts = jnp.pad(bounds, (0, 1), constant_values=num_rows)
    counts = -(-(ends - starts) // height)
    last = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(count_tiles(group_sizes.shape[0], num_rows, height), dtype=jnp.int32)
    # All groups are compared with each tile: other ways to search take many launches.
    group = jnp.searchsorted(last[:-1], number, side="right", method="compare_all").astype(jnp.int32)
    start = jnp.minimum(starts[group] + (number - (last - counts)[group]) * height, num_rows)
    return jnp.stack([group, start, jnp.minimum(start + height, ends[group])])
