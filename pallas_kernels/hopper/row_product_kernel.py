"""The Hopper kernel for row products: every tile of rows is multiplied by matrices of its group's slot.

A tile is computed in sweeps over the contraction. A step of a sweep loads 64 columns of a row operand and the matching
part of one or more of the slot's matrices, and adds one product for each matrix to accumulators in registers. An
epilogue computes the outputs from the final sums. So one kernel computes ``x W`` and ``x W^T``, gate and up with
SwiGLU fused, and the gradients of the hidden rows for the backward pass. A wider tile loads fewer bytes per product,
but needs more registers. Therefore sums that later sweeps do not add to are kept in bfloat16 until the epilogue.

A step of float8 operands is one block of 128 elements that share scales. Its product starts from zero, and is
multiplied by the scales and added to the sum outside the tensor cores. This also keeps the sum precise, because tensor
cores sum float8 products with few bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). While one warpgroup adds, the
other one multiplies. A product and a sum take as many registers as two sums, so tiles are at most 128 columns wide.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.persistent_kernel import (
    WARPGROUP_HEIGHT,
    Ring,
    TileSizes,
    launch,
    step_of,
    visit_buffer,
)
from pallas_kernels.hopper.tile_output import output_has, write_output
from pallas_kernels.hopper.tile_walk import ROW_ALIGNMENT, Tile, walk_tiles
from pallas_kernels.products import SCALE_BLOCK, BlockScales, Epilogue, RowProductOperands, Sweep

EPILOGUE_COLUMNS: Final = 32
"""The number of columns that one call of the epilogue gets. It is small because intermediate values take registers."""


class RowProductSpec(NamedTuple):
    """The static parameters of a kernel."""

    sums: Sequence[Sequence[Sweep]]
    """The lists of sweeps; `pallas_kernels.products` has examples."""
    transposed: bool
    epilogue: Epilogue
    outputs: int
    padding: bool
    tiles: TileSizes
    slots: tuple[int, ...]
    """The number of slots of each weight buffer."""
    step: int
    """The number of elements of the contraction in a step."""
    steps: int
    """The number of steps of a sweep."""
    columns: int
    """The number of columns of the output."""

    @property
    def column_tiles(self) -> int:
        """The number of column tiles of the output; the last may extend beyond the columns."""
        return -(-self.columns // self.tiles.width)

    @property
    def sweeps(self) -> list[Sweep]:
        """All sweeps of a tile, in order."""
        return [sweep for sweeps in self.sums for sweep in sweeps]

    @property
    def matrices(self) -> int:
        """The largest number of matrices that a step loads."""
        return max(len(sweep.matrices) for sweep in self.sweeps)

    def sweep_steps(self, tile: Tile) -> jax.Array:
        """Return the number of steps of each sweep of a tile; 0 for a tile of padding."""
        return self.steps * jnp.where(tile.group < sum(self.slots), 1, 0)

    def visit_tiles(self, group_offsets: Any, of_tile: Callable[..., jax.Array]) -> jax.Array:
        """Call ``(tile, column, steps so far) -> steps so far`` for every output tile, as high as a cluster's tiles."""
        visits = jax.lax.axis_index("block"), jax.lax.axis_size("block"), self.column_tiles
        last_group = sum(self.slots) + self.padding
        return walk_tiles(group_offsets, last_group, self.tiles.cluster_height, visits, of_tile)


