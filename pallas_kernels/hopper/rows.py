"""The kernel for products that keep the rows: every tile of rows meets the matrices of its group.

A step of a tile loads 64 columns of one or more row operands and of one or more of the slot's matrices, and adds one
or more products to accumulators in registers; an epilogue makes outputs of the accumulators. So one kernel does
``x W`` and ``x W^T``, gate and up together with SwiGLU behind them, and what the backward pass needs of the hidden
rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.launch import ROWS, STEP, Ring, Tiles, launch, write
from pallas_kernels.hopper.schedule import ALIGNED, Tile, walk


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

    walls: Any
    rows: list[Any]
    weights: list[Any]
    scale: list[Any]


class Plan(NamedTuple):
    """What a kernel is compiled for."""

    terms: Sequence[Term]
    transposed: bool
    epilogue: Callable[..., tuple[Sequence[jax.Array], jax.Array | None]]
    outputs: int
    padding: bool
    tiles: Tiles
    slots: tuple[int, int]
    steps: int
    """Of a tile."""
    across: int
    """Tiles of columns."""

    @property
    def matrices(self) -> list[int]:
        """Those of a slot that are read, in the order of their buffers."""
        return sorted({term.matrix for term in self.terms})

    @property
    def accumulators(self) -> int:
        """Of a warpgroup, 64 rows each."""
        return 1 + max(term.accumulator for term in self.terms)

    def steps_of(self, tile: Tile) -> jax.Array:
        """None beyond the last group."""
        return jnp.where(tile.group < sum(self.slots), self.steps, 0)

    def visit_tiles(self, walls: Any, of_tile: Callable[..., jax.Array]) -> jax.Array:
        """This block's share: ``(tile, column, steps so far) -> steps so far``."""
        visits = jax.lax.axis_index("block"), jax.lax.axis_size("block"), self.across
        return walk(walls, sum(self.slots) + self.padding, self.tiles.rows, visits, of_tile)


