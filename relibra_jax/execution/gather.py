"""Rows of a buffer, gathered in both directions: what dispatch and combine are made of.

A buffer is a line of *segments* (the rows for one slot, from one rank). Index arrays are derived from the segments'
sizes alone, so that every process knows where its rows lie without asking. Moving rows is a gather, and so is its
transpose, because the inverse index is derived too: no scatter of rows, and sums in a fixed order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.types import EMPTY


def starts(sizes: Int[jax.Array, "..."], axis: int = -1) -> Int[jax.Array, "..."]:
    """Where each segment starts when segments follow one another along ``axis``.

    >>> starts(jnp.array([3, 0, 2])).tolist()
    [0, 3, 3]
    """
    return jnp.cumsum(sizes, axis, dtype=sizes.dtype) - sizes


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


def inverse_index(index: Int[jax.Array, " r"], length: int) -> Int[jax.Array, " length"]:
    """For each of ``0..length-1``, the place in ``index`` that names it; EMPTY where none does.

    >>> inverse_index(jnp.array([2, -1, 0]), 4).tolist()
    [2, -1, 0, -1]
    """
    places = jnp.arange(index.shape[0], dtype=jnp.int32)
    return jnp.full(length, EMPTY, jnp.int32).at[_outside(index, length)].set(places, mode="drop")


@jax.custom_vjp
def gather_rows(
    rows: Float[jax.Array, "t *d"], source: Int[jax.Array, " r"], places: Int[jax.Array, "t c"]
) -> Float[jax.Array, "r *d"]:
    """Copy rows to where ``source`` says: row ``i`` of the result is ``rows[source[i]]``, zero where EMPTY.

    Args:
        rows: up to ``c`` copies of each are made.
        source: the row that each result row copies.
        places: the rows of the result that copy each row, EMPTY for none: the inverse of ``source``.
    """
    del places
    return _take(rows, source)


@jax.custom_vjp
def combine_rows(
    rows: Float[jax.Array, "r *d"], source: Int[jax.Array, " r"], places: Int[jax.Array, "t c"]
) -> Float[jax.Array, "t *d"]:
    """The transpose of `gather_rows`: the sum of each row's copies, in the order of ``places``, in float32 or more."""
    del source
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total = sum(_take(rows, places[:, copy]).astype(wide) for copy in range(places.shape[1]))
    return jnp.asarray(total, rows.dtype)


gather_rows.defvjp(
    lambda rows, source, places: (gather_rows(rows, source, places), (source, places)),
    lambda index, cotangent: (combine_rows(cotangent, *index), None, None),
)
combine_rows.defvjp(
    lambda rows, source, places: (combine_rows(rows, source, places), (source, places)),
    lambda index, cotangent: (gather_rows(cotangent, *index), None, None),
)


def _take(rows, index):
    return rows.at[_outside(index, rows.shape[0])].get(mode="fill", fill_value=0)


def _outside(index, length):
    """EMPTY as an index behind the end, which scatters drop and gathers fill; -1 would be the last row."""
    return jnp.where(index == EMPTY, length, index)
