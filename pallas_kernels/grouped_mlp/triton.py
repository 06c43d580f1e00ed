"""The grouped MLP on NVIDIA GPUs of compute capability 8.0 or higher: two Triton kernels forward, three backward.

SwiGLU and the row scale are fused into the kernels as in `pallas_kernels.grouped_mlp.mosaic`, which describes the
kernels and what fusion saves. One table of tiles serves all row products of a pass. A block that keeps two or three
sums is half as wide as a block that keeps one.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.group_loops import group_bounds
from pallas_kernels.grouped_mlp.swiglu import DOWN, GATE, UP, swiglu, swiglu_gradients
from pallas_kernels.products import Sweep
from pallas_kernels.triton.block_sizes import BlockSizes, row_product_blocks, weight_gradient_blocks
from pallas_kernels.triton.row_product_kernel import row_product_kernel
from pallas_kernels.triton.row_tiles import row_tiles
from pallas_kernels.triton.weight_gradient_kernel import weight_gradient_kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_mlp_triton(
    rows: jax.Array,
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    row_scale: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Compute `grouped_mlp` for bfloat16, float16 or float32 rows, with any D and F."""
    width, hidden_width = weights[0].shape[2:]
    num_groups = group_sizes.shape[0]
    blocks = row_product_blocks(rows, num_groups, hidden_width, accumulators=2)
    tiles = row_tiles(group_sizes, rows.shape[0], blocks.height)
    (hidden,) = row_product_kernel(
        [rows],
        weights,
        tiles,
        sums=[[Sweep(0, (GATE, UP))]],
        transposed=False,
        epilogue=swiglu,
        out_dtype=rows.dtype,
        padding=False,
        blocks=blocks,
    )
    (out,) = row_product_kernel(
        [hidden],
        weights,
        tiles,
        row_scale.astype(jnp.float32),
        sums=[[Sweep(0, (DOWN,))]],
        transposed=True,
        epilogue=lambda sums, scale: ([sums[0] * scale], None),
        out_dtype=out_dtype,
        padding=True,
        blocks=row_product_blocks(rows, num_groups, width),
    )
    return out


def _forward(*arguments: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    *operands, _ = arguments
    return grouped_mlp_triton(*arguments), tuple(operands)


def _backward(_: Any, saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    rows, weights, group_sizes, row_scale = saved
    d_out = d_out.astype(rows.dtype)
    width, hidden_width = weights[0].shape[2:]
    num_groups = group_sizes.shape[0]
    blocks = row_product_blocks(rows, num_groups, hidden_width, accumulators=3)
    tiles = row_tiles(group_sizes, rows.shape[0], blocks.height)
    d_gate, d_up, scaled, row_sums = _hidden_gradients(rows, d_out, weights, tiles, row_scale, blocks)
    (d_rows,) = row_product_kernel(
        [d_gate, d_up],
        weights,
        tiles,
        sums=[[Sweep(0, (GATE,)), Sweep(1, (UP,))]],
        transposed=True,
        epilogue=lambda sums, _: (sums, None),
        out_dtype=rows.dtype,
        padding=True,
        blocks=row_product_blocks(rows, num_groups, width),
    )
    bounds = group_bounds(group_sizes, rows.shape[0])
    d_weights = weight_gradient_kernel(
        [(rows, d_gate), (rows, d_up), (d_out, scaled)],
        bounds,
        tuple(buffer.shape[0] for buffer in weights),
        out_dtype=rows.dtype,
        blocks=weight_gradient_blocks(rows, scaled),
    )
    # Without the barrier, XLA's scheduler delays the weight gradients of all layers and keeps their operands in memory.
    d_rows, d_weights = jax.lax.optimization_barrier((d_rows, tuple(d_weights)))
    real = jnp.arange(rows.shape[0], dtype=jnp.int32) < bounds[-1]
    d_scale = jnp.where(real, jnp.sum(row_sums, axis=0), 0)
    return d_rows, d_weights, None, d_scale.astype(row_scale.dtype)


grouped_mlp_triton.defvjp(_forward, _backward)


def _hidden_gradients(
    rows: jax.Array,
    d_out: jax.Array,
    weights: Sequence[jax.Array],
    tiles: jax.Array,
    row_scale: jax.Array,
    blocks: BlockSizes,
) -> tuple[jax.Array, ...]:
    """Return the gradients of gate and up, the scaled hidden rows, and the row sums for the gradient of the scale."""
    return row_product_kernel(
        [rows, d_out],
        weights,
        tiles,
        row_scale.astype(jnp.float32),
        sums=[[Sweep(0, (GATE, UP))], [Sweep(1, (DOWN,))]],
        transposed=False,
        epilogue=swiglu_gradients,
        outputs=3,
        out_dtype=rows.dtype,
        row_sums=True,
        padding=False,
        blocks=blocks,
    )
