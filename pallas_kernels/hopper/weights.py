"""The kernel for weight gradients: each group's rows, transposed, times its rows of another operand.

The contraction runs over rows, from a multiple of 8 at or before the group's first one. Rows of other groups in the
first and the last step are set to zero in shared memory, in both operands: they may hold anything, and zero times
infinity is not zero. The two warpgroups share that work and wait for each other.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.launch import ROWS, STEP, Ring, Tiles, launch, write
from pallas_kernels.hopper.schedule import ALIGNED, align


class Operands(NamedTuple):
    """What the kernel reads."""

    walls: Any
    pairs: list[tuple[Any, Any]]


class Visit(NamedTuple):
    """One tile of one group's output, and the rows that it is summed over; int32 all."""

    group: jax.Array
    pair: jax.Array
    row: jax.Array
    """The tile's first row of k."""
    column: jax.Array
    """Its first column of n."""
    start: jax.Array
    """The group's first row."""
    end: jax.Array
    """After its last row."""

    @property
    def first(self) -> jax.Array:
        """Where the steps start."""
        return align(self.start)

    @property
    def steps(self) -> jax.Array:
        """None for an empty group."""
        steps = jax.lax.div(self.end - self.first + (STEP - 1), jnp.int32(STEP))
        return jnp.where(self.end > self.start, steps, 0)


class Plan(NamedTuple):
    """What a kernel is compiled for."""

    slots: tuple[int, int]
    pairs: int
    shape: tuple[int, int]
    """k and n."""
    tiles: Tiles

    def visit_tiles(self, walls: Any, of_tile: Callable[[Visit, jax.Array], jax.Array]) -> jax.Array:
        """This block's share, every n-th tile: ``(visit, steps so far) -> steps so far``."""
        block, blocks = jax.lax.axis_index("block"), jax.lax.axis_size("block")
        # From the fastest axis to the slowest: columns, rows, pairs, groups.
        sizes = self.shape[1] // self.tiles.columns, -(-self.shape[0] // self.tiles.rows), self.pairs
        count = sum(self.slots) * sizes[0] * sizes[1] * sizes[2]

        def visit(index: jax.Array, step: jax.Array) -> jax.Array:
            places, left = [], block + index * blocks
            for size in sizes:
                places.append(jax.lax.rem(left, jnp.int32(size)))
                left = jax.lax.div(left, jnp.int32(size))
            column, row, pair = places
            place = left, pair, row * self.tiles.rows, column * self.tiles.columns
            return of_tile(Visit(*place, walls[left], walls[left + 1]), step)

        share = jax.lax.div(count - block + (blocks - 1), jnp.int32(blocks))
        return jax.lax.fori_loop(0, share, visit, jnp.int32(0))


