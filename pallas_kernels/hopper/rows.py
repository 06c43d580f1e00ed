"""The kernel for products that keep the rows: every tile of rows meets the matrices of its group.

A step of a tile loads 64 columns of one or more row operands and of one or more of the slot's matrices, and adds one
or more products to accumulators in registers; an epilogue makes outputs of the accumulators. So one kernel does
``x W`` and ``x W^T``, gate and up together with SwiGLU behind them, and what the backward pass needs of the hidden
rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.launch import ALIGNED, ROWS, STEP, Ring, Tiles, launch, over_tiles, write
from pallas_kernels.hopper.schedule import Schedule


class Term(NamedTuple):
    """One product of every step."""

    operand: int
    """Which of the row operands."""
    matrix: int
    """Which matrix of the slot, an index of the weights' second axis."""
    accumulator: int
    """What it is added to."""


class Operands(NamedTuple):
    """What the kernel reads."""

    schedule: Schedule
    rows: list[Any]
    weights: list[Any]
    scale: list[Any]


def rows_kernel(
    rows: Sequence[jax.Array],
    home: jax.Array,
    replica: jax.Array,
    schedule: Schedule,
    scale: jax.Array | None = None,
    *,
    terms: Sequence[Term],
    transposed: bool,
    epilogue: Callable[..., tuple[Sequence[jax.Array], jax.Array | None]],
    outputs: int = 1,
    out_dtype: Any = jnp.bfloat16,
    sums: bool = False,
    padding: bool,
    tiles: Tiles,
) -> tuple[jax.Array, ...]:
    """Products of the rows of each group with matrices of its slot.

    Args:
        rows: row operands, each ``[r, k]`` bfloat16; r a multiple of 8, k one of 64.
        home: ``[H, J, k, n]``, or ``[H, J, n, k]`` if transposed, bfloat16; n a multiple of ``tiles.columns``.
        replica: ``[R, J, ...]`` likewise; R may be 0.
        schedule: of tiles of ``tiles.rows`` rows.
        scale: ``[r]`` float32, a factor for the epilogue.
        terms: what a step adds up.
        transposed: whether matrices are summed over their last axis.
        epilogue: ``(accumulators, scale or None) -> (values, row sum or None)``, all but the ``[64]`` row sum
            ``[64, columns]`` float32.
        outputs: how many values that gives.
        out_dtype: of the outputs.
        sums: whether it gives a row sum.
        padding: whether rows beyond the last group are written, as zeros; else they hold anything.
        tiles: sizes.

    Returns:
        The outputs ``[r, n]``; with sums also ``[n / columns, t, tiles.rows]`` float32, of each tile.
    """
    slots = (home.shape[0], replica.shape[0])
    (num_rows, contraction), columns = rows[0].shape, home.shape[2 if transposed else 3]
    steps, across = contraction // STEP, columns // tiles.columns
    matrices = sorted({term.matrix for term in terms})
    accumulators = 1 + max(term.accumulator for term in terms)

    def place(schedule: Schedule, visit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tile of rows, tile of columns, and steps of a visit: none beyond the last group."""
        tile, column = jax.lax.div(visit, jnp.int32(across)), jax.lax.rem(visit, jnp.int32(across))
        return tile, column, jnp.where(schedule.group[tile] < sum(slots), steps, 0)

    def copies(operands: Operands, ring: Ring, buffers: Sequence[Any]) -> jax.Array:
        schedule = operands.schedule

        def of_tile(visit: jax.Array, step: jax.Array) -> jax.Array:
            tile, column, count = place(schedule, visit)
            slot = schedule.group[tile]
            own = pl.ds(pl.multiple_of(schedule.first[tile], ALIGNED), tiles.rows)
            across = pl.ds(column * tiles.columns, tiles.columns)

            def fill(index: jax.Array, step: jax.Array) -> jax.Array:
                stage, along = ring.claim(step), pl.ds(index * STEP, STEP)
                for ref, buffer in zip(operands.rows, buffers, strict=False):
                    plgpu.copy_gmem_to_smem(ref.at[own, along], buffer.at[stage], ring.full.at[stage])

                def of_buffer(weights: Any, slot: jax.Array) -> None:
                    part = (across, along) if transposed else (along, across)
                    for matrix, buffer in zip(matrices, buffers[len(rows) :], strict=True):
                        source = weights.at[(slot, matrix, *part)]
                        plgpu.copy_gmem_to_smem(source, buffer.at[stage], ring.full.at[stage])

                of_home = slot < slots[0]
                pl.when(of_home)(lambda: of_buffer(operands.weights[0], slot))
                if slots[1]:
                    pl.when(~of_home)(lambda: of_buffer(operands.weights[1], slot - slots[0]))
                return step + 1

            return jax.lax.fori_loop(0, count, fill, step)

        return over_tiles(schedule.counts[int(padding)] * across, of_tile)

    def products(
        operands: Operands, outs: Sequence[Any], ring: Ring, buffers: Sequence[Any], out_buffer: Any
    ) -> None:
        schedule = operands.schedule
        offset = jax.lax.axis_index("warpgroup") * ROWS

        def of_tile(visit: jax.Array, step: jax.Array) -> jax.Array:
            tile, column, count = place(schedule, visit)
            at = schedule.first[tile] + offset
            low, high = (
                jnp.clip(schedule.start[tile] - at, 0, ROWS),
                jnp.clip(schedule.end[tile] - at, 0, ROWS),
            )

            def multiply(accs: Sequence[Any]) -> list[jax.Array]:
                def add(index: jax.Array, step: jax.Array) -> jax.Array:
                    stage = ring.wait(step)
                    for term in terms:
                        matrix = buffers[len(rows) + matrices.index(term.matrix)].at[stage]
                        matrix = matrix.transpose((1, 0)) if transposed else matrix
                        own = buffers[term.operand].at[stage, pl.ds(offset, ROWS)]
                        plgpu.wgmma(accs[term.accumulator], own, matrix)
                    # Products of this step go on while those of the last one are known to be done.
                    plgpu.wgmma_wait(len(terms))
                    pl.when(index > 0)(lambda: ring.release(step - 1))
                    return step + 1

                jax.lax.fori_loop(0, count, add, step)
                plgpu.wgmma_wait(0)
                pl.when(count > 0)(lambda: ring.release(step + count - 1))
                return [acc[...] for acc in accs]

            @pl.when(low < high)
            def _() -> None:
                zeros = [plgpu.ACC((ROWS, tiles.columns)) for _ in range(accumulators)]
                values = pl.run_scoped(multiply, zeros)
                factor = None
                if scale is not None:
                    layout = plgpu.Layout.WGMMA.reduce(1)
                    factor = plgpu.load(operands.scale[0].at[pl.ds(at, ROWS)], layout=layout, optimized=False)
                    factor = jax.lax.broadcast_in_dim(factor, values[0].shape, (0,))
                values, row_sum = epilogue(values, factor)
                if row_sum is not None:
                    outs[-1][column, tile, pl.ds(offset, ROWS)] = row_sum

                def target(out: Any) -> Callable[..., Any]:
                    first = column * tiles.columns
                    return lambda rows, columns: out.at[
                        pl.ds(at + rows.start, rows.size), pl.ds(first + columns.start, columns.size)
                    ]

                write(values, out_buffer, [target(out) for out in outs[:outputs]], low, high)

            @pl.when(low == high)
            def _() -> None:
                def pass_by(index: jax.Array, step: jax.Array) -> jax.Array:
                    ring.wait(step)
                    ring.release(step)
                    return step + 1

                jax.lax.fori_loop(0, count, pass_by, step)

            return step + count

        over_tiles(schedule.counts[int(padding)] * across, of_tile)

    outs = [jax.ShapeDtypeStruct((num_rows, columns), out_dtype)] * outputs
    if sums:
        outs.append(jax.ShapeDtypeStruct((across, schedule.group.shape[0], tiles.rows), jnp.float32))
    matrix = (tiles.columns, STEP) if transposed else (STEP, tiles.columns)
    # A tile may reach beyond the last row.
    scales = [] if scale is None else [jnp.pad(scale, (0, tiles.rows))]
    return launch(
        copies,
        products,
        Operands(schedule, list(rows), [home, replica] if slots[1] else [home], scales),
        outs,
        buffers=[(tiles.rows, STEP)] * len(rows) + [matrix] * len(matrices),
        out_dtype=out_dtype,
        tiles=tiles,
    )