def rows_kernel(
    rows: Sequence[jax.Array],
    home: jax.Array,
    replica: jax.Array,
    walls: jax.Array,
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
        walls: ``[H + R + 3]`` int32, from `hopper.schedule.walls`.
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
        The outputs ``[r, n]``; with sums also ``[n / columns, t, tiles.rows]`` float32, of each tile by its number,
        with room for any groups.
    """
    slots = (home.shape[0], replica.shape[0])
    (num_rows, contraction), columns = rows[0].shape, home.shape[2 if transposed else 3]
    across = columns // tiles.columns
    plan = Plan(terms, transposed, epilogue, outputs, padding, tiles, slots, contraction // STEP, across)
    outs = [jax.ShapeDtypeStruct((num_rows, columns), out_dtype)] * outputs
    if sums:
        most = (num_rows + (sum(slots) + 1) * (tiles.rows + ALIGNED)) // tiles.rows
        outs.append(jax.ShapeDtypeStruct((across, most, tiles.rows), jnp.float32))
    matrix = (tiles.columns, STEP) if transposed else (STEP, tiles.columns)
    # A tile may reach beyond the last row.
    scales = [] if scale is None else [jnp.pad(scale, (0, tiles.rows))]
    weights = [home, replica] if slots[1] else [home]
    return launch(
        functools.partial(_copies, plan),
        functools.partial(_products, plan),
        Operands(walls, list(rows), weights, scales),
        outs,
        buffers=[(tiles.rows, STEP)] * len(rows) + [matrix] * len(plan.matrices),
        out_dtype=out_dtype,
        tiles=tiles,
    )


def _copies(plan: Plan, operands: Operands, ring: Ring, buffers: Sequence[Any]) -> jax.Array:
    """Fill the ring with the steps of every tile."""

    def of_tile(tile: Tile, column: jax.Array, step: jax.Array) -> jax.Array:
        own = pl.ds(pl.multiple_of(tile.first, ALIGNED), plan.tiles.rows)
        across = pl.ds(column * plan.tiles.columns, plan.tiles.columns)

        def fill(index: jax.Array, step: jax.Array) -> jax.Array:
            stage, along = ring.claim(step), pl.ds(index * STEP, STEP)

            def copy(source: Any, buffer: Any) -> None:
                plgpu.copy_gmem_to_smem(source, buffer.at[stage], ring.full.at[stage])

            for ref, buffer in zip(operands.rows, buffers, strict=False):
                copy(ref.at[own, along], buffer)

            def copy_matrices(weights: Any, slot: jax.Array) -> None:
                part = (across, along) if plan.transposed else (along, across)
                for matrix, buffer in zip(plan.matrices, buffers[len(operands.rows) :], strict=True):
                    copy(weights.at[(slot, matrix, *part)], buffer)

            homes, replicas = plan.slots
            of_home = tile.group < homes
            pl.when(of_home)(lambda: copy_matrices(operands.weights[0], tile.group))
            if replicas:
                pl.when(~of_home)(lambda: copy_matrices(operands.weights[1], tile.group - homes))
            return step + 1

        return jax.lax.fori_loop(0, plan.steps_of(tile), fill, step)

    return plan.visit_tiles(operands.walls, of_tile)


def _products(
    plan: Plan, operands: Operands, outs: Sequence[Any], ring: Ring, buffers: Sequence[Any], out_buffer: Any
) -> None:
    """Multiply the ring's steps, this warpgroup's 64 rows of each tile, and write what becomes of them."""
    offset = jax.lax.axis_index("warpgroup") * ROWS

    def of_tile(tile: Tile, column: jax.Array, step: jax.Array) -> jax.Array:
        at, count = tile.first + offset, plan.steps_of(tile)
        low, high = jnp.clip(tile.start - at, 0, ROWS), jnp.clip(tile.end - at, 0, ROWS)

        @pl.when(low < high)
        def _() -> None:
            multiply = functools.partial(_multiply, plan, ring, buffers, offset, step, count)
            empty = [plgpu.ACC((ROWS, plan.tiles.columns)) for _ in range(plan.accumulators)]
            values = pl.run_scoped(multiply, empty)
            factor = None
            if operands.scale:
                layout = plgpu.Layout.WGMMA.reduce(1)
                factor = plgpu.load(operands.scale[0].at[pl.ds(at, ROWS)], layout=layout, optimized=False)
                factor = jax.lax.broadcast_in_dim(factor, values[0].shape, (0,))
            values, row_sum = plan.epilogue(values, factor)
            if row_sum is not None:
                outs[-1][column, tile.number, pl.ds(offset, ROWS)] = row_sum

            def target(out: Any, rows: Any, columns: Any) -> Any:
                first = column * plan.tiles.columns
                return out.at[pl.ds(at + rows.start, rows.size), pl.ds(first + columns.start, columns.size)]

            targets = [functools.partial(target, out) for out in outs[: plan.outputs]]
            write(values, out_buffer, targets, low, high)

        @pl.when(low == high)
        def _() -> None:
            def pass_by(index: jax.Array, step: jax.Array) -> jax.Array:
                ring.wait(step)
                ring.release(step)
                return step + 1

            jax.lax.fori_loop(0, count, pass_by, step)

        return step + count

    plan.visit_tiles(operands.walls, of_tile)


def _multiply(
    plan: Plan,
    ring: Ring,
    buffers: Sequence[Any],
    offset: jax.Array,
    step: jax.Array,
    count: jax.Array,
    accumulators: Sequence[Any],
) -> list[jax.Array]:
    """Add up the products of ``count`` steps from ``step`` on."""
    row_buffers = len(buffers) - len(plan.matrices)

    def add(index: jax.Array, step: jax.Array) -> jax.Array:
        stage = ring.wait(step)
        for term in plan.terms:
            matrix = buffers[row_buffers + plan.matrices.index(term.matrix)].at[stage]
            matrix = matrix.transpose((1, 0)) if plan.transposed else matrix
            own = buffers[term.operand].at[stage, pl.ds(offset, ROWS)]
            plgpu.wgmma(accumulators[term.accumulator], own, matrix)
        # Products of this step go on while those of the last one are known to be done.
        plgpu.wgmma_wait(len(plan.terms))
        pl.when(index > 0)(lambda: ring.release(step - 1))
        return step + 1

    jax.lax.fori_loop(0, count, add, step)
    plgpu.wgmma_wait(0)
    pl.when(count > 0)(lambda: ring.release(step + count - 1))
    return [accumulator[...] for accumulator in accumulators]
