"""The grouped product of float8 operands on NVIDIA GPUs that multiply float8: a single Triton kernel."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.products import BlockScales, Sweep
from pallas_kernels.triton.block_sizes import float8_blocks
from pallas_kernels.triton.row_product_kernel import row_product_kernel
from pallas_kernels.triton.row_tiles import row_tiles


def grouped_dot_float8_triton(
    rows: jax.Array,
    row_scales: jax.Array,
    weights: Sequence[jax.Array],
    weight_scales: Sequence[jax.Array],
    group_sizes: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Multiply each tile of rows by the matrix of its group. The arguments have been checked."""
    blocks = float8_blocks(rows, group_sizes.shape[0])
    (out,) = row_product_kernel(
        [rows],
        [buffer[:, None] for buffer in weights],
        row_tiles(group_sizes, rows.shape[0], blocks.height),
        block_scales=BlockScales(row_scales.T, jnp.concatenate(weight_scales)),
        sums=[[Sweep(0, (0,))]],
        transposed=True,
        epilogue=lambda sums, _: (sums, None),
        out_dtype=out_dtype,
        padding=True,
        blocks=blocks,
    )
    return out
