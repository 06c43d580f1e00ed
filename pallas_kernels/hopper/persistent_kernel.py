"""The frame of the Hopper kernels: how one is launched, how its operands are copied, how its output is written.

A kernel is persistent: one block for each multiprocessor visits every n-th tile of the output. One warpgroup of a
block does nothing but copy the operands of the next steps into a ring of buffers in shared memory (TMA), on across the
ends of tiles; the others multiply (wgmma), 64 rows of the output tile each. The two sides meet at a pair of barriers
for each buffer.

The copy of a tile's output must spare rows of its neighbours, which other blocks write at the same time. Sizes of
copies are fixed in the program, so a tile that is not full is copied as a sum of powers of two rows. Outputs pass
through a buffer that is swizzled but not tiled: the swizzle follows the address, so any row may start a copy.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import config
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tile_walk import ROW_ALIGNMENT

STEP: Final = 64
"""Elements of a contraction that one buffer holds: 128 bytes, the widest swizzle."""
WARPGROUP_HEIGHT: Final = 64
"""Rows of an output tile that one warpgroup computes: the height of a wgmma instruction."""
LINE_BYTES: Final = 128
"""Bytes of a row in the buffer for outputs."""
SHARED_MEMORY_BYTES: Final = 227 * 1024
"""Shared memory that a block may use on compute capability 9.0."""

# Type checkers take transforms for abstract classes.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform
_TILED: Final = (_tiling((ROW_ALIGNMENT, STEP)), _swizzle(LINE_BYTES))


class TileSizes(NamedTuple):
    """The size of a kernel's output tiles, and how far its copies run ahead."""

    height: int
    """Rows of an output tile: 64 for each warpgroup that multiplies."""
    width: int
    """Columns of an output tile: a multiple of 64, at most 256."""
    stages: int
    """How many steps have their operands in shared memory, at least 2."""


class Ring(NamedTuple):
    """The barriers of a ring of buffers; steps are counted through all tiles of a block."""

    full: Any
    """One barrier for each buffer, at which copies arrive."""
    free: Any
    """One barrier for each buffer, at which the warpgroups arrive that have read it."""
    stages: int
    """The number of buffers."""

    def buffer(self, step: jax.Array) -> jax.Array:
        """Return the index of the buffer that holds a step's operands."""
        return jax.lax.rem(step, jnp.int32(self.stages))

    def claim(self, step: jax.Array) -> jax.Array:
        """Wait until nobody reads a step's buffer any more, and return its index; for the copying warpgroup."""
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[self.buffer(step)]))
        return self.buffer(step)

    def drain(self, steps: jax.Array) -> None:
        """Wait until every buffer was read, after ``steps`` steps in all; for the copying warpgroup, at its end.

        No barrier is then left with an arrival that nobody waited for.
        """

        def wait(step: jax.Array, _: None) -> None:
            plgpu.barrier_wait(self.free.at[self.buffer(step)])

        jax.lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, wait, None)

    def wait(self, step: jax.Array) -> jax.Array:
        """Wait until a step's buffer is filled, and return its index; for the warpgroups that multiply."""
        plgpu.barrier_wait(self.full.at[self.buffer(step)])
        return self.buffer(step)

    def release(self, step: jax.Array) -> None:
        """Say that this warpgroup has read a step's buffer; for the warpgroups that multiply."""
        plgpu.barrier_arrive(self.free.at[self.buffer(step)])

    def multiply(
        self, sweeps: Sequence[Callable[[jax.Array, jax.Array], int]], first: jax.Array, count: jax.Array
    ) -> None:
        """Run the products of all steps of a tile, and release each step's buffer as soon as it was read.

        Args:
            sweeps: one function for each pass over the contraction. ``(buffer, index of the step in its sweep)``
                starts the products (wgmma) of a step and returns how many it started.
            first: the first step of the first sweep; the others follow.
            count: the number of steps of a sweep, which may be 0.
        """

        def run_step(start_products: Callable[..., int], index: jax.Array, step: jax.Array) -> jax.Array:
            started = start_products(self.wait(step), index)
            # Products of this step go on while those of the last one are known to be done.
            plgpu.wgmma_wait(started)
            pl.when(step > first)(lambda: self.release(step - 1))
            return step + 1

        step = first
        for start_products in sweeps:
            step = jax.lax.fori_loop(0, count, functools.partial(run_step, start_products), step)
        plgpu.wgmma_wait(0)
        pl.when(count > 0)(lambda: self.release(step - 1))


def multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU that is here, or else of an H100 or H200 (SXM)."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def interpreted() -> bool:
    """Return whether kernels that are traced now run in JAX's GPU interpreter."""
    mode = config.pallas_tpu_interpret_mode_context_manager.value
    return isinstance(mode, plgpu.InterpretGPUParams)


def pad_rows(array: jax.Array) -> jax.Array:
    """Return ``[r, ...]`` with rows of zeros behind it up to a multiple of 8, or the array itself if r is one."""
    short = -array.shape[0] % ROW_ALIGNMENT
    return jnp.pad(array, ((0, short), *((0, 0),) * (array.ndim - 1))) if short else array


