"""The grouped products on Hopper GPUs, each a single kernel; for bfloat16, with k and n multiples of 64."""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.hopper.persistent_kernel import pad_rows
from pallas_kernels.hopper.row_product_kernel import row_product_kernel
from pallas_kernels.hopper.tile_sizes import Problem, choose_tile_sizes
from pallas_kernels.hopper.tile_walk import group_offsets
from pallas_kernels.hopper.weight_gradient_kernel import weight_gradient_kernel
from pallas_kernels.products import Sweep


def grouped_dot_mosaic(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    transposed: bool,
    out_dtype: Any,
) -> jax.Array:
    """Multiply each tile of rows by the matrix of its group. The arguments have been checked by `grouped_dot`."""
    num_rows, contraction = rows.shape
    columns = weights[0].shape[1 if transposed else 2]
    num_groups = group_sizes.shape[0]
    tiles = choose_tile_sizes(
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
        sums=[[Sweep(0, (0,))]],
        transposed=transposed,
        epilogue=lambda sums, _: (sums, None),
        out_dtype=out_dtype,
        padding=True,
        tiles=tiles,
    )
    return out[:num_rows]


def grouped_outer_mosaic(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, slots: tuple[int, ...], out_dtype: Any
) -> list[jax.Array]:
    """Sum the outer products of each group, one tile of the group's matrix at a time."""
    num_groups = sum(slots)
    tiles = choose_tile_sizes(
        Problem(
            matrices=0,
            contraction=lhs.shape[0] // num_groups,
            output_width=rhs.shape[1],
            output_height=lhs.shape[1],
            groups=num_groups,
        )
    )
    lhs, rhs = pad_rows(lhs), pad_rows(rhs)
    offsets = group_offsets(group_sizes, lhs.shape[0])
    gradients = weight_gradient_kernel([(lhs, rhs)], offsets, slots, out_dtype=out_dtype, tiles=tiles)
    return [gradient[:, 0] for gradient in gradients]
