"""The operands of a grouped MLP, and their checks, shared by all grouped MLP functions."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.implementation import check_group_sizes, check_weights, describe

type Array = jax.Array | np.ndarray


class Operands(NamedTuple):
    """The operands of a grouped MLP, with shapes and dtypes that have been checked."""

    rows: jax.Array
    """The row operand, ``[r, D]``."""
    buffers: tuple[jax.Array, ...]
    """The weight buffers that have slots, ``[slots, 3, D, F]`` each."""
    group_sizes: jax.Array
    """The number of rows of each slot, ``[all slots]``."""
    row_scale: jax.Array
    """The factor of each row of the output, ``[r]``."""


def check_operands(
    rows: Array, weights: Sequence[Array], group_sizes: Array, row_scale: Array | None
) -> Operands:
    """Check the operands of a grouped MLP, which `pallas_kernels.grouped_mlp` describes.

    Args:
        rows: the row operand.
        weights: the weight buffers.
        group_sizes: the number of rows of each slot.
        row_scale: the factor of each row of the output. None stands for 1.

    Returns:
        The operands as JAX arrays, without the weight buffers that have no slots.

    Raises:
        ValueError: if shapes or dtypes do not match.
    """
    rows, group_sizes = jnp.asarray(rows), jnp.asarray(group_sizes)
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"rows: expected floating [r, D], found {describe(rows)}")
    buffers = check_weights(weights, rows, 3, rows.shape[1], "F")
    check_group_sizes(group_sizes, [buffer.shape[0] for buffer in buffers])
    if row_scale is None:
        row_scale = jnp.ones(rows.shape[0], jnp.promote_types(rows.dtype, jnp.float32))
    row_scale = jnp.asarray(row_scale)
    if row_scale.shape != rows.shape[:1] or not jnp.issubdtype(row_scale.dtype, jnp.floating):
        raise ValueError(
            f"row_scale: expected floating [{rows.shape[0]}] for rows {describe(rows)}, found {describe(row_scale)}"
        )
    return Operands(rows, buffers, group_sizes, row_scale)
