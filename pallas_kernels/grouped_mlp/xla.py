"""Blocked grouped MLP in plain XLA, for any platform: loops over groups, and over tiles of rows inside each.

Trip counts are data, so only rows that exist are computed, and weights are read where they lie: a pass over the
home slots, then one over the replica slots. A group's rows go in tiles of the largest size, the rest of them in
tiles of the smallest. The last tile of a group may reach into its neighbour: it reads those rows as zeros and
leaves them alone when it writes, so padding needs no care of its own.

JAX cannot differentiate such loops backwards, and should not: with ``g = x W0``, ``u = x W1``, ``h = silu(g) u`` and
``y = s h W2^T`` the gradients of a tile need ``g`` and ``u`` again, and no ``y``, since
``ds = <dy, h W2^T> = <dy W2, h>``. A group's weight gradient is summed in float32 over its tiles and written once.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

TILES: Final = (256, 64)
"""Rows of a tile, largest first. Large tiles read weights and sum weight gradients seldom, small ones waste few rows
at the end of a group; the pair serves groups of ten rows and of thousands. On two CPU cores, 32,768 rows in 64 uneven
groups, forward and backward against a dense MLP: 1.2 for 256 and 64, 1.3 for 64 alone, 1.5 for 256 alone."""


class Tile(NamedTuple):
    """Consecutive rows, of which a group owns some."""

    first: jax.Array
    """The first row, int32."""
    own: jax.Array
    """``[tile, 1]``, True where the row belongs to the group."""

    def read(self, array: jax.Array) -> jax.Array:
        """The tile of ``array[r, ...]``, zero where another owns the row."""
        return jnp.where(self.own, self._slice(array), 0)

    def write(self, array: jax.Array, values: jax.Array) -> jax.Array:
        """``array`` with the group's own rows of the tile replaced."""
        kept = jnp.where(self.own, values.astype(array.dtype), self._slice(array))
        return jax.lax.dynamic_update_slice_in_dim(array, kept, self.first, 0)

    def _slice(self, array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.own.shape[0])


@jax.custom_vjp
def _grouped_mlp(
    rows: jax.Array, home: jax.Array, replica: jax.Array, group_sizes: jax.Array, row_scale: jax.Array
) -> jax.Array:
    dtype = _accumulator(rows)
    scale = row_scale.astype(dtype)[:, None]
    bounds = _bounds(group_sizes, rows.shape[0])
    homes = home.shape[0]
    out = _forward_pass(_zeros(rows, bounds), rows, home, bounds[: homes + 1], scale)
    return _forward_pass(out, rows, replica, bounds[homes:], scale)


def _forward_pass(
    out: jax.Array, rows: jax.Array, weights: jax.Array, bounds: jax.Array, scale: jax.Array
) -> jax.Array:
    """``out`` with the rows of one weight buffer's groups computed."""

    def of_group(group: jax.Array, out: jax.Array) -> jax.Array:
        gate, up, down = weights[group]

        def of_tile(tile: Tile, out: jax.Array) -> jax.Array:
            x = tile.read(rows)
            hidden = jax.nn.silu(_dot(x, gate, 1, 0)) * _dot(x, up, 1, 0)
            return tile.write(out, _dot(hidden.astype(rows.dtype), down, 1, 1) * tile.read(scale))

        return _over_tiles(of_tile, out, bounds[group], bounds[group + 1], rows.shape[0])

    return _over_groups(of_group, out, weights)


def _forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _grouped_mlp(*arrays), arrays


