"""The grouped MLP on Hopper GPUs: two kernels forward and three backward, with SwiGLU and the row scale fused.

In the forward pass, the first kernel computes gate and up in one sweep over the rows and writes only the hidden rows.
The second kernel computes the down product and multiplies it by the row scale before writing. In the backward pass, the
first kernel makes two sweeps. The first one recomputes gate and up, which stay in registers as bfloat16; the second one
computes ``dy W2``. The kernel writes the operands of the remaining products: ``dg``, ``du`` and ``s h``. The second
kernel computes the row gradient in a sweep over ``dg`` and a sweep over ``du`` with the same accumulators. The third
kernel computes all three weight gradients, ``x^T dg``, ``x^T du`` and ``dy^T (s h)``, which all have shape ``[D, F]``.

The sigmoid is ``1 / (1 + exp(-x))`` with the hardware exponential, whose argument is rounded once. Its relative error
is at most ``|x| 2^-24 + 2^-22``, which is below 2^-17 for any x whose sigmoid is not 0 or 1 in float32. The hidden rows
are rounded to bfloat16, at 2^-9. The hardware tanh would also save the reciprocal. But for negative x,
``(1 + tanh(x / 2)) / 2`` is a difference of nearly equal numbers: an error of 2^-11 in tanh becomes an error of up to
2^-12 in a sigmoid that approaches zero. This exceeds the rounding of bfloat16 for all x below -2 (1.3% of the sigmoid
at -4, 70% at -8). So tanh is not used.

Computed in elements of hidden rows written and read: 2F instead of 6F per row in the forward pass, and 8F instead of
14F in the backward pass, compared with separate products and a separate SwiGLU. The time saved has not been measured.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_mlp.swiglu import DOWN, GATE, UP, swiglu, swiglu_gradients
from pallas_kernels.hopper.persistent_kernel import TileSizes, pad_rows
from pallas_kernels.hopper.row_product_kernel import row_product_kernel
from pallas_kernels.hopper.tile_sizes import Problem, choose_tile_sizes
from pallas_kernels.hopper.tile_walk import align_down, count_tiles, group_offsets
from pallas_kernels.hopper.weight_gradient_kernel import weight_gradient_kernel
from pallas_kernels.products import Sweep


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_mlp_mosaic(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    row_scale: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Compute `grouped_mlp` in bfloat16 on a Hopper GPU; D and F must be multiples of 64."""
    num_rows = rows.shape[0]
    rows, offsets, scale = _prepare(rows, group_sizes, row_scale)
    width, hidden_width = weights[0].shape[2:]
    sizes = num_rows, group_sizes.shape[0]
    (hidden,) = row_product_kernel(
        [rows],
        weights,
        offsets,
        sums=[[Sweep(0, (GATE, UP))]],
        transposed=False,
        epilogue=swiglu,
        padding=False,
        approximate=True,
        tiles=_row_product_tiles(*sizes, matrices=2, contraction=width, columns=hidden_width),
    )
    (out,) = row_product_kernel(
        [hidden],
        weights,
        offsets,
        scale,
        sums=[[Sweep(0, (DOWN,))]],
        transposed=True,
        epilogue=lambda sums, scale: ([sums[0] * scale], None),
        out_dtype=out_dtype,
        padding=True,
        tiles=_row_product_tiles(*sizes, matrices=1, contraction=hidden_width, columns=width),
    )
    return out[:num_rows]


def _forward(*arguments: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    *operands, _ = arguments
    return grouped_mlp_mosaic(*arguments), tuple(operands)


def _backward(_: Any, saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    rows, weights, group_sizes, row_scale = saved
    num_rows, num_groups = rows.shape[0], group_sizes.shape[0]
    rows, offsets, scale = _prepare(rows, group_sizes, row_scale)
    d_out = pad_rows(d_out.astype(rows.dtype))
    width, hidden_width = weights[0].shape[2:]
    tiles = _row_product_tiles(num_rows, num_groups, matrices=2, contraction=width, columns=hidden_width)
    d_gate, d_up, scaled, row_sums = _hidden_gradients(rows, d_out, weights, offsets, scale, tiles)
    (d_rows,) = row_product_kernel(
        [d_gate, d_up],
        weights,
        offsets,
        sums=[[Sweep(0, (GATE,)), Sweep(1, (UP,))]],
        transposed=True,
        epilogue=lambda sums, _: (sums, None),
        padding=True,
        tiles=_row_product_tiles(
            num_rows, num_groups, matrices=1, contraction=2 * hidden_width, columns=width
        ),
    )
    pairs = [(rows, d_gate), (rows, d_up), (d_out, scaled)]
    tiles = choose_tile_sizes(
        Problem(0, num_rows // num_groups, hidden_width, output_height=width, groups=len(pairs) * num_groups)
    )
    slots = tuple(buffer.shape[0] for buffer in weights)
    d_weights = weight_gradient_kernel(pairs, offsets, slots, tiles=tiles)
    # Without the barrier, XLA's scheduler delays the weight gradients of all layers and keeps their operands in memory.
    d_rows, d_weights = jax.lax.optimization_barrier((d_rows, d_weights))
    d_scale = _sums_of_rows(row_sums, offsets, rows.shape[0])[:num_rows]
    return d_rows[:num_rows], d_weights, None, d_scale.astype(row_scale.dtype)


grouped_mlp_mosaic.defvjp(_forward, _backward)


def _hidden_gradients(
    rows: jax.Array,
    d_out: jax.Array,
    weights: Sequence[jax.Array],
    offsets: jax.Array,
    scale: jax.Array,
    tiles: TileSizes,
) -> tuple[jax.Array, ...]:
    """Return the gradients of gate and up, the scaled hidden rows, and the row sums for the gradient of the scale."""
    return row_product_kernel(
        [rows, d_out],
        weights,
        offsets,
        scale,
        sums=[[Sweep(0, (GATE, UP))], [Sweep(1, (DOWN,))]],
        transposed=False,
        epilogue=swiglu_gradients,
        outputs=3,
        row_sums=True,
        padding=False,
        approximate=True,
        tiles=tiles,
    )


def _row_product_tiles(
    num_rows: int, num_groups: int, *, matrices: int, contraction: int, columns: int
) -> TileSizes:
    """Return the tile sizes of a row product, by the expected number of rows of a group."""
    return choose_tile_sizes(Problem(matrices, contraction, columns, num_rows // num_groups, num_groups))


def _prepare(
    rows: jax.Array, group_sizes: jax.Array, row_scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rows padded to a multiple of 8, the group offsets, and the row scale with zeros in the padding."""
    rows, scale = pad_rows(rows), pad_rows(row_scale)
    offsets = group_offsets(group_sizes, rows.shape[0])
    return rows, offsets, jnp.where(jnp.arange(rows.shape[0]) < offsets[-3], scale, 0).astype(jnp.float32)


def _sums_of_rows(sums: jax.Array, offsets: jax.Array, num_rows: int) -> jax.Array:
    """Return the sum of each row over all column tiles, ``[r]``; 0 in the padding."""
    starts, ends, tile_rows = offsets[:-3], offsets[1:-2], sums.shape[2]
    counts = count_tiles(starts, ends, tile_rows)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # "compare_all" compares each row with all groups: the other search methods need many launches.
    group = jnp.searchsorted(ends, row, side="right", method="compare_all")
    distance = row - align_down(starts)[group]
    tile = (jnp.cumsum(counts) - counts)[group] + distance // tile_rows
    return jnp.where(row < ends[-1], jnp.sum(sums, axis=0)[tile, distance % tile_rows], 0)