def row_product_kernel(
    rows: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    group_offsets: jax.Array,
    scale: jax.Array | None = None,
    block_scales: BlockScales | None = None,
    *,
    sums: Sequence[Sequence[Sweep]],
    transposed: bool,
    epilogue: Epilogue,
    outputs: int = 1,
    out_dtype: Any = jnp.bfloat16,
    row_sums: bool = False,
    padding: bool,
    approximate: bool = False,
    tiles: TileSizes,
) -> tuple[jax.Array, ...]:
    """Multiply the rows of each group by matrices of its slot, and apply an epilogue to the sums.

    Args:
        rows: the row operands, each bfloat16 ``[r, k]``, with r a multiple of 8 and k a multiple of 64; or one float8
            operand, with k a multiple of 128.
        weights: the weight buffers, each bfloat16 ``[slots, J, k, n]`` with the J matrices of each slot, or
            ``[slots, J, n, k]`` if transposed. Each buffer has at least one slot, and n is a multiple of 64. Those of
            float8 rows are float8 and transposed, since wgmma reads no other float8 matrices, and J is 1.
        group_offsets: the group offsets as `tile_walk.group_offsets` returns them, int32 ``[all slots + 3]``.
        scale: a factor of each row for the epilogue, float32 ``[r]``; None if the epilogue uses no scale.
        block_scales: the scales of float8 operands; None for bfloat16.
        sums: lists of sweeps. The sweeps of one list add to the same accumulators, and each list starts with new ones.
            The epilogue gets all sums in order: those of the last list in float32, the others in bfloat16.
        transposed: whether the contraction runs over the last axis of the matrices.
        epilogue: the function that computes the outputs from the sums, 64 rows and 32 columns at a time.
        outputs: the number of values that the epilogue returns.
        out_dtype: the dtype of the outputs.
        row_sums: whether the epilogue returns a row sum.
        padding: whether the rows after the last group are written as zeros. Otherwise their values are undefined.
        approximate: whether the epilogue uses the hardware exponential. Its relative error is below 2^-17, and bfloat16
            rounds at 2^-9.
        tiles: the sizes of the output tiles.

    Returns:
        The outputs, each ``[r, n]``. With ``row_sums``, another array follows, float32
        ``[column tiles, t, tiles.cluster_height]``: the row sums of each cluster's tile, indexed by the number of the
        tile. The size t is large enough for any group sizes.
    """
    slots = tuple(buffer.shape[0] for buffer in weights)
    (num_rows, contraction), columns = rows[0].shape, weights[0].shape[2 if transposed else 3]
    step = step_of(rows[0].dtype)
    steps = contraction // step
    spec = RowProductSpec(sums, transposed, epilogue, outputs, padding, tiles, slots, step, steps, columns)
    outs = [jax.ShapeDtypeStruct((num_rows, columns), out_dtype)] * outputs
    if row_sums:
        height = tiles.cluster_height
        most_tiles = (num_rows + (sum(slots) + 1) * (height + ROW_ALIGNMENT)) // height
        outs.append(jax.ShapeDtypeStruct((spec.column_tiles, most_tiles, height), jnp.float32))
    matrix = (tiles.width, step) if transposed else (step, tiles.width)
    # A tile may extend beyond the last row.
    scales = [] if scale is None else [jnp.pad(scale, (0, tiles.cluster_height))]
    of_blocks = [] if block_scales is None else [block_scales]
    return launch(
        functools.partial(_copy_steps, spec),
        functools.partial(_multiply_steps, spec),
        RowProductOperands(group_offsets, list(rows), list(weights), scales, of_blocks),
        outs,
        buffers=[(tiles.height, step), *[matrix] * spec.matrices, *[(tiles.height,)] * len(of_blocks)],
        dtype=rows[0].dtype,
        out_dtype=out_dtype,
        approximate=approximate,
        tiles=tiles,
    )


def _copy_steps(
    spec: RowProductSpec, operands: RowProductOperands, ring: Ring, buffers: Sequence[Any]
) -> jax.Array:
    """Copy the operands of all steps of this block's tiles into the ring's buffers, and return the number of steps."""
    row_buffer, *other_buffers = buffers
    matrix_buffers, scale_buffers = other_buffers[: spec.matrices], other_buffers[spec.matrices :]
    top = spec.tiles.top()

    def of_tile(tile: Tile, column: jax.Array, step: jax.Array) -> jax.Array:
        own = pl.ds(pl.multiple_of(tile.first + top, ROW_ALIGNMENT), spec.tiles.height)
        across = pl.ds(column * spec.tiles.width, spec.tiles.width)

        def fill(sweep: Sweep, index: jax.Array, step: jax.Array) -> jax.Array:
            stage, along = ring.claim(step), pl.ds(index * spec.step, spec.step)

            def copy(source: Any, buffer: Any, axis: str | None = None) -> None:
                plgpu.copy_gmem_to_smem(source, buffer.at[stage], ring.full.at[stage], collective_axes=axis)

            def copy_matrices(number: int, slot: jax.Array) -> None:
                part = (across, along) if spec.transposed else (along, across)
                for matrix, buffer in zip(sweep.matrices, matrix_buffers, strict=False):
                    copy(operands.weights[number].at[(slot, matrix, *part)], buffer, spec.tiles.cluster_axis)

            copy(operands.rows[sweep.rows].at[own, along], row_buffer)
            for scales, buffer in zip(operands.block_scales, scale_buffers, strict=True):
                copy(scales.rows.at[index, own], buffer)
            visit_buffer(spec.slots, tile.group, copy_matrices)
            # The barrier expects one arrival for each buffer, including those that this sweep does not use.
            for _ in matrix_buffers[len(sweep.matrices) :]:
                plgpu.barrier_arrive(ring.full.at[stage])
            return step + 1

        for sweep in spec.sweeps:
            step = jax.lax.fori_loop(0, spec.sweep_steps(tile), functools.partial(fill, sweep), step)
        return step

    return spec.visit_tiles(operands.groups, of_tile)


