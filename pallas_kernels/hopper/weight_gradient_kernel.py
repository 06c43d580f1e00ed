"""The Hopper kernel for weight gradients: the product of a group's transposed rows and its rows of another operand.

The contraction runs over rows. It starts at the last multiple of 8 at or before the first row of the group. In the
first and the last step, the kernel sets the rows of other groups to zero in shared memory. It does so in both operands,
since these rows may have any value, and zero times infinity is not zero. The warpgroups share that work and then
synchronise.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.persistent_kernel import (
    STEP,
    WARPGROUP_HEIGHT,
    Ring,
    TileSizes,
    launch,
    visit_buffer,
)
from pallas_kernels.hopper.tile_output import output_has, write_output
from pallas_kernels.hopper.tile_walk import ROW_ALIGNMENT, align_down
from pallas_kernels.products import WeightGradientOperands


class Visit(NamedTuple):
    """One tile of one group's output, and the rows that are summed for it; all fields are int32."""

    group: jax.Array
    """The index of the group, which is also its weight slot."""
    pair: jax.Array
    """The index of the pair of row operands."""
    top: jax.Array
    """The first index of the tile along k."""
    left: jax.Array
    """The first index of the tile along n."""
    start: jax.Array
    """The group's first row."""
    end: jax.Array
    """The row after the group's last one."""

    @property
    def first(self) -> jax.Array:
        """The row at which the steps start."""
        return align_down(self.start)

    @property
    def steps(self) -> jax.Array:
        """The number of steps, 0 for an empty group."""
        steps = jax.lax.div(self.end - self.first + (STEP - 1), jnp.int32(STEP))
        return jnp.where(self.end > self.start, steps, 0)


