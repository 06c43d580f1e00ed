"""Index arrays for contiguous segments of a buffer, such as the token copies of each slot.

They depend only on the sizes of the segments, so every process can compute where its rows are without communication.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.contract.types import EMPTY


def starts(sizes: Int[jax.Array, "..."], axis: int = -1) -> Int[jax.Array, "..."]:
    """Return the start of each segment when segments follow one another along ``axis``.

    >>> starts(jnp.array([3, 0, 2])).tolist()
    [0, 3, 3]
    """
    return jnp.cumsum(sizes, axis, dtype=sizes.dtype) - sizes


def places(chosen: Bool[jax.Array, "..."]) -> Int[jax.Array, "..."]:
    """Number the True entries along the last axis from 0; EMPTY for the others.

    >>> places(jnp.array([True, False, True])).tolist()
    [0, -1, 1]
    """
    return jnp.where(chosen, starts(chosen.astype(jnp.int32)), EMPTY)


def in_lanes(
    place: Int[jax.Array, "lanes n"], length: int, lane: Int[jax.Array, " lanes"] | None = None
) -> Int[jax.Array, "lanes n"]:
    """Convert positions inside lanes of equal length to positions in the concatenation of all lanes; EMPTY stays EMPTY.

    Args:
        place: positions in each lane.
        length: the length of a lane.
        lane: the index of each lane in the concatenation. None for ``0, 1, 2, ...``.

    >>> in_lanes(jnp.array([[0, 2], [-1, 1]]), 4).tolist()
    [[0, 2], [-1, 5]]
    """
    lane = jnp.arange(place.shape[0], dtype=jnp.int32) if lane is None else lane
    return jnp.where(place == EMPTY, EMPTY, lane[:, None] * length + place)


def segment_rows(
    length: int, start: Int[jax.Array, " n"], size: Int[jax.Array, " n"], source: Int[jax.Array, " n"]
) -> Int[jax.Array, " length"]:
    """Return the source row of every row of a buffer of segments; EMPTY for rows outside of the segments.

    Args:
        length: the number of rows of the buffer.
        start: the first row of each segment, ascending. Segments do not overlap; empty ones may share a start.
        size: the number of rows of each segment.
        source: the source row of each segment's first row. The source rows of a segment are contiguous.

    >>> segment_rows(6, jnp.array([0, 3]), jnp.array([2, 2]), jnp.array([10, 20])).tolist()
    [10, 11, -1, 20, 21, -1]
    """
    segment, offset = segment_of_row(length, start, size)
    return jnp.where(segment == EMPTY, EMPTY, source[segment] + offset)


def segment_of_row(
    length: int, start: Int[jax.Array, " n"], size: Int[jax.Array, " n"]
) -> tuple[Int[jax.Array, " length"], Int[jax.Array, " length"]]:
    """Return the segment of every row of a buffer (EMPTY for none), and the position of the row in its segment."""
    row = jnp.arange(length, dtype=jnp.int32)
    segment = jnp.searchsorted(start, row, side="right", method="scan_unrolled") - 1
    offset = row - start[segment]
    return jnp.where(offset < size[segment], segment, EMPTY), offset
