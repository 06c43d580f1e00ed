"""Rows of a buffer, gathered in both directions: what dispatch and combine are made of.

A buffer is a line of *segments* (`relibra_jax.segments`): the rows for one slot, from one rank. Moving rows is a
gather, and so is its transpose, because the inverse index is derived too: no scatter of rows, and sums in a fixed
order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num

from relibra_jax.types import EMPTY


def inverse_index(index: Int[jax.Array, " r"], length: int) -> Int[jax.Array, " length"]:
    """For each of ``0..length-1``, the place in ``index`` that names it; EMPTY where none does.

    >>> inverse_index(jnp.array([2, -1, 0]), 4).tolist()
    [2, -1, 0, -1]
    """
    places = jnp.arange(index.shape[0], dtype=jnp.int32)
    return jnp.full(length, EMPTY, jnp.int32).at[_outside(index, length)].set(places, mode="drop")


@jax.custom_vjp
def gather_rows(
    rows: Num[jax.Array, "t *d"], source: Int[jax.Array, " r"], places: Int[jax.Array, "t c"]
) -> Num[jax.Array, "r *d"]:
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
