"""The frame of the Hopper kernels: how one is launched, and how its operands are copied.

A kernel is persistent: one block for each multiprocessor that it takes visits every n-th tile of the output. One
warpgroup of a block does nothing but copy the operands of the next steps into a ring of buffers in shared memory (TMA),
on across the ends of tiles; the others multiply (wgmma), 64 rows of the output tile each. The two sides meet at a pair
of barriers for each buffer.

Two blocks may form a cluster, whose tiles lie one below the other. What both need is loaded once: each loads half of
it, and the hardware sends it to the same buffer of both. Both visit the same tiles in the same order, and a buffer is
filled again when the warpgroups of both have read it; so each of them waits for the other.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import config
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.multiprocessors import multiprocessors
from pallas_kernels.hopper.tile_walk import ROW_ALIGNMENT
from pallas_kernels.varying_axes import match_varying_axes

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
    cluster: int = 1
    """Blocks that share what they load, 1 or 2: each computes a tile of its own of the same columns, one below the
    other, loads half of the operand that both need, and sends it to both (multicast)."""

    @property
    def cluster_height(self) -> int:
        """Rows of the output that the tiles of a cluster have together."""
        return self.height * self.cluster

    @property
    def cluster_axis(self) -> str | None:
        """The name of the axis of a cluster's blocks, over which a copy is shared; None if a block is alone."""
        return "partner" if self.cluster > 1 else None

    def top(self) -> jax.Array:
        """Return the first row of this block's tile among those of its cluster, int32; for use in a kernel."""
        number = jax.lax.axis_index(self.cluster_axis) if self.cluster_axis else jnp.int32(0)
        return number * self.height


class Ring(NamedTuple):
    """The barriers of a ring of buffers; steps are counted through all tiles of a block."""

    full: Any
    """One barrier for each buffer, at which copies arrive."""
    free: Any
    """One barrier for each buffer, at which the warpgroups arrive that have read it, in all blocks of a cluster."""
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
    approximate: bool = False,
    **barriers: Any,
) -> tuple[jax.Array, ...]:
    """Run a kernel, one block of it on each of the `multiprocessors`.

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
        approximate: whether exponentials are the hardware's, in float32 (``ex2.approx``).
        barriers: further barriers that ``multiply_steps`` is given, by name.

    Returns:
        The outputs.
    """
    leaves, tree = jax.tree.flatten(operands)
    warpgroups, axis = tiles.height // WARPGROUP_HEIGHT, tiles.cluster_axis
    arrivals: dict[str, Any] = {"num_arrivals": warpgroups, "num_barriers": tiles.stages}
    # Whoever loads writes to both blocks of a cluster: the warpgroups of both must have read what was there.
    free = plgpu.ClusterBarrier(collective_axes=(axis,), **arrivals) if axis else plgpu.Barrier(**arrivals)

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
            free,
            **barriers,
            collective_axes="warpgroup",
        )

    # The interpreter runs one cluster after the other: two show that they share the work.
    clusters = 2 if interpreted() else max(multiprocessors() // tiles.cluster, 1)
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outs),
        grid=(clusters,),
        grid_names=("block",),
        cluster=() if axis is None else (tiles.cluster,),
        cluster_names=() if axis is None else (axis,),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=approximate),
    )
    # Inside shard_map, kernels forget that their results differ between devices.
    _, *varying = match_varying_axes(leaves[0], *kernel(*leaves))
    return tuple(varying)
