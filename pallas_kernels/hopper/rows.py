"""The kernel for products that keep the rows: every tile of rows meets the matrices of its group.

A tile is summed up in sweeps over the contraction. A step of a sweep loads 64 columns of a row operand and of one or
more of the slot's matrices, and adds a product for each to accumulators in registers; an epilogue makes outputs of
what the sweeps left. So one kernel does ``x W`` and ``x W^T``, gate and up together with SwiGLU behind them,
and what the backward pass needs of the hidden rows. The wider a tile, the fewer bytes a product takes, and the more
registers: sums that a later sweep needs no more wait for the epilogue in bfloat16.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.launch import ROWS, STEP, Ring, Tiles, launch, write
from pallas_kernels.hopper.schedule import ALIGNED, Tile, walk

PIECE: Final = 32
"""Columns that an epilogue sees at a time: what it computes on the way takes registers."""


class Sweep(NamedTuple):
    """One pass over the contraction."""

    rows: int
    """The row operand that its steps load."""
    matrices: tuple[int, ...]
    """Matrices of the slot, indices of the weights' second axis: the first adds to the first accumulator, and so on."""


class Operands(NamedTuple):
    """What the kernel reads."""

    walls: Any
    rows: list[Any]
    weights: list[Any]
    scale: list[Any]


type Epilogue = Callable[[Sequence[jax.Array], Any], tuple[Sequence[jax.Array], jax.Array | None]]
"""``(sums, scale or None) -> (values, row sum or None)``, all but the ``[64]`` row sum ``[64, 32]``: some columns."""


