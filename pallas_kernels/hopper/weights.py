"""The kernel for weight gradients: each group's rows, transposed, times its rows of another operand.

The contraction runs over rows, from a multiple of 8 at or before the group's first one. Rows of other groups in the
first and the last step are set to zero in shared memory, in both operands: they may hold anything, and zero times
infinity is not zero. The two warpgroups share that work and wait for each other.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.launch import ALIGNED, ROWS, STEP, Ring, Tiles, launch, over_tiles, write


def weights_kernel(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    bounds: jax.Array,
    slots: tuple[int, int],
    *,
    out_dtype: Any = jnp.bfloat16,
    tiles: Tiles,
) -> tuple[jax.Array, jax.Array]:
    """``a[group]^T b[group]`` for every group and each of J pairs.

    Args:
        pairs: ``[r, k]`` and ``[r, n]`` bfloat16; r a multiple of 8, k one of 64, n one of ``tiles.columns``.
        bounds: ``[H + R + 1]`` int32, where each group starts and the last one ends.
        slots: H and R.
        out_dtype: of the results.
        tiles: sizes; ``tiles.rows`` of k.

    Returns:
        ``[H, J, k, n]`` and ``[R, J, k, n]``; zeros for empty groups.
    """
    k, n = pairs[0][0].shape[1], pairs[0][1].shape[1]
    down, across = -(-k // tiles.rows), n // tiles.columns
    warpgroups = tiles.rows // ROWS

    def place(bounds: Any, visit: jax.Array) -> tuple[jax.Array, ...]:
        """Group, pair, first row of k, first column of n, first row of the contraction, and steps of a visit."""
        left, column = jax.lax.div(visit, jnp.int32(across)), jax.lax.rem(visit, jnp.int32(across))
        left, row = jax.lax.div(left, jnp.int32(down)), jax.lax.rem(left, jnp.int32(down))
        group, pair = jax.lax.div(left, jnp.int32(len(pairs))), jax.lax.rem(left, jnp.int32(len(pairs)))
        start, end = bounds[group], bounds[group + 1]
        first = jax.lax.div(start, jnp.int32(ALIGNED)) * ALIGNED
        steps = jax.lax.div(end - first + (STEP - 1), jnp.int32(STEP))
        return group, pair, row * tiles.rows, column * tiles.columns, first, jnp.where(end > start, steps, 0)

    visits = sum(slots) * len(pairs) * down * across

    def copies(operands: Any, ring: Ring, buffers: Sequence[Any]) -> jax.Array:
        bounds, pairs = operands

        def of_tile(visit: jax.Array, step: jax.Array) -> jax.Array:
            _, pair, row, column, first, count = place(bounds, visit)

            def fill(index: jax.Array, step: jax.Array) -> jax.Array:
                stage = ring.claim(step)
                along = pl.ds(pl.multiple_of(first + index * STEP, ALIGNED), STEP)
                parts = (along, pl.ds(row, tiles.rows)), (along, pl.ds(column, tiles.columns))

                def of_pair(refs: Any) -> None:
                    for ref, part, buffer in zip(refs, parts, buffers, strict=True):
                        plgpu.copy_gmem_to_smem(ref.at[part], buffer.at[stage], ring.full.at[stage])

                for number, refs in enumerate(pairs):
                    pl.when(pair == number)(functools.partial(of_pair, refs))
                return step + 1

            return jax.lax.fori_loop(0, count, fill, step)

        return over_tiles(jnp.int32(visits), of_tile)

    def products(
        operands: Any, outs: Sequence[Any], ring: Ring, buffers: Sequence[Any], out_buffer: Any, masked: Any
    ) -> None:
        bounds, _ = operands
        warpgroup = jax.lax.axis_index("warpgroup")
        own = pl.ds(warpgroup * ROWS, ROWS)

        def clear(stage: jax.Array, low: jax.Array, high: jax.Array) -> None:
            """Zero all rows of a step but ``low..high``."""
            row = plgpu.broadcasted_iota(jnp.int32, (STEP, 64), 0, layout=plgpu.Layout.WGMMA)

            def clear_block(block: Any) -> None:
                values = plgpu.load(block, layout=plgpu.Layout.WGMMA, optimized=False)
                block[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))

            for buffer in buffers:
                for number in range(buffer.shape[-1] // 64):
                    block = buffer.at[stage, :, pl.ds(number * 64, 64)]
                    pl.when(warpgroup == number % warpgroups)(functools.partial(clear_block, block))
            plgpu.commit_smem()
            plgpu.barrier_arrive(masked)
            plgpu.barrier_wait(masked)

        def of_tile(visit: jax.Array, step: jax.Array) -> jax.Array:
            group, pair, row, column, first, count = place(bounds, visit)
            start, end = bounds[group], bounds[group + 1]

            def multiply(acc: Any) -> jax.Array:
                def add(index: jax.Array, step: jax.Array) -> jax.Array:
                    stage, at = ring.wait(step), first + index * STEP
                    low, high = start - at, end - at
                    pl.when((low > 0) | (high < STEP))(lambda: clear(stage, low, high))
                    plgpu.wgmma(acc, buffers[0].at[stage, :, own].transpose((1, 0)), buffers[1].at[stage])
                    plgpu.wgmma_wait(1)
                    pl.when(index > 0)(lambda: ring.release(step - 1))
                    return step + 1

                jax.lax.fori_loop(0, count, add, step)
                plgpu.wgmma_wait(0)
                pl.when(count > 0)(lambda: ring.release(step + count - 1))
                return acc[...]

            value = pl.run_scoped(multiply, plgpu.ACC((ROWS, tiles.columns)))
            at = row + warpgroup * ROWS

            def store(out: Any, slot: jax.Array) -> None:
                def target(rows: Any, columns: Any) -> Any:
                    rows, columns = (
                        pl.ds(at + rows.start, rows.size),
                        pl.ds(column + columns.start, columns.size),
                    )
                    return out.at[slot, pair, rows, columns]

                write([value], out_buffer, [target], 0, ROWS)

            inside = at < k
            pl.when(inside & (group < slots[0]))(lambda: store(outs[0], group))
            if slots[1]:
                pl.when(inside & (group >= slots[0]))(lambda: store(outs[1], group - slots[0]))
            return step + count

        over_tiles(jnp.int32(visits), of_tile)

    outs = [jax.ShapeDtypeStruct((count, len(pairs), k, n), out_dtype) for count in slots if count]
    found = launch(
        copies,
        products,
        (bounds, [list(pair) for pair in pairs]),
        outs,
        buffers=[(STEP, tiles.rows), (STEP, tiles.columns)],
        out_dtype=out_dtype,
        tiles=tiles,
        masked=plgpu.Barrier(num_arrivals=warpgroups),
    )
    return found[0], found[-1][: slots[1]]
