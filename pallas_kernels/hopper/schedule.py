"""Which rows make a tile, found by walking through the groups: no table is made before a kernel starts.

A tile belongs to one group and starts at a multiple of 8 rows, so that the hardware can copy it: the first tile of a
group may hold up to 7 rows of the group before, which it does not own. Rows beyond the last group are a group too.
Tiles are numbered through all groups. A block visits ever higher numbers, so that all it has to remember is the group
where it stands: bounds are read once a group, and a tile of the same group costs a comparison.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import group_bounds

ALIGNED = 8
"""Copies into shared memory start at a multiple of so many rows: what wgmma reads is tiled by 8 x 64 elements."""


class Tile(NamedTuple):
    """A tile of rows; int32 all."""

    number: jax.Array
    group: jax.Array
    """The number of groups stands for the rows beyond the last."""
    first: jax.Array
    """Where the tile starts, a multiple of 8."""
    start: jax.Array
    """The first row that it owns."""
    end: jax.Array
    """After the last row that it owns."""


class Group(NamedTuple):
    """Where a walk stands; int32 all."""

    number: jax.Array
    start: jax.Array
    end: jax.Array
    tiles_before: jax.Array
    """Tiles of all groups before it."""

    def cut(self, number: jax.Array, rows: int) -> Tile:
        """The tile of that number, one of this group's, ``rows`` high."""
        first = align(self.start) + (number - self.tiles_before) * rows
        return Tile(
            number, self.number, first, jnp.maximum(first, self.start), jnp.minimum(first + rows, self.end)
        )


def align(row: jax.Array) -> jax.Array:
    """The last row at or before it where a tile can start."""
    return row & -ALIGNED


def tiles_of(start: jax.Array, end: jax.Array, rows: int) -> jax.Array:
    """How many tiles of ``rows`` rows a group has."""
    return jnp.where(end > start, jax.lax.div(end - align(start) + (rows - 1), jnp.int32(rows)), 0)


def walls(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Where each group starts and ends, for kernels to read.

    Args:
        group_sizes: ``[groups]`` integer.
        num_rows: of the array; what lies behind the last group is padding.

    Returns:
        ``[groups + 3]`` int32: the starts, the end of the last group, and twice the end of the rows: so there is a
        group of padding, and one to stand at behind it.

    >>> walls(jnp.array([5, 0, 19]), 32).tolist()
    [0, 5, 5, 24, 32, 32]
    """
    return jnp.pad(group_bounds(group_sizes, num_rows), (0, 2), constant_values=num_rows)


def walk(
    walls: Any, last: int, rows: int, visits: tuple[Any, Any, int], of_tile: Callable[..., jax.Array]
) -> jax.Array:
    """Visit every n-th pair of a tile of rows and a tile of columns; columns of one tile of rows in a row.

    Args:
        walls: an array from `walls`, or a reference to one.
        last: the group at which to stop: the number of groups, or one more to visit the rows beyond them.
        rows: of a tile, a multiple of 8.
        visits: the first visit, the distance to the next one, and how many tiles of columns there are.
        of_tile: ``(tile, column, steps so far) -> steps so far``.

    Returns:
        The steps of all visits.

    >>> found, groups = [], walls(jnp.array([5, 0, 19]), 32)
    >>> with jax.disable_jit():
    ...     _ = walk(groups, 4, 8, (0, 1, 1), lambda tile, _, step: found.append([int(x) for x in tile]) or step)
    >>> found
    [[0, 0, 0, 0, 5], [1, 2, 0, 5, 8], [2, 2, 8, 8, 16], [3, 2, 16, 16, 24], [4, 3, 24, 24, 32]]
    """
    first, distance, across = visits

    def seek(group: Group, visit: jax.Array) -> Group:
        number = jax.lax.div(visit, jnp.int32(across))

        def ends_before(group: Group) -> jax.Array:
            behind = group.tiles_before + tiles_of(group.start, group.end, rows)
            return (group.number < last) & (number >= behind)

        def next_group(group: Group) -> Group:
            behind = group.tiles_before + tiles_of(group.start, group.end, rows)
            return Group(group.number + 1, group.end, walls[group.number + 2], behind)

        return jax.lax.while_loop(ends_before, next_group, group)

    def visit_one(state: tuple[jax.Array, Group, jax.Array]) -> tuple[jax.Array, Group, jax.Array]:
        visit, group, step = state
        tile = group.cut(jax.lax.div(visit, jnp.int32(across)), rows)
        step = of_tile(tile, jax.lax.rem(visit, jnp.int32(across)), step)
        return visit + distance, seek(group, visit + distance), step

    first = jnp.asarray(first, jnp.int32)
    group = seek(Group(jnp.int32(0), walls[0], walls[1], jnp.int32(0)), first)
    state = (first, group, jnp.int32(0))
    return jax.lax.while_loop(lambda state: state[1].number < last, visit_one, state)[-1]
