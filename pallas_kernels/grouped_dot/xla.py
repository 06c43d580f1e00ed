"""The grouped products in plain XLA for any platform, as loops over the slots of each weight buffer."""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.group_loops import (
    Tile,
    accumulator_dtype,
    contract,
    group_bounds,
    loop_over_groups,
    loop_over_tiles,
    runtime_zeros,
    with_bounds,
)


def grouped_dot_xla(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    transposed: bool,
    out_dtype: Any,
) -> jax.Array:
    """Multiply each tile of rows by the matrix of its group. The arguments have been checked by `grouped_dot`."""
    bounds = group_bounds(group_sizes, rows.shape[0])
    out = runtime_zeros((rows.shape[0], weights[0].shape[1 if transposed else 2]), out_dtype, bounds, rows)
    for buffer, ends in with_bounds(weights, bounds):

        def of_group(group: jax.Array, out: Any, buffer: jax.Array = buffer, ends: jax.Array = ends) -> Any:
            def of_tile(tile: Tile, out: jax.Array) -> jax.Array:
                return tile.write(out, contract(tile.read(rows), buffer[group], 1, 1 if transposed else 0))

            return loop_over_tiles(of_tile, out, ends[group], ends[group + 1], rows.shape[0])

        out = loop_over_groups(of_group, out, buffer)
    return out


def grouped_outer_xla(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, slots: tuple[int, ...], out_dtype: Any
) -> list[jax.Array]:
    """Sum the outer products over the tiles of each group, and write the sum of each group once."""
    bounds = group_bounds(group_sizes, lhs.shape[0])
    shape = (lhs.shape[1], rhs.shape[1])
    zeros = [runtime_zeros((count, *shape), out_dtype, bounds, lhs) for count in slots]
    outer = []
    for buffer, ends in with_bounds(zeros, bounds):

        def of_group(group: jax.Array, buffer: jax.Array, ends: jax.Array = ends) -> jax.Array:
            def of_tile(tile: Tile, total: jax.Array) -> jax.Array:
                return total + contract(tile.read(lhs), tile.read(rhs), 0, 0)

            total = runtime_zeros(shape, accumulator_dtype(lhs), bounds, lhs)
            total = loop_over_tiles(of_tile, total, ends[group], ends[group + 1], lhs.shape[0])
            return jax.lax.dynamic_update_index_in_dim(buffer, total.astype(out_dtype), group, 0)

        outer.append(loop_over_groups(of_group, buffer, buffer))
    return outer
