"""The reference implementation of the grouped MLP: every row is multiplied by its own copy of the weights.

It defines what a grouped MLP means, for tests and small shapes only: it gathers an array ``[r, 3, D, F]``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.group_loops import group_bounds


def grouped_mlp_reference(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    row_scale: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Compute `grouped_mlp` in float32 (float64 for float64 rows) at the highest precision, with JAX's gradient."""
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    ends = group_bounds(group_sizes, rows.shape[0])[1:]
    slot = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
    real = slot < group_sizes.shape[0]
    # Padding is set to zero before it is multiplied by the last slot's weights: it affects no value and no gradient.
    matrices = jnp.concatenate(weights).astype(dtype)[jnp.minimum(slot, group_sizes.shape[0] - 1)]
    x = jnp.where(real[:, None], rows, 0).astype(dtype)
    with jax.default_matmul_precision("highest"):
        gate = jnp.einsum("rd,rdf->rf", x, matrices[:, 0])
        up = jnp.einsum("rd,rdf->rf", x, matrices[:, 1])
        down = jnp.einsum("rf,rdf->rd", jax.nn.silu(gate) * up, matrices[:, 2])
    scaled = down * jnp.where(real, row_scale, 0).astype(dtype)[:, None]
    return jnp.where(real[:, None], scaled, 0).astype(out_dtype)
