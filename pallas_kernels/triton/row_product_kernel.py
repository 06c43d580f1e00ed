"""The Triton kernel for row products: every tile of rows is multiplied by matrices of its group's slot.

A block computes one tile of the output in sweeps over the contraction. A step of a sweep loads a part of the rows and
of one or more of the slot's matrices, and adds one product for each matrix to sums in registers. An epilogue computes
the outputs from the final sums. So one kernel computes ``x W`` and ``x W^T``, gate and up with SwiGLU fused, and the
gradients of the hidden rows for the backward pass.

Of float8 operands, a step is one block of 128 elements that share scales: its product is multiplied by them and added
to the sum.

The weights may be in several buffers. A block has a branch for each buffer, including all loops: data cannot choose
between references, and a branch in every step would keep Triton from prefetching.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.products import SCALE_BLOCK, BlockScales, Epilogue, RowProductOperands, Sweep
from pallas_kernels.triton.block_sizes import BlockSizes
from pallas_kernels.triton.launch import Span, block_span, branch, launch, load, store
from pallas_kernels.triton.row_tiles import END, GROUP, START


class RowProductSpec(NamedTuple):
    """The static parameters of a kernel."""

    sums: Sequence[Sequence[Sweep]]
    """The lists of sweeps; `pallas_kernels.products` has examples."""
    transposed: bool
    epilogue: Epilogue
    padding: bool
    blocks: BlockSizes
    slots: tuple[int, ...]
    """The number of slots of each weight buffer."""
    matrices: int
    """The number of matrices of a slot."""
    contraction: int
    """The number of elements that a product sums over."""
    columns: int
    """The number of columns of the output."""


def row_product_kernel(
    rows: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    tiles: jax.Array,
    scale: jax.Array | None = None,
    block_scales: BlockScales | None = None,
    *,
    sums: Sequence[Sequence[Sweep]],
    transposed: bool,
    epilogue: Epilogue,
    outputs: int = 1,
    out_dtype: Any,
    row_sums: bool = False,
    padding: bool,
    blocks: BlockSizes,
) -> tuple[jax.Array, ...]:
    """Multiply the rows of each group by matrices of its slot, and apply an epilogue to the sums.

    Args:
        rows: the row operands, each ``[r, k]``, in bfloat16, float16 or float32; or one float8 operand, with k a
            multiple of 128.
        weights: the weight buffers, each ``[slots, J, k, n]`` with the J matrices of each slot, or ``[slots, J, n, k]``
            if transposed, in the dtype of the rows. Each buffer has at least one slot. Those of float8 rows are
            transposed, and J is 1.
        tiles: the table of tiles as `row_tiles` returns it for tiles of ``blocks.height`` rows, int32 ``[3, tiles]``.
        scale: a factor of each row for the epilogue, float32 ``[r]``; None if the epilogue uses no scale.
        block_scales: the scales of float8 operands; None for the others.
        sums: lists of sweeps. The sweeps of one list add to the same sums, and each list starts with new ones. The
            epilogue gets all sums in order, in float32.
        transposed: whether the contraction runs over the last axis of the matrices.
        epilogue: the function that computes the outputs from the sums, a whole tile at a time.
        outputs: the number of values that the epilogue returns.
        out_dtype: the dtype of the outputs.
        row_sums: whether the epilogue returns row sums.
        padding: whether the rows after the last group are written as zeros. Otherwise their values are undefined.
        blocks: the block sizes.

    Returns:
        The outputs, each ``[r, n]``. With ``row_sums``, another array follows, float32 ``[n / width, r]`` (rounded
        up): the row sums of each block of columns. Row sums of padding are undefined.
    """
    slots = tuple(buffer.shape[0] for buffer in weights)
    (num_rows, contraction), columns = rows[0].shape, weights[0].shape[2 if transposed else 3]
    matrices = weights[0].shape[1]
    spec = RowProductSpec(sums, transposed, epilogue, padding, blocks, slots, matrices, contraction, columns)
    column_blocks = pl.cdiv(columns, blocks.width)
    outs = [jax.ShapeDtypeStruct((num_rows, columns), out_dtype)] * outputs
    if row_sums:
        outs.append(jax.ShapeDtypeStruct((column_blocks, num_rows), jnp.float32))
    # The interpreter does not support constant indices next to slices, so slots and matrices share one axis.
    stacks = [buffer.reshape(-1, *buffer.shape[2:]) for buffer in weights]
    return launch(
        functools.partial(_compute_block, spec),
        RowProductOperands(
            tiles,
            list(rows),
            stacks,
            [] if scale is None else [scale],
            [] if block_scales is None else [block_scales],
        ),
        outs,
        # Columns are the fastest axis: the blocks of a row tile share its rows, and neighbouring row tiles the weights.
        grid=(column_blocks, tiles.shape[1]),
        blocks=blocks,
        name="grouped_row_product",
    )


def _compute_block(spec: RowProductSpec, operands: RowProductOperands, outs: Sequence[Any]) -> None:
    """Compute and write one block of columns of one tile of rows."""
    column, number = pl.program_id(0), pl.program_id(1)
    start, end = operands.groups[START, number], operands.groups[END, number]
    blocks = spec.blocks

    def visit(buffer: int, slot: jax.Array) -> None:
        # Each branch computes its own spans: values that branches share would stay in registers until the last one.
        own, across = Span(start, blocks.height, end), block_span(column, blocks.width, spec.columns)
        if buffer < len(spec.slots):
            if operands.block_scales:
                sums = [_sum_blocks(spec, operands, buffer, slot, own, across)]
            else:
                sums = _sum_sweeps(spec, operands, buffer, slot, own, across)
            factor = load(operands.scale[0], (), own)[:, None] if operands.scale else None
            values, row_sums = spec.epilogue(sums, factor)
            for out, value in zip(outs, values, strict=False):
                store(out, (), own, across, values=value)
            if row_sums is not None:
                store(outs[-1], (column,), own, values=row_sums)
        elif spec.padding and buffer == len(spec.slots):
            for out in outs:
                store(out, (), own, across, values=jnp.zeros((blocks.height, blocks.width), jnp.float32))

    # After the slots come two more groups: padding, and entries of the table without a tile.
    branch([*spec.slots, 1, 1], operands.groups[GROUP, number], visit)


def _sum_sweeps(
    spec: RowProductSpec, operands: RowProductOperands, buffer: int, slot: jax.Array, own: Span, across: Span
) -> list[jax.Array]:
    """Return the sums of all sweeps over a slot's matrices."""
    blocks = spec.blocks

    def step(sweep: Sweep, index: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        along = block_span(index, blocks.step, spec.contraction)
        part = (across, along) if spec.transposed else (along, across)
        x, first = load(operands.rows[sweep.rows], (), own, along), slot * spec.matrices
        matrices = (load(operands.weights[buffer], (first + matrix,), *part) for matrix in sweep.matrices)
        return tuple(
            total + _multiply(x, matrix, spec.transposed)
            for total, matrix in zip(totals, matrices, strict=True)
        )

    sums: list[jax.Array] = []
    for sweeps in spec.sums:
        totals = (jnp.zeros((blocks.height, blocks.width), jnp.float32),) * len(sweeps[0].matrices)
        for sweep in sweeps:
            steps = pl.cdiv(spec.contraction, blocks.step)
            totals = jax.lax.fori_loop(0, steps, functools.partial(step, sweep), totals)
        sums += totals
    return sums


def _sum_blocks(
    spec: RowProductSpec, operands: RowProductOperands, buffer: int, slot: jax.Array, own: Span, across: Span
) -> jax.Array:
    """Return the sum of the products of all blocks of the contraction, each multiplied by its scales."""
    scales: BlockScales = operands.block_scales[0]
    group, columns = slot + sum(spec.slots[:buffer]), jax.lax.div(across.start, jnp.int32(SCALE_BLOCK))

    def add_block(index: jax.Array, total: jax.Array) -> jax.Array:
        along = block_span(index, SCALE_BLOCK, spec.contraction)
        x, matrix = (
            load(operands.rows[0], (), own, along),
            load(operands.weights[buffer], (slot,), across, along),
        )
        factor = load(scales.rows, (index,), own) * scales.weights[group, columns, index]
        return total + factor[:, None] * _multiply(x, matrix, transposed=True)

    zeros = jnp.zeros((spec.blocks.height, spec.blocks.width), jnp.float32)
    return jax.lax.fori_loop(0, spec.contraction // SCALE_BLOCK, add_block, zeros)


def _multiply(x: jax.Array, matrix: jax.Array, transposed: bool) -> jax.Array:
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, matrix, dimensions, preferred_element_type=jnp.float32)
