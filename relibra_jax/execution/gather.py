"""Gathers of buffer rows and their transposes, the building blocks of dispatch and combine.

A buffer is a sequence of *segments* (`relibra_jax.routing.segments`), each with the rows for one slot from one rank.
Rows move by a gather. The transpose is a gather too, by the inverse index, so that no scatter of rows is needed and
sums have a fixed order.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num

from relibra_jax.contract.types import EMPTY


def inverse_index(index: Int[jax.Array, " r"], length: int) -> Int[jax.Array, " length"]:
    """Invert an index: for each of ``0..length-1``, the place where ``index`` has it; EMPTY if it does not occur.

    >>> inverse_index(jnp.array([2, -1, 0]), 4).tolist()
    [2, -1, 0, -1]
    """
    places = jnp.arange(index.shape[0], dtype=jnp.int32)
    return jnp.full(length, EMPTY, jnp.int32).at[_outside(index, length)].set(places, mode="drop")


@jax.custom_vjp
def gather_rows(
    rows: Num[jax.Array, "t *d"], source: Int[jax.Array, " r"], places: Int[jax.Array, "t c"]
) -> Num[jax.Array, "r *d"]:
    """Gather rows: row ``i`` of the result is ``rows[source[i]]``, or zero if ``source[i]`` is EMPTY.

    Args:
        rows: the rows, of which each is copied at most ``c`` times.
        source: the row that each result row copies.
        places: the result rows that copy each row, EMPTY for none: the inverse of ``source``.
    """
    del places
    return take_rows(rows, source)


@jax.custom_vjp
def combine_rows(
    rows: Float[jax.Array, "r *d"], source: Int[jax.Array, " r"], places: Int[jax.Array, "t c"]
) -> Float[jax.Array, "t *d"]:
    """Sum the copies of each row, in the order of ``places``, in float32 or wider; the transpose of `gather_rows`."""
    del source
    return sum_picked(functools.partial(take_rows, rows), places)


gather_rows.defvjp(
    lambda rows, source, places: (gather_rows(rows, source, places), (source, places)),
    lambda index, cotangent: (combine_rows(cotangent, *index), None, None),
)
combine_rows.defvjp(
    lambda rows, source, places: (combine_rows(rows, source, places), (source, places)),
    lambda index, cotangent: (gather_rows(cotangent, *index), None, None),
)


def sum_picked(pick: Callable[[jax.Array], jax.Array], places: Int[jax.Array, "t c"]) -> jax.Array:
    """Sum ``pick(places[:, 0])``, ``pick(places[:, 1])`` and so on, in float32 or wider; return it in their dtype."""
    picked = [pick(places[:, copy]) for copy in range(places.shape[1])]
    wide = jnp.promote_types(picked[0].dtype, jnp.float32)
    return jnp.asarray(sum(rows.astype(wide) for rows in picked), picked[0].dtype)


def take_rows(rows: Num[jax.Array, "t *d"], index: Int[jax.Array, " r"]) -> Num[jax.Array, "r *d"]:
    """Gather the rows at ``index``; zero where it is EMPTY."""
    return rows.at[_outside(index, rows.shape[0])].get(mode="fill", fill_value=0)


def _outside(index, length):
    """Replace EMPTY by an index past the end, which scatters drop and gathers fill; -1 would be the last row."""
    return jnp.where(index == EMPTY, length, index)
