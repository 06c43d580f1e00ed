"""The grouped product of float8 operands on Hopper GPUs, a single kernel on float8 tensor cores (wgmma)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.persistent_kernel import pad_rows
from pallas_kernels.hopper.row_product_kernel import row_product_kernel
from pallas_kernels.hopper.tile_sizes import Problem, choose_float8_tile_sizes
from pallas_kernels.hopper.tile_walk import group_offsets
from pallas_kernels.products import BlockScales, Sweep


def grouped_dot_float8_mosaic(
    rows: jax.Array,
    row_scales: jax.Array,
    weights: Sequence[jax.Array],
    weight_scales: Sequence[jax.Array],
    group_sizes: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Multiply each tile of rows by the matrix of its group. The arguments have been checked."""
    num_rows, contraction = rows.shape
    num_groups, columns = group_sizes.shape[0], weights[0].shape[1]
    tiles = choose_float8_tile_sizes(
        Problem(
            matrices=1,
            contraction=contraction,
            output_width=columns,
            output_height=num_rows // num_groups,
            groups=num_groups,
        )
    )
    rows = pad_rows(rows)
    (out,) = row_product_kernel(
        [rows],
        [buffer[:, None] for buffer in weights],
        group_offsets(group_sizes, rows.shape[0]),
        block_scales=BlockScales(pad_rows(row_scales).T, jnp.concatenate(weight_scales)),
        sums=[[Sweep(0, (0,))]],
        transposed=True,
        epilogue=lambda sums, _: (sums, None),
        out_dtype=out_dtype,
        padding=True,
        tiles=tiles,
    )
    return out[:num_rows]
