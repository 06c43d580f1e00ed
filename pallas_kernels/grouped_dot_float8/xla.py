"""The grouped product of float8 operands on every platform: their values are products of wider numbers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_dot.api import grouped_dot
from pallas_kernels.products import SCALE_BLOCK


def grouped_dot_float8_xla(
    rows: jax.Array,
    row_scales: jax.Array,
    weights: Sequence[jax.Array],
    weight_scales: Sequence[jax.Array],
    group_sizes: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Multiply all operands by their scales, in the dtype of the scales, and use `grouped_dot`."""
    matrices = [
        _scaled(buffer, jnp.repeat(scales, SCALE_BLOCK, axis=1))
        for buffer, scales in zip(weights, weight_scales, strict=True)
    ]
    rows = _scaled(rows, row_scales)
    return grouped_dot(
        rows, matrices, group_sizes, transposed=True, out_dtype=out_dtype, implementation="xla"
    )


def _scaled(values: jax.Array, scales: jax.Array) -> jax.Array:
    return values.astype(scales.dtype) * jnp.repeat(scales, SCALE_BLOCK, axis=-1)
