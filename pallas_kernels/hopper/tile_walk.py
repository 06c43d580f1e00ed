"""The assignment of rows to tiles inside a Hopper kernel, by a walk through the groups instead of a precomputed table.

A tile belongs to one group and starts at a multiple of 8 rows, as the hardware copies require. So the first tile of a
group may contain up to 7 rows of the previous group, which it does not own. The rows after the last group are treated
like one more group. Tiles are numbered consecutively through all groups. A block visits increasing tile numbers, so its
only state is the current group. It reads offsets once per group, and another tile of the same group costs one
comparison.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.group_loops import group_bounds

ROW_ALIGNMENT = 8
"""The alignment in rows of copies into shared memory, since wgmma reads tiles of 8 x 64 elements."""


class Tile(NamedTuple):
    """A tile of rows; all fields are int32."""

    number: jax.Array
    """The tile's number, counted through all groups."""
    group: jax.Array
    """The group that the tile belongs to. The number of groups stands for the rows after the last group."""
    first: jax.Array
    """The tile's first row, a multiple of 8."""
    start: jax.Array
    """The first row that the tile owns."""
    end: jax.Array
    """The row after the last one that the tile owns."""


class Group(NamedTuple):
    """The current group of a walk; all fields are int32."""

    number: jax.Array
    """The index of the group, which is also its weight slot."""
    start: jax.Array
    """The group's first row."""
    end: jax.Array
    """The row after the group's last one."""
    tiles_before: jax.Array
    """The number of tiles of all groups before this one."""

    def tile(self, number: jax.Array, tile_rows: int) -> Tile:
        """Return the tile with the given number, which must belong to this group, for tiles of ``tile_rows`` rows."""
        first = align_down(self.start) + (number - self.tiles_before) * tile_rows
        return Tile(
            number,
            self.number,
            first,
            jnp.maximum(first, self.start),
            jnp.minimum(first + tile_rows, self.end),
        )


def align_down(row: jax.Array) -> jax.Array:
    """Return the last row at or before ``row`` where a tile can start."""
    return row & -ROW_ALIGNMENT


def count_tiles(start: jax.Array, end: jax.Array, tile_rows: int) -> jax.Array:
    """Return the number of tiles of ``tile_rows`` rows in the group of rows ``start..end``."""
    tiles = jax.lax.div(end - align_down(start) + (tile_rows - 1), jnp.int32(tile_rows))
    return jnp.where(end > start, tiles, 0)


def group_offsets(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Return the start and end of each group in the format that the kernels read.

    The result is `group_bounds` followed by ``num_rows`` twice. So the rows after the last group form one more group,
    and after it comes an empty group, at which a walk can stop.

    Args:
        group_sizes: the number of rows of each group, integer ``[groups]``.
        num_rows: the number of rows of the row operand. Rows after the last group are padding.

    Returns:
        The offsets, int32 ``[groups + 3]``.

    >>> group_offsets(jnp.array([5, 0, 19]), 32).tolist()
    [0, 5, 5, 24, 32, 32]
    """
    return jnp.pad(group_bounds(group_sizes, num_rows), (0, 2), constant_values=num_rows)


def walk_tiles(
    group_offsets: Any,
    last_group: int,
    tile_rows: int,
    visits: tuple[Any, Any, int],
    of_tile: Callable[..., jax.Array],
) -> jax.Array:
    """Visit every n-th pair of a row tile and a column tile, in the order of row tiles, then column tiles.

    Args:
        group_offsets: the array that `group_offsets` returns, or a reference to it.
        last_group: the group at which to stop: the number of groups, or one more to also visit the rows after them.
        tile_rows: the number of rows of a tile, a multiple of 8.
        visits: the number of the first pair to visit, the distance to the next one, and the number of column tiles.
        of_tile: the function ``(tile, column, steps so far) -> steps so far`` to call for each pair.

    Returns:
        The total number of steps of all visits.

    >>> tiles, offsets = [], group_offsets(jnp.array([5, 0, 19]), 32)
    >>> def of_tile(tile, column, step):
    ...     tiles.append([int(field) for field in tile])
    ...     return step
    >>> with jax.disable_jit():
    ...     _ = walk_tiles(offsets, 4, 8, (0, 1, 1), of_tile)
    >>> tiles
    [[0, 0, 0, 0, 5], [1, 2, 0, 5, 8], [2, 2, 8, 8, 16], [3, 2, 16, 16, 24], [4, 3, 24, 24, 32]]
    """
    first, distance, column_tiles = visits

    def seek(group: Group, visit: jax.Array) -> Group:
        number = jax.lax.div(visit, jnp.int32(column_tiles))

        def ends_before(group: Group) -> jax.Array:
            tiles_through = group.tiles_before + count_tiles(group.start, group.end, tile_rows)
            return (group.number < last_group) & (number >= tiles_through)

        def next_group(group: Group) -> Group:
            tiles_through = group.tiles_before + count_tiles(group.start, group.end, tile_rows)
            return Group(group.number + 1, group.end, group_offsets[group.number + 2], tiles_through)

        return jax.lax.while_loop(ends_before, next_group, group)

    def visit_one(state: tuple[jax.Array, Group, jax.Array]) -> tuple[jax.Array, Group, jax.Array]:
        visit, group, step = state
        tile = group.tile(jax.lax.div(visit, jnp.int32(column_tiles)), tile_rows)
        step = of_tile(tile, jax.lax.rem(visit, jnp.int32(column_tiles)), step)
        return visit + distance, seek(group, visit + distance), step

    first = jnp.asarray(first, jnp.int32)
    group = seek(Group(jnp.int32(0), group_offsets[0], group_offsets[1], jnp.int32(0)), first)
    state = (first, group, jnp.int32(0))
    return jax.lax.while_loop(lambda state: state[1].number < last_group, visit_one, state)[-1]
