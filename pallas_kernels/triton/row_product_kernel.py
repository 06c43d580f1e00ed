"""The kernel for products that keep the rows: every tile of rows is multiplied by the matrices of its group.

A block sums up one tile of the output in sweeps over the contraction. A step of a sweep loads a part of the rows and of
one or more of the slot's matrices, and adds a product for each to sums in registers; an epilogue makes the outputs of
what the sweeps leave. So one kernel does ``x W`` and ``x W^T``, gate and up together with SwiGLU behind them, and what
the backward pass needs of the hidden rows.

Weights lie in several buffers. A block has a branch for each of them, loops and all: a reference cannot be chosen by
data, and a branch in every step would keep Triton from loading ahead.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.sweep import Sweep
from pallas_kernels.triton.block_sizes import BlockSizes
from pallas_kernels.triton.launch import Span, block_span, branch, launch, load, store
from pallas_kernels.triton.row_tiles import END, GROUP, START


class Operands(NamedTuple):
    """The arrays that the kernel reads."""

    tiles: Any
    rows: list[Any]
    weights: list[Any]
    scale: list[Any]


type Epilogue = Callable[[Sequence[jax.Array], Any], tuple[Sequence[jax.Array], jax.Array | None]]
"""A function ``(sums, scale or None) -> (values, row sums or None)`` of a tile: all arrays are ``[rows, columns]``
float32, but the row sums are ``[rows]``."""


class KernelSpec(NamedTuple):
    """Everything that a kernel is compiled for."""

    sums: Sequence[Sequence[Sweep]]
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
        rows: the row operands, each ``[r, k]`` bfloat16, float16 or float32.
        weights: the weight buffers, each ``[slots, J, k, n]`` in the dtype of rows, the J matrices of each slot, at
            least one; ``[slots, J, n, k]`` if transposed.
        tiles: ``[3, tiles]`` int32, the result of `row_tiles` for tiles of ``blocks.height`` rows.
        scale: ``[r]`` float32, a factor of each row that the epilogue is given; None if it needs none.
        sums: the sweeps, in lists of those that add to the same sums; each list starts with new ones. The epilogue is
            given all sums in order, in float32.
        transposed: whether the matrices are summed over their last axis.
        epilogue: the function that makes the outputs of the sums.
        outputs: the number of values that the epilogue returns.
        out_dtype: the dtype of the outputs.
        row_sums: whether the epilogue returns row sums.
        padding: whether rows beyond the last group are written, as zeros; otherwise they hold anything.
        blocks: the sizes of blocks.

    Returns:
        The outputs ``[r, n]``. With row sums also ``[n / width, r]`` float32, the row sums of each block of columns;
        in padding they hold anything.
    """
    slots = tuple(buffer.shape[0] for buffer in weights)
    (num_rows, contraction), columns = rows[0].shape, weights[0].shape[2 if transposed else 3]
    matrices = weights[0].shape[1]
    spec = KernelSpec(sums, transposed, epilogue, padding, blocks, slots, matrices, contraction, columns)
    column_blocks = pl.cdiv(columns, blocks.width)
    outs = [jax.ShapeDtypeStruct((num_rows, columns), out_dtype)] * outputs
    if row_sums:
        outs.append(jax.ShapeDtypeStruct((column_blocks, num_rows), jnp.float32))
    # The interpreter does not take numbers that are known as indices beside slices.
    stacks = [buffer.reshape(-1, *buffer.shape[2:]) for buffer in weights]
    return launch(
        functools.partial(_compute_block, spec),
        Operands(tiles, list(rows), stacks, [] if scale is None else [scale]),
        outs,
        # The columns of one tile of rows come one after the other: they share the rows, and neighbours the weights.
        grid=(column_blocks, tiles.shape[1]),
        blocks=blocks,
        name="grouped_row_product",
    )


def _compute_block(spec: KernelSpec, operands: Operands, outs: Sequence[Any]) -> None:
    """Write one block of columns of one tile of rows."""
    column, number = pl.program_id(0), pl.program_id(1)
    start, end = operands.tiles[START, number], operands.tiles[END, number]
    blocks = spec.blocks

    def visit(buffer: int, slot: jax.Array) -> None:
        # Each branch makes its own: what branches share waits in registers for the last of them.
        own, across = Span(start, blocks.height, end), block_span(column, blocks.width, spec.columns)
        if buffer < len(spec.slots):
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

    # Behind the slots come padding and entries without a tile.
    branch([*spec.slots, 1, 1], operands.tiles[GROUP, number], visit)


def _sum_sweeps(
    spec: KernelSpec, operands: Operands, buffer: int, slot: jax.Array, own: Span, across: Span
) -> list[jax.Array]:
    """Return the sums that the sweeps over a slot's matrices leave."""
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


def _multiply(x: jax.Array, matrix: jax.Array, transposed: bool) -> jax.Array:
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, matrix, dimensions, preferred_element_type=jnp.float32)