def visit_buffer(
    slots: Sequence[int], group: jax.Array, visit: Callable[[int, jax.Array], None], number: int = 0
) -> None:
    """Call ``(number of the buffer, slot in the buffer)`` for the weight buffer that holds a group's slot.

    A reference cannot be chosen by data, so the program has a branch for every buffer.

    Args:
        slots: the number of slots of each weight buffer, at least 1; their groups follow one another.
        group: the number of the group, int32.
        visit: the function to call.
        number: the number of the first buffer.
    """
    count, *others = slots
    if not others:
        visit(number, group)
        return
    here = group < count
    pl.when(here)(lambda: visit(number, group))
    pl.when(~here)(lambda: visit_buffer(others, group - count, visit, number + 1))


def launch(
    copy_steps: Callable[..., jax.Array],
    multiply_steps: Callable[..., None],
    operands: Any,
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    buffers: Sequence[tuple[int, int]],
    out_dtype: Any,
    tiles: TileSizes,
    **barriers: Any,
) -> tuple[jax.Array, ...]:
    """Run a kernel on every block of the GPU.

    Args:
        copy_steps: the function of the copying warpgroup. ``(operands, ring, buffers)`` fills the buffers with the
            steps of all tiles of a block and returns how many steps it filled.
        multiply_steps: the function of the other warpgroups. ``(operands, outs, ring, buffers, out buffer,
            **barriers)`` reads the buffers and writes the outputs.
        operands: a tree of arrays; the functions get it with references in their place.
        outs: the shapes and dtypes of the outputs.
        buffers: the shapes of the bfloat16 buffers that one step fills.
        out_dtype: the dtype of the two buffers of each warpgroup that outputs pass through.
        tiles: the sizes of output tiles.
        barriers: further barriers that ``multiply_steps`` is given, by name.

    Returns:
        The outputs.
    """
    leaves, tree = jax.tree.flatten(operands)
    warpgroups = tiles.height // WARPGROUP_HEIGHT

    def body(*refs: Any) -> None:
        inputs, outputs = jax.tree.unflatten(tree, refs[: len(leaves)]), refs[len(leaves) :]

        def scope(buffers: Any, out_buffer: Any, full: Any, free: Any, **barriers: Any) -> None:
            ring = Ring(full, free, tiles.stages)
            warpgroup = jax.lax.axis_index("warpgroup")

            def copy() -> None:
                plgpu.set_max_registers(40, action="decrease")
                ring.drain(copy_steps(inputs, ring, buffers))

            def multiply() -> None:
                plgpu.set_max_registers(232, action="increase")
                multiply_steps(inputs, outputs, ring, buffers, out_buffer.at[warpgroup], **barriers)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            jax.lax.cond(warpgroup == warpgroups, copy, multiply)

        lines = (WARPGROUP_HEIGHT, LINE_BYTES // jnp.dtype(out_dtype).itemsize)
        pl.run_scoped(
            scope,
            [plgpu.SMEM((tiles.stages, *shape), jnp.bfloat16, transforms=_TILED) for shape in buffers],
            plgpu.SMEM((warpgroups, 2, *lines), out_dtype, transforms=(_swizzle(LINE_BYTES),)),
            plgpu.Barrier(num_arrivals=len(buffers), num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=tiles.stages),
            **barriers,
            collective_axes="warpgroup",
        )

    kernel = plgpu.kernel(
        body,
        out_type=tuple(outs),
        # The interpreter runs one block after the other: two show that they share the work.
        grid=(2 if interpreted() else multiprocessors(),),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
    )
    # Inside shard_map, kernels forget that their results differ between devices.
    axes = tuple(jax.typeof(leaves[0]).manual_axis_type.varying)
    return tuple(jax.lax.pcast(out, axes, to="varying") if axes else out for out in kernel(*leaves))


def write_output(
    parts: Iterable[tuple[jax.Array, Callable[..., Any]]], out_buffer: Any, low: Any, high: Any
) -> None:
    """Write rows ``low..high`` of the 64 rows that this warpgroup computed, one part of the columns after the other.

    Args:
        parts: the parts ``[64, columns]``, each with the function ``(rows, columns) -> reference`` that gives the
            place in the output for slices of the part.
        out_buffer: the warpgroup's two buffers.
        low: the first row to write, int32 or a number, at least 0.
        high: the row after the last one to write, int32 or a number, at most 64.
    """
    dtype, width = out_buffer.dtype, out_buffer.shape[-1]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    turn = 0
    for value, target in parts:
        for first in range(0, value.shape[1], width):
            buffer = out_buffer.at[turn % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer[...] = value[:, first : first + width].astype(dtype)
            plgpu.commit_smem()
            _copy_rows(buffer, functools.partial(target, columns=pl.ds(first, width)), low, high)
            turn += 1


def _copy_rows(buffer: Any, target: Callable[..., Any], low: Any, high: Any) -> None:
    """Copy rows ``low..high`` of a buffer to the output, as a sum of powers of two rows if there are fewer than 64."""

    def copy(row: Any, size: int) -> None:
        rows = pl.ds(row, size)
        plgpu.copy_smem_to_gmem(buffer.at[rows], target(rows), commit_group=False)

    count = high - low
    pl.when(count == WARPGROUP_HEIGHT)(lambda: copy(0, WARPGROUP_HEIGHT))

    @pl.when(count < WARPGROUP_HEIGHT)
    def _() -> None:
        row, size = low, WARPGROUP_HEIGHT // 2
        while size:
            pl.when((count & size) != 0)(functools.partial(copy, row, size))
            row, size = row + (count & size), size // 2

    plgpu.commit_smem_to_gmem_group()