class OwnRows(NamedTuple):
    """The 64 rows of one output tile that one warpgroup computes; all fields are int32."""

    tile: Tile
    """The tile of the cluster."""
    column: jax.Array
    """The index of the tile among the column tiles."""
    in_cluster: jax.Array
    """The first of the rows, counted from the top of the cluster's tile."""
    first: jax.Array
    """The first of the rows, counted from the first row of the output."""
    low: jax.Array
    """The first of the 64 rows that belongs to the tile's group."""
    high: jax.Array
    """The row after the last of the 64 that belongs to the tile's group; ``low`` if none does."""


def _multiply_steps(
    spec: RowProductSpec,
    operands: RowProductOperands,
    outs: Sequence[Any],
    ring: Ring,
    buffers: Sequence[Any],
    out_buffer: Any,
) -> None:
    """Multiply all steps for this warpgroup's 64 rows of each tile, apply the epilogue, and write the outputs."""
    offset = jax.lax.axis_index("warpgroup") * WARPGROUP_HEIGHT
    in_cluster = spec.tiles.top() + offset

    def of_tile(tile: Tile, column: jax.Array, step: jax.Array) -> jax.Array:
        first, count = tile.first + in_cluster, spec.sweep_steps(tile)
        low = jnp.clip(tile.start - first, 0, WARPGROUP_HEIGHT)
        high = jnp.clip(tile.end - first, 0, WARPGROUP_HEIGHT)

        @pl.when(low < high)
        def _() -> None:
            own = OwnRows(tile, column, in_cluster, first, low, high)
            if operands.block_scales:
                sums = [_sum_blocks(spec, operands.block_scales[0], ring, buffers, offset, own, step, count)]
            else:
                sums = _sum_sweeps(spec, ring, buffers, offset, step, count)
            _write_outputs(spec, operands, outs, out_buffer, own, sums)

        all_steps = count * len(spec.sweeps)
        pl.when(low == high)(lambda: _skip_steps(spec, ring, step, all_steps))
        return step + all_steps

    spec.visit_tiles(operands.groups, of_tile)


def _write_outputs(
    spec: RowProductSpec,
    operands: RowProductOperands,
    outs: Sequence[Any],
    out_buffer: Any,
    own: OwnRows,
    sums: Sequence[jax.Array],
) -> None:
    """Apply the epilogue to the sums of this warpgroup's rows, and write the outputs and the row sums."""
    dtype, line = out_buffer.dtype, out_buffer.shape[-1]
    scale = _broadcast_scale(operands.scale[0], own) if operands.scale else None
    row_sums: list[jax.Array] = []

    def parts() -> Iterator[tuple[int, jax.Array, Callable[..., Any]]]:
        for first in range(0, spec.tiles.width, line):
            pieces = []
            for begin in range(first, first + line, EPILOGUE_COLUMNS):
                piece = [total[:, begin : begin + EPILOGUE_COLUMNS] for total in sums]
                values, row_sum = spec.epilogue(piece, scale)
                pieces.append([value.astype(dtype) for value in values])
                row_sums.extend([] if row_sum is None else [row_sum])
            for value, out in zip(zip(*pieces, strict=True), outs, strict=False):
                yield first, jnp.concatenate(value, axis=1), functools.partial(target, out)

    def target(out: Any, rows: Any, columns: Any) -> Any:
        left = own.column * spec.tiles.width + columns.start
        return out.at[pl.ds(own.first + rows.start, rows.size), pl.ds(left, columns.size)]

    has = output_has(own.column, spec.tiles.width, spec.columns)
    write_output(parts(), out_buffer, own.low, own.high, has)
    if row_sums:
        place = own.column, own.tile.number, pl.ds(own.in_cluster, WARPGROUP_HEIGHT)
        outs[-1][place] = functools.reduce(operator.add, row_sums)


