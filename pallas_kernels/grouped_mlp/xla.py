"""The grouped MLP in plain XLA for any platform, as loops over the slots of each weight buffer.

JAX cannot differentiate the loops of `pallas_kernels.group_loops` in reverse mode, so the gradient is written by hand.
With ``g = x W0``, ``u = x W1``, ``h = silu(g) u`` and ``y = s h W2^T``, the backward pass of a tile recomputes ``g``
and ``u``. It does not need ``y``, since ``ds = <dy, h W2^T> = <dy W2, h>``. The weight gradient of a group is summed in
float32 over the group's tiles and written once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_mlp(
    out_dtype: Any,
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    row_scale: jax.Array,
) -> jax.Array:
    dtype = accumulator_dtype(rows)
    scale = row_scale.astype(dtype)[:, None]
    bounds = group_bounds(group_sizes, rows.shape[0])
    out = runtime_zeros(rows.shape, out_dtype, bounds, rows)
    for buffer, ends in with_bounds(weights, bounds):
        out = _forward_pass(out, rows, buffer, ends, scale)
    return out


def _forward_pass(
    out: jax.Array, rows: jax.Array, weights: jax.Array, bounds: jax.Array, scale: jax.Array
) -> jax.Array:
    """Return ``out`` with the output rows of one weight buffer written into it."""

    def of_group(group: jax.Array, out: jax.Array) -> jax.Array:
        gate, up, down = weights[group]

        def of_tile(tile: Tile, out: jax.Array) -> jax.Array:
            x = tile.read(rows)
            hidden = jax.nn.silu(contract(x, gate, 1, 0)) * contract(x, up, 1, 0)
            return tile.write(out, contract(hidden.astype(rows.dtype), down, 1, 1) * tile.read(scale))

        return loop_over_tiles(of_tile, out, bounds[group], bounds[group + 1], rows.shape[0])

    return loop_over_groups(of_group, out, weights)


def _forward(out_dtype: Any, *operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped_mlp(out_dtype, *operands), operands


def _backward(_: Any, saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    rows, weights, group_sizes, row_scale = saved
    d_out = d_out.astype(rows.dtype)
    scale = row_scale.astype(accumulator_dtype(rows))[:, None]
    bounds = group_bounds(group_sizes, rows.shape[0])
    row_gradients = (runtime_zeros(rows.shape, rows.dtype, bounds, rows), jnp.zeros_like(scale))
    d_weights = []
    for buffer, ends in with_bounds(weights, bounds):
        row_gradients, d_buffer = _backward_pass(row_gradients, rows, buffer, ends, scale, d_out)
        d_weights.append(d_buffer)
    d_rows, d_scale = row_gradients
    return d_rows, tuple(d_weights), None, d_scale[:, 0].astype(row_scale.dtype)


def _backward_pass(
    row_gradients: tuple[jax.Array, jax.Array],
    rows: jax.Array,
    weights: jax.Array,
    bounds: jax.Array,
    scale: jax.Array,
    d_out: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Return the row and scale gradients with the rows of one weight buffer written, and that buffer's gradient."""
    dtype = scale.dtype

    def of_group(group: jax.Array, carry: Any) -> Any:
        row_gradients, d_weights = carry
        gate, up, down = weights[group]

        def of_tile(tile: Tile, carry: Any) -> Any:
            (d_rows, d_scale), (d_gate, d_up, d_down) = carry
            x, dy, s = tile.read(rows), tile.read(d_out), tile.read(scale)
            g, u = contract(x, gate, 1, 0), contract(x, up, 1, 0)
            sigmoid = jax.nn.sigmoid(g)
            silu = g * sigmoid
            unscaled = contract(dy, down, 1, 0)
            hidden, d_hidden = silu * u, unscaled * s
            dg = (d_hidden * u * (sigmoid + silu * (1 - sigmoid))).astype(rows.dtype)
            du = (d_hidden * silu).astype(rows.dtype)
            d_rows = tile.write(d_rows, contract(dg, gate, 1, 1) + contract(du, up, 1, 1))
            d_scale = tile.write(d_scale, jnp.sum(unscaled * hidden, -1, keepdims=True))
            d_gate, d_up = d_gate + contract(x, dg, 0, 0), d_up + contract(x, du, 0, 0)
            d_down = d_down + contract((dy * s).astype(rows.dtype), hidden.astype(rows.dtype), 0, 0)
            return (d_rows, d_scale), (d_gate, d_up, d_down)

        sums = (jnp.zeros_like(gate, dtype),) * 3
        row_gradients, sums = loop_over_tiles(
            of_tile, (row_gradients, sums), bounds[group], bounds[group + 1], rows.shape[0]
        )
        d_group = jnp.stack(sums).astype(weights.dtype)
        return row_gradients, jax.lax.dynamic_update_index_in_dim(d_weights, d_group, group, 0)

    return loop_over_groups(
        of_group, (row_gradients, runtime_zeros(weights.shape, weights.dtype, bounds, weights)), weights
    )


_grouped_mlp.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=4)
def grouped_mlp_xla(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    row_scale: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Compute `grouped_mlp` in tiles of rows. A call outside `jax.jit` is compiled once, and then reused."""
    return _grouped_mlp(out_dtype, rows, weights, group_sizes, row_scale)
