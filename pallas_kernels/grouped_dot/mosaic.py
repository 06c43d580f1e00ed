"""Grouped products for Hopper, a kernel each; bfloat16, k and n multiples of 64."""

from typing import Any

import jax

from pallas_kernels.hopper.launch import align_rows
from pallas_kernels.hopper.rows import Sweep, rows_kernel
from pallas_kernels.hopper.schedule import walls
from pallas_kernels.hopper.tiles import Problem, choose
from pallas_kernels.hopper.weights import weights_kernel


def grouped_dot_mosaic(
    rows: jax.Array,
    home: jax.Array,
    replica: jax.Array,
    group_sizes: jax.Array,
    transposed: bool,
    out_dtype: Any,
) -> jax.Array:
    """Each tile of rows times its group's matrix."""
    num_rows, contraction = rows.shape
    columns = home.shape[1 if transposed else 2]
    slots = group_sizes.shape[0]
    tiles = choose(Problem(1, contraction, columns, num_rows // slots, slots))
    rows = align_rows(rows)
    (out,) = rows_kernel(
        [rows],
        home[:, None],
        replica[:, None],
        walls(group_sizes, rows.shape[0]),
        sums=[[Sweep(0, (0,))]],
        transposed=transposed,
        epilogue=lambda sums, _: (sums, None),
        out_dtype=out_dtype,
        padding=True,
        tiles=tiles,
    )
    return out[:num_rows]


def grouped_outer_mosaic(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, slots: tuple[int, int], out_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Each tile of a group's matrix, summed over the group's rows."""
    expected = lhs.shape[0] // sum(slots)
    tiles = choose(Problem(0, expected, rhs.shape[1], lhs.shape[1], sum(slots)))
    lhs, rhs = align_rows(lhs), align_rows(rhs)
    groups = walls(group_sizes, lhs.shape[0])
    home, replica = weights_kernel([(lhs, rhs)], groups, slots, out_dtype=out_dtype, tiles=tiles)
    return home[:, 0], replica[:, 0]
