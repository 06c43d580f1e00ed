"""How the Hopper kernels are launched, and what both of them do in the same way.

A kernel is persistent: one block for each multiprocessor visits every n-th tile. One warpgroup of a block does
nothing but copy the next steps' operands into a ring of buffers in shared memory (TMA), on across the ends of tiles;
the others multiply (wgmma), 64 rows of the output each. The two sides meet at a pair of barriers for each buffer.

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

from pallas_kernels.hopper.schedule import ALIGNED

STEP: Final = 64
"""Elements of a contraction that one buffer holds: 128 bytes, the widest swizzle."""
ROWS: Final = 64
"""Rows of a warpgroup: the height of a wgmma instruction."""
LINE: Final = 128
"""Bytes of a row in the buffer for outputs."""
SHARED_MEMORY: Final = 227 * 1024
"""Bytes that a block may use on compute capability 9.0."""

# Type checkers take transforms for abstract classes.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform
_TILED: Final = (_tiling((ALIGNED, STEP)), _swizzle(LINE))


class Tiles(NamedTuple):
    """Sizes of tiles, and how far copies run ahead."""

    rows: int
    """Of the output: 64 for each warpgroup that multiplies."""
    columns: int
    """Of the output, a multiple of 64, at most 256."""
    stages: int
    """Steps whose operands shared memory holds, at least 2."""


class Ring(NamedTuple):
    """The barriers of a ring of buffers; steps are counted through all tiles of a block."""

    full: Any
    free: Any
    stages: int

    def stage(self, step: jax.Array) -> jax.Array:
        """The buffer of a step."""
        return jax.lax.rem(step, jnp.int32(self.stages))

    def claim(self, step: jax.Array) -> jax.Array:
        """For the copying warpgroup: the step's buffer, once nobody reads it any more."""
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[self.stage(step)]))
        return self.stage(step)

    def drain(self, steps: jax.Array) -> None:
        """For the copying warpgroup, at its end: no barrier is left with an arrival that nobody waited for."""

        def wait(step: jax.Array, _: None) -> None:
            plgpu.barrier_wait(self.free.at[self.stage(step)])

        jax.lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, wait, None)

    def wait(self, step: jax.Array) -> jax.Array:
        """For the others: the step's buffer, once it is filled."""
        plgpu.barrier_wait(self.full.at[self.stage(step)])
        return self.stage(step)

    def release(self, step: jax.Array) -> None:
        """For the others: the step's buffer was read."""
        plgpu.barrier_arrive(self.free.at[self.stage(step)])


def multiprocessors() -> int:
    """Of the GPU that is there; else of an H100 or H200 (SXM)."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def interpreted() -> bool:
    """Whether kernels that are traced now run in JAX's GPU interpreter."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def align_rows(array: jax.Array) -> jax.Array:
    """Rows of zeros behind ``[r, ...]``, up to a multiple of 8 in all; the array itself where that is r."""
    short = -array.shape[0] % ALIGNED
    return jnp.pad(array, ((0, short), *((0, 0),) * (array.ndim - 1))) if short else array


def launch(
    copies: Callable[..., jax.Array],
    products: Callable[..., None],
    operands: Any,
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    buffers: Sequence[tuple[int, int]],
    out_dtype: Any,
    tiles: Tiles,
    **barriers: Any,
) -> tuple[jax.Array, ...]:
    """Run a kernel on every block.

    Args:
        copies: ``(operands, ring, buffers)`` fills buffers and returns how many steps it filled.
        products: ``(operands, outs, ring, buffers, out buffer, **barriers)`` reads them and writes the outputs.
        operands: a tree of arrays; the functions get their references.
        outs: shapes and dtypes of the outputs.
        buffers: shapes of what one stage of the ring holds, bfloat16.
        out_dtype: of the buffer that outputs pass through, two for each warpgroup.
        tiles: sizes.
        barriers: further ones.

    Returns:
        The outputs.
    """
    leaves, tree = jax.tree.flatten(operands)
    warpgroups = tiles.rows // ROWS

    def body(*refs: Any) -> None:
        inputs, outputs = jax.tree.unflatten(tree, refs[: len(leaves)]), refs[len(leaves) :]

        def scope(stages: Any, out: Any, full: Any, free: Any, **barriers: Any) -> None:
            ring = Ring(full, free, tiles.stages)
            warpgroup = jax.lax.axis_index("warpgroup")

            def copy() -> None:
                plgpu.set_max_registers(40, action="decrease")
                ring.drain(copies(inputs, ring, stages))

            def multiply() -> None:
                plgpu.set_max_registers(232, action="increase")
                products(inputs, outputs, ring, stages, out.at[warpgroup], **barriers)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            jax.lax.cond(warpgroup == warpgroups, copy, multiply)

        line = (ROWS, LINE // jnp.dtype(out_dtype).itemsize)
        pl.run_scoped(
            scope,
            [plgpu.SMEM((tiles.stages, *shape), jnp.bfloat16, transforms=_TILED) for shape in buffers],
            plgpu.SMEM((warpgroups, 2, *line), out_dtype, transforms=(_swizzle(LINE),)),
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


def write(
    parts: Iterable[tuple[jax.Array, Callable[..., Any]]], out_buffer: Any, low: Any, high: Any
) -> None:
    """Write rows ``low..high`` of this warpgroup's 64 rows, one part after the other.

    Args:
        parts: ``[64, columns]`` and where it goes, ``(rows, columns) -> reference``, of slices within it.
        out_buffer: the warpgroup's two buffers.
        low: int32 or a number, at least 0.
        high: likewise, at most 64.
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
    def copy(row: Any, size: int) -> None:
        rows = pl.ds(row, size)
        plgpu.copy_smem_to_gmem(buffer.at[rows], target(rows), commit_group=False)

    count = high - low
    pl.when(count == ROWS)(lambda: copy(0, ROWS))

    @pl.when(count < ROWS)
    def _() -> None:
        row, size = low, ROWS // 2
        while size:
            pl.when((count & size) != 0)(functools.partial(copy, row, size))
            row, size = row + (count & size), size // 2

    plgpu.commit_smem_to_gmem_group()
