"""The reference implementation of the grouped products, short and in float32 (or float64) at the highest precision.

It defines what the products mean, for tests and small shapes only: it gathers a matrix for every row, and repeats all
rows with a mask for every group.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.group_loops import accumulator_dtype, group_bounds


def grouped_dot_reference(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    transposed: bool,
    out_dtype: Any,
) -> jax.Array:
    """Multiply every row by its own copy of the matrix. The arguments have been checked by `grouped_dot`."""
    slot = _slots(group_sizes, rows.shape[0])
    real = slot < group_sizes.shape[0]
    matrices = jnp.concatenate(weights)[jnp.minimum(slot, group_sizes.shape[0] - 1)]
    # Rows and matrices of padding are both set to zero, so that its values (NaN included) affect no result.
    x, matrices = jnp.where(real[:, None], rows, 0), jnp.where(real[:, None, None], matrices, 0)
    with jax.default_matmul_precision("highest"):
        product = "rk,rnk->rn" if transposed else "rk,rkn->rn"
        return jnp.einsum(product, x, matrices, preferred_element_type=accumulator_dtype(rows)).astype(
            out_dtype
        )


def grouped_outer_reference(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, slots: tuple[int, ...], out_dtype: Any
) -> list[jax.Array]:
    """Sum the outer products over all rows for every group, with the rows of other groups set to zero."""
    own = _slots(group_sizes, lhs.shape[0])[None] == jnp.arange(sum(slots))[:, None]
    a, b = (jnp.where(own[..., None], rows, 0) for rows in (lhs, rhs))
    with jax.default_matmul_precision("highest"):
        outer = jnp.einsum("grk,grn->gkn", a, b, preferred_element_type=accumulator_dtype(lhs)).astype(
            out_dtype
        )
    return jnp.split(outer, np.cumsum(slots)[:-1])


def _slots(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Return the slot of each row, ``[r]``. Padding has the number of groups as its slot."""
    return jnp.searchsorted(group_bounds(group_sizes, num_rows)[1:], jnp.arange(num_rows), side="right")