def _broadcast_scale(scale: Any, own: OwnRows) -> jax.Array:
    """Load the scale of this warpgroup's rows, and repeat it for each column of a call of the epilogue."""
    part = scale.at[pl.ds(own.first, WARPGROUP_HEIGHT)]
    factor = plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return jax.lax.broadcast_in_dim(factor, (WARPGROUP_HEIGHT, EPILOGUE_COLUMNS), (0,))


def _skip_steps(spec: RowProductSpec, ring: Ring, step: jax.Array, count: jax.Array) -> None:
    """Release the buffers of ``count`` steps from ``step`` on without multiplying: no row is this warpgroup's."""

    def skip(index: jax.Array, step: jax.Array) -> jax.Array:
        ring.wait(step)
        if spec.tiles.cluster > 1:
            # In a cluster, one thread releases the buffer for the whole warpgroup. Without products, the warps do not
            # wait for each other, and a late warp would miss a phase of the barrier.
            plgpu.commit_smem()
        ring.release(step)
        return step + 1

    jax.lax.fori_loop(0, count, skip, step)


def _sum_sweeps(
    spec: RowProductSpec,
    ring: Ring,
    buffers: Sequence[Any],
    offset: jax.Array,
    step: jax.Array,
    count: jax.Array,
) -> list[jax.Array]:
    """Return the sums of all sweeps of a tile, which have ``count`` steps each and start at step ``step``."""
    sums: list[jax.Array] = []
    for sweeps in spec.sums:
        sums = [total.astype(jnp.bfloat16) for total in sums]
        accumulate = functools.partial(_accumulate, spec, sweeps, ring, buffers, offset, step, count)
        accumulators = [plgpu.ACC((WARPGROUP_HEIGHT, spec.tiles.width)) for _ in sweeps[0].matrices]
        sums += pl.run_scoped(accumulate, accumulators)
        step += len(sweeps) * count
    return sums


def _accumulate(
    spec: RowProductSpec,
    sweeps: Sequence[Sweep],
    ring: Ring,
    buffers: Sequence[Any],
    offset: jax.Array,
    step: jax.Array,
    count: jax.Array,
    accumulators: Sequence[Any],
) -> list[jax.Array]:
    """Add the products of all sweeps that share accumulators, and return the sums."""
    row_buffer, *matrix_buffers = buffers

    def start_products(sweep: Sweep, stage: jax.Array, _: jax.Array) -> int:
        own = row_buffer.at[stage, pl.ds(offset, WARPGROUP_HEIGHT)]
        for accumulator, buffer in zip(accumulators, matrix_buffers[: len(sweep.matrices)], strict=True):
            matrix = buffer.at[stage]
            plgpu.wgmma(accumulator, own, matrix.transpose((1, 0)) if spec.transposed else matrix)
        return len(sweep.matrices)

    ring.multiply([functools.partial(start_products, sweep) for sweep in sweeps], step, count)
    return [accumulator[...] for accumulator in accumulators]


def _sum_blocks(
    spec: RowProductSpec,
    scales: BlockScales,
    ring: Ring,
    buffers: Sequence[Any],
    offset: jax.Array,
    own: OwnRows,
    step: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Return the sum of the products of ``count`` blocks of float8 from step ``step`` on, each with its scales."""
    row_buffer, matrix_buffer, scale_buffer = buffers
    own_rows, shape = pl.ds(offset, WARPGROUP_HEIGHT), (WARPGROUP_HEIGHT, spec.tiles.width)
    column = jax.lax.div(own.column * spec.tiles.width, jnp.int32(SCALE_BLOCK))

    def multiply(index: jax.Array, product: Any) -> jax.Array:
        of_matrix = scales.weights[own.tile.group, column, index]
        stage = ring.wait(step + index)
        part = scale_buffer.at[stage, own_rows]
        of_rows = plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        plgpu.wgmma(product, row_buffer.at[stage, own_rows], matrix_buffer.at[stage].transpose((1, 0)))
        # Copies may overwrite the scales only after all warps have loaded them. Products need no such fence.
        plgpu.commit_smem()
        plgpu.wgmma_wait(0)
        ring.release(step + index)
        return product[...] * jax.lax.broadcast_in_dim(of_rows * of_matrix, shape, (0,))

    def add_block(index: jax.Array, total: jax.Array) -> jax.Array:
        return total + pl.run_scoped(functools.partial(multiply, index), plgpu.ACC(shape))

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, count, add_block, zeros)
