"""Blocked grouped products in plain XLA, for any platform: a pass over the home slots, then one over the replicas."""

from typing import Any

import jax

from pallas_kernels.blocks import Tile, accumulator, dot, group_bounds, over_groups, over_tiles, zeros


def grouped_dot_xla(
    rows: jax.Array,
    home: jax.Array,
    replica: jax.Array,
    group_sizes: jax.Array,
    transposed: bool,
    out_dtype: Any,
) -> jax.Array:
    """Each tile of rows times its group's matrix."""
    bounds = group_bounds(group_sizes, rows.shape[0])
    out = zeros((rows.shape[0], home.shape[1 if transposed else 2]), out_dtype, bounds, rows)
    for weights, ends in ((home, bounds), (replica, bounds[home.shape[0] :])):

        def of_group(group: jax.Array, out: Any, weights: jax.Array = weights, ends: jax.Array = ends) -> Any:
            def of_tile(tile: Tile, out: jax.Array) -> jax.Array:
                return tile.write(out, dot(tile.read(rows), weights[group], 1, 1 if transposed else 0))

            return over_tiles(of_tile, out, ends[group], ends[group + 1], rows.shape[0])

        out = over_groups(of_group, out, weights)
    return out


def grouped_outer_xla(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, slots: tuple[int, int], out_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Each group's sum over its tiles, written once."""
    bounds = group_bounds(group_sizes, lhs.shape[0])
    shape = (lhs.shape[1], rhs.shape[1])

    def of_group(group: jax.Array, out: jax.Array) -> jax.Array:
        def of_tile(tile: Tile, total: jax.Array) -> jax.Array:
            return total + dot(tile.read(lhs), tile.read(rhs), 0, 0)

        total = zeros(shape, accumulator(lhs), bounds, lhs)
        total = over_tiles(of_tile, total, bounds[group], bounds[group + 1], lhs.shape[0])
        return jax.lax.dynamic_update_index_in_dim(out, total.astype(out_dtype), group, 0)

    outer = zeros((sum(slots), *shape), out_dtype, bounds, lhs)
    outer = over_groups(of_group, outer, outer)
    return outer[: slots[0]], outer[slots[0] :]