class Plan(NamedTuple):
    """What a kernel is compiled for."""

    sums: Sequence[Sequence[Sweep]]
    transposed: bool
    epilogue: Epilogue
    outputs: int
    padding: bool
    tiles: Tiles
    slots: tuple[int, int]
    steps: int
    """Of a sweep."""
    across: int
    """Tiles of columns."""

    @property
    def sweeps(self) -> list[Sweep]:
        """All of a tile, one after the other."""
        return [sweep for sweeps in self.sums for sweep in sweeps]

    @property
    def matrices(self) -> int:
        """The most that a step loads."""
        return max(len(sweep.matrices) for sweep in self.sweeps)

    def exists(self, tile: Tile) -> jax.Array:
        """1 or 0: beyond the last group nothing is multiplied."""
        return jnp.where(tile.group < sum(self.slots), 1, 0)

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
    sums: Sequence[Sequence[Sweep]],
    transposed: bool,
    epilogue: Epilogue,
    outputs: int = 1,
    out_dtype: Any = jnp.bfloat16,
    row_sums: bool = False,
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
        sums: sweeps that add to the same accumulators, and then others that start with new ones. The epilogue gets
            all accumulators in order, those of the last sweeps in float32, of those before them in bfloat16.
        transposed: whether matrices are summed over their last axis.
        epilogue: what becomes of them.
        outputs: how many values that gives.
        out_dtype: of the outputs.
        row_sums: whether it gives a row sum.
        padding: whether rows beyond the last group are written, as zeros; else they hold anything.
        tiles: sizes.

    Returns:
        The outputs ``[r, n]``; with row sums also ``[n / columns, t, tiles.rows]`` float32, of each tile by its number,
        with room for any groups.
    """
    slots = (home.shape[0], replica.shape[0])
    (num_rows, contraction), columns = rows[0].shape, home.shape[2 if transposed else 3]
    across = columns // tiles.columns
    plan = Plan(sums, transposed, epilogue, outputs, padding, tiles, slots, contraction // STEP, across)
    outs = [jax.ShapeDtypeStruct((num_rows, columns), out_dtype)] * outputs
    if row_sums:
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
        buffers=[(tiles.rows, STEP), *[matrix] * plan.matrices],
        out_dtype=out_dtype,
        tiles=tiles,
    )


def _copies(plan: Plan, operands: Operands, ring: Ring, buffers: Sequence[Any]) -> jax.Array:
    """Fill the ring with the steps of every tile."""
    for_rows, *for_matrices = buffers
    homes, replicas = plan.slots

    def of_tile(tile: Tile, column: jax.Array, step: jax.Array) -> jax.Array:
        own = pl.ds(pl.multiple_of(tile.first, ALIGNED), plan.tiles.rows)
        across = pl.ds(column * plan.tiles.columns, plan.tiles.columns)

        def fill(sweep: Sweep, index: jax.Array, step: jax.Array) -> jax.Array:
            stage, along = ring.claim(step), pl.ds(index * STEP, STEP)

            def copy(source: Any, buffer: Any) -> None:
                plgpu.copy_gmem_to_smem(source, buffer.at[stage], ring.full.at[stage])

            def copy_matrices(weights: Any, slot: jax.Array) -> None:
                part = (across, along) if plan.transposed else (along, across)
                for matrix, buffer in zip(sweep.matrices, for_matrices, strict=False):
                    copy(weights.at[(slot, matrix, *part)], buffer)

            copy(operands.rows[sweep.rows].at[own, along], for_rows)
            of_home = tile.group < homes
            pl.when(of_home)(lambda: copy_matrices(operands.weights[0], tile.group))
            if replicas:
                pl.when(~of_home)(lambda: copy_matrices(operands.weights[1], tile.group - homes))
            # The barrier counts one arrival for each buffer, those that this sweep has no use for too.
            for _ in for_matrices[len(sweep.matrices) :]:
                plgpu.barrier_arrive(ring.full.at[stage])
            return step + 1

        for sweep in plan.sweeps:
            step = jax.lax.fori_loop(0, plan.steps * plan.exists(tile), functools.partial(fill, sweep), step)
        return step

    return plan.visit_tiles(operands.walls, of_tile)


def _products(
    plan: Plan, operands: Operands, outs: Sequence[Any], ring: Ring, buffers: Sequence[Any], out_buffer: Any
) -> None:
    """Multiply the ring's steps, this warpgroup's 64 rows of each tile, and write what becomes of them."""
    offset = jax.lax.axis_index("warpgroup") * ROWS

    def of_tile(tile: Tile, column: jax.Array, step: jax.Array) -> jax.Array:
        at, count = tile.first + offset, plan.steps * plan.exists(tile)
        low, high = jnp.clip(tile.start - at, 0, ROWS), jnp.clip(tile.end - at, 0, ROWS)

        @pl.when(low < high)
        def _() -> None:
            sums = _sum_up(plan, ring, buffers, offset, step, count)
            factor = None
            if operands.scale:
                layout = plgpu.Layout.WGMMA.reduce(1)
                factor = plgpu.load(operands.scale[0].at[pl.ds(at, ROWS)], layout=layout, optimized=False)
                factor = jax.lax.broadcast_in_dim(factor, (ROWS, PIECE), (0,))
            row_sums: list[jax.Array] = []

            def parts() -> Iterator[tuple[jax.Array, Callable[..., Any]]]:
                dtype, line = out_buffer.dtype, out_buffer.shape[-1]
                for first in range(0, plan.tiles.columns, line):
                    pieces = []
                    for begin in range(first, first + line, PIECE):
                        piece = [one[:, begin : begin + PIECE] for one in sums]
                        values, row_sum = plan.epilogue(piece, factor)
                        pieces.append([value.astype(dtype) for value in values])
                        row_sums.extend([] if row_sum is None else [row_sum])
                    for value, out in zip(zip(*pieces, strict=True), outs, strict=False):
                        place = functools.partial(target, out, column * plan.tiles.columns + first)
                        yield jnp.concatenate(value, axis=1), place

            def target(out: Any, first: jax.Array, rows: Any, columns: Any) -> Any:
                return out.at[pl.ds(at + rows.start, rows.size), pl.ds(first + columns.start, columns.size)]

            write(parts(), out_buffer, low, high)
            if row_sums:
                outs[-1][column, tile.number, pl.ds(offset, ROWS)] = functools.reduce(operator.add, row_sums)

        all_steps = count * len(plan.sweeps)

        @pl.when(low == high)
        def _() -> None:
            def pass_by(index: jax.Array, step: jax.Array) -> jax.Array:
                ring.wait(step)
                ring.release(step)
                return step + 1

            jax.lax.fori_loop(0, all_steps, pass_by, step)

        return step + all_steps

    plan.visit_tiles(operands.walls, of_tile)


def _sum_up(
    plan: Plan, ring: Ring, buffers: Sequence[Any], offset: jax.Array, step: jax.Array, count: jax.Array
) -> list[jax.Array]:
    """What a tile's sweeps of ``count`` steps leave, the first of which starts at ``step``."""
    found: list[jax.Array] = []
    for sweeps in plan.sums:
        found = [one.astype(jnp.bfloat16) for one in found]
        multiply = functools.partial(_multiply, plan, sweeps, ring, buffers, offset, step, count)
        found += pl.run_scoped(multiply, [plgpu.ACC((ROWS, plan.tiles.columns)) for _ in sweeps[0].matrices])
        step += len(sweeps) * count
    return found


def _multiply(
    plan: Plan,
    sweeps: Sequence[Sweep],
    ring: Ring,
    buffers: Sequence[Any],
    offset: jax.Array,
    step: jax.Array,
    count: jax.Array,
    accumulators: Sequence[Any],
) -> list[jax.Array]:
    """Add up the products of sweeps that share accumulators."""
    for_rows, *for_matrices = buffers

    def add(sweep: Sweep, first: jax.Array, index: jax.Array, step: jax.Array) -> jax.Array:
        stage = ring.wait(step)
        own = for_rows.at[stage, pl.ds(offset, ROWS)]
        for accumulator, buffer in zip(accumulators, for_matrices[: len(sweep.matrices)], strict=True):
            matrix = buffer.at[stage]
            plgpu.wgmma(accumulator, own, matrix.transpose((1, 0)) if plan.transposed else matrix)
        # Products of this step go on while those of the last one are known to be done.
        plgpu.wgmma_wait(len(sweep.matrices))
        pl.when(step > first)(lambda: ring.release(step - 1))
        return step + 1

    first = step
    for sweep in sweeps:
        step = jax.lax.fori_loop(0, count, functools.partial(add, sweep, first), step)
    plgpu.wgmma_wait(0)
    pl.when(count > 0)(lambda: ring.release(step - 1))
    return [accumulator[...] for accumulator in accumulators]