def _backward(saved: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, home, replica, group_sizes, row_scale = saved
    scale = row_scale.astype(_accumulator(rows))[:, None]
    bounds = _bounds(group_sizes, rows.shape[0])
    homes = home.shape[0]
    of_rows = (_zeros(rows, bounds), jnp.zeros_like(scale))
    of_rows, d_home = _backward_pass(of_rows, rows, home, bounds[: homes + 1], scale, d_out)
    (d_rows, d_scale), d_replica = _backward_pass(of_rows, rows, replica, bounds[homes:], scale, d_out)
    return d_rows, d_home, d_replica, None, d_scale[:, 0].astype(row_scale.dtype)


def _backward_pass(
    of_rows: tuple[jax.Array, jax.Array],
    rows: jax.Array,
    weights: jax.Array,
    bounds: jax.Array,
    scale: jax.Array,
    d_out: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Gradients of rows and scale with those of one weight buffer's groups filled in; that buffer's gradient."""
    dtype = scale.dtype

    def of_group(group: jax.Array, carry: Any) -> Any:
        of_rows, d_weights = carry
        gate, up, down = weights[group]

        def of_tile(tile: Tile, carry: Any) -> Any:
            (d_rows, d_scale), (d_gate, d_up, d_down) = carry
            x, dy, s = tile.read(rows), tile.read(d_out), tile.read(scale)
            g, u = _dot(x, gate, 1, 0), _dot(x, up, 1, 0)
            sigmoid = jax.nn.sigmoid(g)
            silu = g * sigmoid
            unscaled = _dot(dy, down, 1, 0)
            hidden, d_hidden = silu * u, unscaled * s
            dg = (d_hidden * u * (sigmoid + silu * (1 - sigmoid))).astype(rows.dtype)
            du = (d_hidden * silu).astype(rows.dtype)
            d_rows = tile.write(d_rows, _dot(dg, gate, 1, 1) + _dot(du, up, 1, 1))
            d_scale = tile.write(d_scale, jnp.sum(unscaled * hidden, -1, keepdims=True))
            d_gate, d_up = d_gate + _dot(x, dg, 0, 0), d_up + _dot(x, du, 0, 0)
            d_down = d_down + _dot((dy * s).astype(rows.dtype), hidden.astype(rows.dtype), 0, 0)
            return (d_rows, d_scale), (d_gate, d_up, d_down)

        sums = (jnp.zeros_like(gate, dtype),) * 3
        of_rows, sums = _over_tiles(of_tile, (of_rows, sums), bounds[group], bounds[group + 1], rows.shape[0])
        d_group = jnp.stack(sums).astype(weights.dtype)
        return of_rows, jax.lax.dynamic_update_index_in_dim(d_weights, d_group, group, 0)

    return _over_groups(of_group, (of_rows, _zeros(weights, bounds)), weights)


_grouped_mlp.defvjp(_forward, _backward)


@jax.jit
def grouped_mlp_xla(
    rows: jax.Array, home: jax.Array, replica: jax.Array, group_sizes: jax.Array, row_scale: jax.Array
) -> jax.Array:
    """`grouped_mlp` in tiles of rows; compiled once when called outside jit."""
    return _grouped_mlp(rows, home, replica, group_sizes, row_scale)


def _over_groups(of_group: Callable[[jax.Array, Any], Any], carry: Any, weights: jax.Array) -> Any:
    # A loop of no steps would still be traced, and index a buffer without slots.
    return jax.lax.fori_loop(0, weights.shape[0], of_group, carry) if weights.shape[0] else carry


def _over_tiles(
    of_tile: Callable[[Tile, Any], Any], carry: Any, start: jax.Array, end: jax.Array, num_rows: int
) -> Any:
    """Visit tiles that cover rows ``start..end``: as many of each size as fit, and of the smallest one more."""
    sizes = sorted({min(size, num_rows) for size in TILES}, reverse=True)
    for size in sizes:
        left = end - start
        count = left // size if size > sizes[-1] else -(-left // size)

        def visit(index: jax.Array, carry: Any, size: int = size, start: jax.Array = start) -> Any:
            begin = start + index * size
            # The array's last tile starts earlier than asked, and owns only what is left to do.
            first = jnp.minimum(begin, num_rows - size)
            row = first + jnp.arange(size, dtype=jnp.int32)[:, None]
            return of_tile(Tile(first, (row >= begin) & (row < end)), carry)

        carry = jax.lax.fori_loop(0, count, visit, carry)
        start = start + count * size
    return carry


def _bounds(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Where each group starts and the last one ends, int32 ``[H + R + 1]``; nothing lies beyond the rows."""
    ends = jnp.cumsum(group_sizes.astype(jnp.int32), dtype=jnp.int32)
    return jnp.minimum(jnp.pad(ends, (1, 0)), num_rows)


def _zeros(like: jax.Array, bounds: jax.Array) -> jax.Array:
    """Zeros like an array that XLA does not know to be constant: a constant holds a buffer from a program's start to
    its end, and a loop that writes into it copies it first."""
    zero = jnp.where(bounds[-1] < 0, like[(0,) * like.ndim], 0) if like.size else 0
    return jnp.full_like(like, zero)


def _dot(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    dimensions = (((contract_a,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=_accumulator(a))


def _accumulator(array: jax.Array) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)