def weights_kernel(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    walls: jax.Array,
    slots: tuple[int, int],
    *,
    out_dtype: Any = jnp.bfloat16,
    tiles: Tiles,
) -> tuple[jax.Array, jax.Array]:
    """``a[group]^T b[group]`` for every group and each of J pairs.

    Args:
        pairs: ``[r, k]`` and ``[r, n]`` bfloat16; r a multiple of 8, k one of 64, n one of ``tiles.columns``.
        walls: ``[H + R + 3]`` int32, from `hopper.schedule.walls`.
        slots: H and R.
        out_dtype: of the results.
        tiles: sizes; ``tiles.rows`` of k.

    Returns:
        ``[H, J, k, n]`` and ``[R, J, k, n]``; zeros for empty groups.
    """
    shape = pairs[0][0].shape[1], pairs[0][1].shape[1]
    plan = Plan(slots, len(pairs), shape, tiles)
    outs = [jax.ShapeDtypeStruct((count, len(pairs), *shape), out_dtype) for count in slots if count]
    found = launch(
        functools.partial(_copies, plan),
        functools.partial(_products, plan),
        Operands(walls, list(pairs)),
        outs,
        buffers=[(STEP, tiles.rows), (STEP, tiles.columns)],
        out_dtype=out_dtype,
        tiles=tiles,
        masked=plgpu.Barrier(num_arrivals=tiles.rows // ROWS),
    )
    return found[0], found[-1][: slots[1]]


def _copies(plan: Plan, operands: Operands, ring: Ring, buffers: Sequence[Any]) -> jax.Array:
    """Fill the ring with the steps of every tile."""

    def of_tile(visit: Visit, step: jax.Array) -> jax.Array:
        def fill(index: jax.Array, step: jax.Array) -> jax.Array:
            stage = ring.claim(step)
            along = pl.ds(pl.multiple_of(visit.first + index * STEP, ALIGNED), STEP)
            parts = pl.ds(visit.row, plan.tiles.rows), pl.ds(visit.column, plan.tiles.columns)

            def copy_pair(refs: tuple[Any, Any]) -> None:
                for ref, part, buffer in zip(refs, parts, buffers, strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[along, part], buffer.at[stage], ring.full.at[stage])

            for number, refs in enumerate(operands.pairs):
                pl.when(visit.pair == number)(functools.partial(copy_pair, refs))
            return step + 1

        return jax.lax.fori_loop(0, visit.steps, fill, step)

    return plan.visit_tiles(operands.walls, of_tile)


def _products(
    plan: Plan,
    operands: Operands,
    outs: Sequence[Any],
    ring: Ring,
    buffers: Sequence[Any],
    out_buffer: Any,
    masked: Any,
) -> None:
    """Multiply the ring's steps, this warpgroup's 64 rows of each tile, and write them."""
    offset = jax.lax.axis_index("warpgroup") * ROWS
    homes, replicas = plan.slots

    def of_tile(visit: Visit, step: jax.Array) -> jax.Array:
        multiply = functools.partial(_multiply, plan, ring, buffers, masked, visit, step)
        value = pl.run_scoped(multiply, plgpu.ACC((ROWS, plan.tiles.columns)))
        at = visit.row + offset

        def store(out: Any, slot: jax.Array) -> None:
            def target(rows: Any, columns: Any) -> Any:
                part = pl.ds(at + rows.start, rows.size), pl.ds(visit.column + columns.start, columns.size)
                return out.at[(slot, visit.pair, *part)]

            write([(value, target)], out_buffer, 0, ROWS)

        inside = at < plan.shape[0]
        pl.when(inside & (visit.group < homes))(lambda: store(outs[0], visit.group))
        if replicas:
            pl.when(inside & (visit.group >= homes))(lambda: store(outs[1], visit.group - homes))
        return step + visit.steps

    plan.visit_tiles(operands.walls, of_tile)


def _multiply(
    plan: Plan,
    ring: Ring,
    buffers: Sequence[Any],
    masked: Any,
    visit: Visit,
    step: jax.Array,
    accumulator: Any,
) -> jax.Array:
    """Add up the products of the visit's steps, the first of which is ``step``."""
    own = pl.ds(jax.lax.axis_index("warpgroup") * ROWS, ROWS)
    count = visit.steps

    def add(index: jax.Array, step: jax.Array) -> jax.Array:
        stage, at = ring.wait(step), visit.first + index * STEP
        low, high = visit.start - at, visit.end - at
        pl.when((low > 0) | (high < STEP))(lambda: _clear(plan, buffers, masked, stage, low, high))
        plgpu.wgmma(accumulator, buffers[0].at[stage, :, own].transpose((1, 0)), buffers[1].at[stage])
        plgpu.wgmma_wait(1)
        pl.when(index > 0)(lambda: ring.release(step - 1))
        return step + 1

    jax.lax.fori_loop(0, count, add, step)
    plgpu.wgmma_wait(0)
    pl.when(count > 0)(lambda: ring.release(step + count - 1))
    return accumulator[...]


def _clear(
    plan: Plan, buffers: Sequence[Any], masked: Any, stage: jax.Array, low: jax.Array, high: jax.Array
) -> None:
    """Zero all rows of a step but ``low..high``, each warpgroup its share, and wait for the others."""
    warpgroup = jax.lax.axis_index("warpgroup")
    row = plgpu.broadcasted_iota(jnp.int32, (STEP, 64), 0, layout=plgpu.Layout.WGMMA)

    def clear_block(block: Any) -> None:
        values = plgpu.load(block, layout=plgpu.Layout.WGMMA, optimized=False)
        block[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))

    for buffer in buffers:
        for number in range(buffer.shape[-1] // 64):
            block = buffer.at[stage, :, pl.ds(number * 64, 64)]
            mine = warpgroup == number % (plan.tiles.rows // ROWS)
            pl.when(mine)(functools.partial(clear_block, block))
    plgpu.commit_smem()
    plgpu.barrier_arrive(masked)
    plgpu.barrier_wait(masked)
