"""The grouped products on NVIDIA GPUs of compute capability 8.0 or higher, each a single Triton kernel for any k, n."""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.group_loops import group_bounds
from pallas_kernels.products import Sweep
from pallas_kernels.triton.block_sizes import row_product_blocks, weight_gradient_blocks
from pallas_kernels.triton.row_product_kernel import row_product_kernel
from pallas_kernels.triton.row_tiles import row_tiles
from pallas_kernels.triton.weight_gradient_kernel import weight_gradient_kernel


def grouped_dot_triton(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    transposed: bool,
    out_dtype: Any,
) -> jax.Array:
    """Multiply each tile of rows by the matrix of its group. The arguments have been checked by `grouped_dot`."""
    columns = weights[0].shape[1 if transposed else 2]
    blocks = row_product_blocks(rows, group_sizes.shape[0], columns)
    (out,) = row_product_kernel(
        [rows],
        [buffer[:, None] for buffer in weights],
        row_tiles(group_sizes, rows.shape[0], blocks.height),
        sums=[[Sweep(0, (0,))]],
        transposed=transposed,
        epilogue=lambda sums, _: (sums, None),
        out_dtype=out_dtype,
        padding=True,
        blocks=blocks,
    )
    return out


def grouped_outer_triton(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, slots: tuple[int, ...], out_dtype: Any
) -> list[jax.Array]:
    """Sum the outer products of each group, one block of the group's matrix at a time."""
    bounds = group_bounds(group_sizes, lhs.shape[0])
    blocks = weight_gradient_blocks(lhs, rhs)
    gradients = weight_gradient_kernel([(lhs, rhs)], bounds, slots, out_dtype=out_dtype, blocks=blocks)
    return [gradient[:, 0] for gradient in gradients]