class WeightGradientSpec(NamedTuple):
    """The static parameters of a kernel."""

    slots: tuple[int, ...]
    """The number of slots of each weight buffer."""
    pairs: int
    """The number of pairs of row operands."""
    shape: tuple[int, int]
    """The shape (k, n) of a weight gradient."""
    tiles: TileSizes

    def visit_tiles(self, group_offsets: Any, of_tile: Callable[[Visit, jax.Array], jax.Array]) -> jax.Array:
        """Call ``(visit, steps so far) -> steps so far`` for every output tile of this cluster."""
        block, blocks = jax.lax.axis_index("block"), jax.lax.axis_size("block")
        # The axes from fastest to slowest are tiles along n, tiles along k, pairs, groups.
        height = self.tiles.cluster_height
        sizes = -(-self.shape[1] // self.tiles.width), -(-self.shape[0] // height), self.pairs
        count = sum(self.slots) * sizes[0] * sizes[1] * sizes[2]

        def visit(index: jax.Array, step: jax.Array) -> jax.Array:
            places, rest = [], block + index * blocks
            for size in sizes:
                places.append(jax.lax.rem(rest, jnp.int32(size)))
                rest = jax.lax.div(rest, jnp.int32(size))
            (across, down, pair), group = places, rest
            place = group, pair, down * height + self.tiles.top(), across * self.tiles.width
            return of_tile(Visit(*place, group_offsets[group], group_offsets[group + 1]), step)

        share = jax.lax.div(count - block + (blocks - 1), jnp.int32(blocks))
        return jax.lax.fori_loop(0, share, visit, jnp.int32(0))


def weight_gradient_kernel(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    group_offsets: jax.Array,
    slots: tuple[int, ...],
    *,
    out_dtype: Any = jnp.bfloat16,
    tiles: TileSizes,
) -> tuple[jax.Array, ...]:
    """Compute ``a[group]^T b[group]`` for every group and each of J pairs of row operands.

    Args:
        pairs: the pairs (a, b) of row operands, bfloat16 ``[r, k]`` and ``[r, n]``, with r a multiple of 8, and k and n
            multiples of 64.
        group_offsets: the group offsets as `tile_walk.group_offsets` returns them, int32 ``[all slots + 3]``.
        slots: the number of slots of each weight buffer, each at least 1.
        out_dtype: the dtype of the results.
        tiles: the sizes of the output tiles, with the height along k and the width along n.

    Returns:
        One array ``[slots, J, k, n]`` for each weight buffer, with zeros for empty groups.
    """
    shape = pairs[0][0].shape[1], pairs[0][1].shape[1]
    spec = WeightGradientSpec(slots, len(pairs), shape, tiles)
    outs = [jax.ShapeDtypeStruct((count, len(pairs), *shape), out_dtype) for count in slots]
    return launch(
        functools.partial(_copy_steps, spec),
        functools.partial(_multiply_steps, spec),
        WeightGradientOperands(group_offsets, list(pairs)),
        outs,
        buffers=[(STEP, tiles.height), (STEP, tiles.width)],
        out_dtype=out_dtype,
        tiles=tiles,
        cleared=plgpu.Barrier(num_arrivals=tiles.height // WARPGROUP_HEIGHT),
    )


def _copy_steps(
    spec: WeightGradientSpec, operands: WeightGradientOperands, ring: Ring, buffers: Sequence[Any]
) -> jax.Array:
    """Copy the operands of all steps of this block's tiles into the ring's buffers, and return the number of steps."""

    def of_tile(visit: Visit, step: jax.Array) -> jax.Array:
        def fill(index: jax.Array, step: jax.Array) -> jax.Array:
            stage = ring.claim(step)
            along = pl.ds(pl.multiple_of(visit.first + index * STEP, ROW_ALIGNMENT), STEP)
            parts = pl.ds(visit.top, spec.tiles.height), pl.ds(visit.left, spec.tiles.width)

            def copy_pair(refs: tuple[Any, Any]) -> None:
                # The tiles of a cluster have different rows of the output but the same columns.
                axes = None, spec.tiles.cluster_axis
                for ref, part, buffer, axis in zip(refs, parts, buffers, axes, strict=True):
                    source, full = ref.at[along, part], ring.full.at[stage]
                    plgpu.copy_gmem_to_smem(source, buffer.at[stage], full, collective_axes=axis)

            for number, refs in enumerate(operands.pairs):
                pl.when(visit.pair == number)(functools.partial(copy_pair, refs))
            return step + 1

        return jax.lax.fori_loop(0, visit.steps, fill, step)

    return spec.visit_tiles(operands.groups, of_tile)


def _multiply_steps(
    spec: WeightGradientSpec,
    operands: WeightGradientOperands,
    outs: Sequence[Any],
    ring: Ring,
    buffers: Sequence[Any],
    out_buffer: Any,
    cleared: Any,
) -> None:
    """Multiply all steps for this warpgroup's 64 rows of each output tile, and write the sums."""
    offset = jax.lax.axis_index("warpgroup") * WARPGROUP_HEIGHT

    def of_tile(visit: Visit, step: jax.Array) -> jax.Array:
        accumulate = functools.partial(_accumulate, spec, ring, buffers, cleared, visit, step)
        value = pl.run_scoped(accumulate, plgpu.ACC((WARPGROUP_HEIGHT, spec.tiles.width)))
        at = visit.top + offset

        def store(number: int, slot: jax.Array) -> None:
            def target(rows: Any, columns: Any) -> Any:
                part = pl.ds(at + rows.start, rows.size), pl.ds(visit.left + columns.start, columns.size)
                return outs[number].at[(slot, visit.pair, *part)]

            across = jax.lax.div(visit.left, jnp.int32(spec.tiles.width))
            has = output_has(across, spec.tiles.width, spec.shape[1])
            write_output([(0, value, target)], out_buffer, 0, WARPGROUP_HEIGHT, has)

        pl.when(at < spec.shape[0])(lambda: visit_buffer(spec.slots, visit.group, store))
        return step + visit.steps

    spec.visit_tiles(operands.groups, of_tile)


def _accumulate(
    spec: WeightGradientSpec,
    ring: Ring,
    buffers: Sequence[Any],
    cleared: Any,
    visit: Visit,
    step: jax.Array,
    accumulator: Any,
) -> jax.Array:
    """Return the sum of the products of all steps of a visit, which start at step ``step``."""
    own = pl.ds(jax.lax.axis_index("warpgroup") * WARPGROUP_HEIGHT, WARPGROUP_HEIGHT)

    def start_product(stage: jax.Array, index: jax.Array) -> int:
        at = visit.first + index * STEP
        low, high = visit.start - at, visit.end - at
        pl.when((low > 0) | (high < STEP))(lambda: _clear_others(spec, buffers, cleared, stage, low, high))
        plgpu.wgmma(accumulator, buffers[0].at[stage, :, own].transpose((1, 0)), buffers[1].at[stage])
        return 1

    ring.multiply([start_product], step, visit.steps)
    return accumulator[...]


def _clear_others(
    spec: WeightGradientSpec,
    buffers: Sequence[Any],
    cleared: Any,
    stage: jax.Array,
    low: jax.Array,
    high: jax.Array,
) -> None:
    """Set all rows of a step except ``low..high`` to zero; each warpgroup clears a share and waits for the others."""
    warpgroup = jax.lax.axis_index("warpgroup")
    row = plgpu.broadcasted_iota(jnp.int32, (STEP, 64), 0, layout=plgpu.Layout.WGMMA)

    def clear_block(block: Any) -> None:
        values = plgpu.load(block, layout=plgpu.Layout.WGMMA, optimized=False)
        block[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))

    for buffer in buffers:
        for number in range(buffer.shape[-1] // 64):
            block = buffer.at[stage, :, pl.ds(number * 64, 64)]
            own_share = warpgroup == number % (spec.tiles.height // WARPGROUP_HEIGHT)
            pl.when(own_share)(functools.partial(clear_block, block))
    plgpu.commit_smem()
    plgpu.barrier_arrive(cleared)
    plgpu.barrier_wait(cleared)
