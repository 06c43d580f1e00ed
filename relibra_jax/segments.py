"""Segments that follow one another along a line, such as the token copies of each slot: where each begins and ends.

Index arrays are derived from the segments' sizes alone, so that every process knows where its rows lie without asking.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.types import EMPTY


def starts(sizes: Int[jax.Array, "..."], axis: int = -1) -> Int[jax.Array, "..."]:
    """Where each segment starts when segments follow one another along ``axis``.

    >>> starts(jnp.array([3, 0, 2])).tolist()
    [0, 3, 3]
    """
    return jnp.cumsum(sizes, axis, dtype=sizes.dtype) - sizes


def places(chosen: Bool[jax.Array, "..."]) -> Int[jax.Array, "..."]:
    """The place of each chosen one among the chosen along the last axis; EMPTY for the others.

    >>> places(jnp.array([True, False, True])).tolist()
    [0, -1, 1]
    """
    return jnp.where(chosen, starts(chosen.astype(jnp.int32)), EMPTY)


def in_lanes(
    place: Int[jax.Array, "lanes n"], length: int, lane: Int[jax.Array, " lanes"] | None = None
) -> Int[jax.Array, "lanes n"]:
    """Places in lanes of one length as places in all of them; EMPTY stays.

    Args:
        place: places in each lane.
        length: the length of a lane.
        lane: where each lane stands among them; in order when None.

    >>> in_lanes(jnp.array([[0, 2], [-1, 1]]), 4).tolist()
    [[0, 2], [-1, 5]]
    """
    lane = jnp.arange(place.shape[0], dtype=jnp.int32) if lane is None else lane
    return jnp.where(place == EMPTY, EMPTY, lane[:, None] * length + place)


def segment_rows(
    length: int, start: Int[jax.Array, " n"], size: Int[jax.Array, " n"], source: Int[jax.Array, " n"]
) -> Int[jax.Array, " length"]:
    """The source row of every row of a buffer that consists of segments; EMPTY between and behind them.

    Args:
        length: rows of the buffer.
        start: first row of each segment, ascending; segments do not overlap, empty ones may share a start.
        size: rows of each segment.
        source: the row that a segment's first row comes from; the rest follow it.

    >>> segment_rows(6, jnp.array([0, 3]), jnp.array([2, 2]), jnp.array([10, 20])).tolist()
    [10, 11, -1, 20, 21, -1]
    """
    segment, offset = segment_of_row(length, start, size)
    return jnp.where(segment == EMPTY, EMPTY, source[segment] + offset)


def segment_of_row(
    length: int, start: Int[jax.Array, " n"], size: Int[jax.Array, " n"]
) -> tuple[Int[jax.Array, " length"], Int[jax.Array, " length"]]:
    """The segment that every row of a buffer lies in, EMPTY for none, and the row's place in it."""
    row = jnp.arange(length, dtype=jnp.int32)
    segment = jnp.searchsorted(start, row, side="right", method="scan_unrolled") - 1
    offset = row - start[segment]
    return jnp.where(offset < size[segment], segment, EMPTY), offset
