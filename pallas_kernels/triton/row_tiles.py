"""The assignment of rows to tiles for the Triton kernels: a table computed from the group sizes before the kernels run.

A tile belongs to one group and may start at any row, since loads and stores have masks that exclude the rows of other
groups. The rows after the last group form one more group, whose tiles are written as zeros. The table has the length
that the worst split of the rows needs. Unused entries belong to no group, and their blocks end immediately.

Each block could instead search for the group of its tile. The table is computed in advance because all kernels of a
grouped MLP can share it, and because a block would hold all groups in registers during the search.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.group_loops import group_bounds

GROUP, START, END = 0, 1, 2
"""The indices of the rows of a table of tiles."""


def count_tiles(num_groups: int, num_rows: int, height: int) -> int:
    """Return the largest number of tiles into which groups and padding can be cut, for any group sizes.

    >>> count_tiles(num_groups=3, num_rows=10, height=4)
    5
    """
    return (num_rows + (num_groups + 1) * (height - 1)) // height


def row_tiles(group_sizes: jax.Array, num_rows: int, height: int) -> jax.Array:
    """Return the table of the row tiles of all groups and of the padding after them, in order.

    Args:
        group_sizes: the number of rows of each group, integer ``[groups]``.
        num_rows: the number of rows of the row operand. Rows after the last group are padding.
        height: the largest number of rows of a tile.

    Returns:
        The table, int32 ``[3, tiles]``: the group of each tile, its first row, and the row after its last one. Tiles of
        padding have the number of groups as their group. Unused entries have that number plus one, and no rows.

    >>> row_tiles(jnp.array([5, 0, 3]), 10, 4).tolist()
    [[0, 0, 2, 3, 4], [0, 4, 5, 8, 10], [4, 5, 8, 10, 10]]
    """
    bounds = group_bounds(group_sizes, num_rows)
    ends = jnp.pad(bounds[1:], (0, 2), constant_values=num_rows)
    starts = jnp.pad(bounds, (0, 1), constant_values=num_rows)
    counts = -(-(ends - starts) // height)
    last = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(count_tiles(group_sizes.shape[0], num_rows, height), dtype=jnp.int32)
    # "compare_all" compares each tile with all groups: the other search methods need many launches.
    group = jnp.searchsorted(last[:-1], number, side="right", method="compare_all").astype(jnp.int32)
    start = jnp.minimum(starts[group] + (number - (last - counts)[group]) * height, num_rows)
    return jnp.stack([group, start, jnp.minimum(start + height, ends[group])])
