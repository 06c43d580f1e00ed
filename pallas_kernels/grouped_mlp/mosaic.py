"""The grouped MLP for Hopper: two kernels forward, three backward, with SwiGLU and the row scale inside them.

Forward, gate and up are one sweep over the rows, and only the hidden row is written; the scale multiplies what the
down product is about to write. Backward, the first kernel sweeps twice: gate and up again, which wait in registers as
bfloat16, then ``dy W2``; it writes what is left to multiply, ``dg``, ``du`` and ``s h``. The row gradient is a sweep
over ``dg`` and one over ``du`` into the same accumulators, and the three weight gradients are one launch, since all of
them are ``[D, F]``: ``x^T dg``, ``x^T du`` and ``dy^T (s h)``.

The sigmoid is ``1 / (1 + exp(-x))`` with the hardware's exponential, whose argument is rounded once before: a relative
error of at most ``|x| 2^-24 + 2^-22``, below 2^-17 for any x whose sigmoid is not 0 or 1 in float32, where the hidden
rows are rounded to bfloat16 at 2^-9. The hardware's tanh would save the reciprocal too. But ``(1 + tanh(x / 2)) / 2``
is a difference for negative x: an error of 2^-11 in tanh is one of up to 2^-12 in a sigmoid that goes to zero, and
exceeds the rounding of bfloat16 for all x below -2 (1.3% of the sigmoid at -4, 70% at -8). So it is not used.

Counted in elements of hidden rows written and read, against products one at a time with SwiGLU between them: 2F
instead of 6F a row forward, 8F instead of 14F backward. What that saves in time has not been measured yet.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_mlp.swiglu import DOWN, GATE, UP, swiglu, swiglu_gradients
from pallas_kernels.hopper.persistent_kernel import pad_rows
from pallas_kernels.hopper.row_product_kernel import row_product_kernel
from pallas_kernels.hopper.tile_sizes import Problem, choose_tile_sizes
from pallas_kernels.hopper.tile_walk import align_down, count_tiles, group_offsets
from pallas_kernels.hopper.weight_gradient_kernel import weight_gradient_kernel
from pallas_kernels.sweep import Sweep


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_mlp_mosaic(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    row_scale: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Compute `grouped_mlp` for bfloat16 on Hopper; D and F are multiples of 64."""
    num_rows = rows.shape[0]
    rows, offsets, scale = _prepare(rows, group_sizes, row_scale)
    width, hidden_width = weights[0].shape[2:]
    num_groups = group_sizes.shape[0]
    rows_per_group = num_rows // num_groups

    tiles = choose_tile_sizes(
        Problem(
            matrices=2,
            contraction=width,
            output_width=hidden_width,
            output_height=rows_per_group,
            groups=num_groups,
        )
    )
    (hidden,) = row_product_kernel(
        [rows],
        weights,
        offsets,
        sums=[[Sweep(0, (GATE, UP))]],
        transposed=False,
        epilogue=swiglu,
        padding=False,
        approximate=True,
        tiles=tiles,
    )
    tiles = choose_tile_sizes(
        Problem(
            matrices=1,
            contraction=hidden_width,
            output_width=width,
            output_height=rows_per_group,
            groups=num_groups,
        )
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
        tiles=tiles,
    )
    return out[:num_rows]


def _forward(*arguments: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    *operands, _ = arguments
    return grouped_mlp_mosaic(*arguments), tuple(operands)


def _backward(_: Any, saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    rows, weights, group_sizes, row_scale = saved
    num_rows = rows.shape[0]
    rows, offsets, scale = _prepare(rows, group_sizes, row_scale)
    d_out = pad_rows(d_out.astype(rows.dtype))
    width, hidden_width = weights[0].shape[2:]
    num_groups = group_sizes.shape[0]
    rows_per_group = num_rows // num_groups

    tiles = choose_tile_sizes(
        Problem(
            matrices=2,
            contraction=width,
            output_width=hidden_width,
            output_height=rows_per_group,
            groups=num_groups,
        )
    )
    d_gate, d_up, scaled, row_sums = row_product_kernel(
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
    tiles = choose_tile_sizes(
        Problem(
            matrices=1,
            contraction=2 * hidden_width,
            output_width=width,
            output_height=rows_per_group,
            groups=num_groups,
        )
    )
    (d_rows,) = row_product_kernel(
        [d_gate, d_up],
        weights,
        offsets,
        sums=[[Sweep(0, (GATE,)), Sweep(1, (UP,))]],
        transposed=True,
        epilogue=lambda sums, _: (sums, None),
        padding=True,
        tiles=tiles,
    )
    pairs = [(rows, d_gate), (rows, d_up), (d_out, scaled)]
    tiles = choose_tile_sizes(
        Problem(
            matrices=0,
            contraction=rows_per_group,
            output_width=hidden_width,
            output_height=width,
            groups=len(pairs) * num_groups,
        )
    )
    slots = tuple(buffer.shape[0] for buffer in weights)
    d_weights = weight_gradient_kernel(pairs, offsets, slots, tiles=tiles)
    # XLA's scheduler would put off the weight gradients of all layers, and their operands would wait in memory.
    d_rows, d_weights = jax.lax.optimization_barrier((d_rows, d_weights))
    d_scale = _sums_of_rows(row_sums, offsets, rows.shape[0])[:num_rows]
    return d_rows[:num_rows], d_weights, None, d_scale.astype(row_scale.dtype)


grouped_mlp_mosaic.defvjp(_forward, _backward)


def _prepare(
    rows: jax.Array, group_sizes: jax.Array, row_scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rows in a number that tiles can start at, the group offsets, and the scale, zero in padding."""
    rows, scale = pad_rows(rows), pad_rows(row_scale)
    offsets = group_offsets(group_sizes, rows.shape[0])
    return rows, offsets, jnp.where(jnp.arange(rows.shape[0]) < offsets[-3], scale, 0).astype(jnp.float32)


def _sums_of_rows(sums: jax.Array, offsets: jax.Array, num_rows: int) -> jax.Array:
    """Return each row's sum over the tiles of columns, ``[r]``; 0 in padding."""
    starts, ends, tile_rows = offsets[:-3], offsets[1:-2], sums.shape[2]
    counts = count_tiles(starts, ends, tile_rows)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # All groups are compared with each row: other ways to search take many launches.
    group = jnp.searchsorted(ends, row, side="right", method="compare_all")
    behind = row - align_down(starts)[group]
    tile = (jnp.cumsum(counts) - counts)[group] + behind // tile_rows
    return jnp.where(row < ends[-1], jnp.sum(sums, axis=0)[tile, behind % tile_rows], 0)
