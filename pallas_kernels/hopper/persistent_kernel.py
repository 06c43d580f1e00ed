"""The common structure of the Hopper kernels: the launch, and the pipeline that copies operands to shared memory.

A kernel is persistent: it has one block per multiprocessor, and each block computes every n-th tile of the output. One
warpgroup of a block only copies the operands of the next steps into a ring of buffers in shared memory (TMA), without a
pause between tiles. The other warpgroups multiply (wgmma), each for 64 rows of the output tile. A pair of barriers for
each buffer synchronises the two sides.

Two blocks may form a cluster, with tiles that are vertical neighbours in the output. An operand that both need is
loaded once: each block loads one half of it, and the hardware writes that half to the same buffer in both blocks
(multicast). Both blocks visit the same tiles in the same order. A buffer is overwritten only after the warpgroups of
both blocks have read it, so the blocks wait for each other.
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
"""The number of bfloat16 elements of the contraction that one buffer holds: 128 bytes, the widest swizzle."""
WARPGROUP_HEIGHT: Final = 64
"""The number of rows of an output tile that one warpgroup computes, which is the height of a wgmma instruction."""
LINE_BYTES: Final = 128
"""The number of bytes of a row in the output buffer."""
COPY_REGISTERS: Final = 40
"""The number of registers of a thread that copies."""
MULTIPLY_REGISTERS: Final = 232
"""The number of registers of a thread that multiplies."""
SHARED_MEMORY_BYTES: Final = 227 * 1024
"""The number of bytes of shared memory that a block may use on compute capability 9.0."""

# Type checkers mistake the transforms for abstract classes.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform


class TileSizes(NamedTuple):
    """The size of a kernel's output tiles, the depth of its pipeline, and the size of its clusters."""

    height: int
    """The number of rows of an output tile: 64 for each warpgroup that multiplies."""
    width: int
    """The number of columns of an output tile: a multiple of 64, at most 256."""
    stages: int
    """The number of steps whose operands fit into shared memory, at least 2."""
    cluster: int = 1
    """The number of blocks of a cluster, 1 or 2. The two blocks compute vertically adjacent tiles of the same columns.
    Each loads half of the operand that both need, and sends it to both (multicast)."""

    @property
    def cluster_height(self) -> int:
        """The total number of output rows of the tiles of a cluster."""
        return self.height * self.cluster

    @property
    def cluster_axis(self) -> str | None:
        """The name of the axis over the blocks of a cluster, for multicast copies; None if there are no clusters."""
        return "partner" if self.cluster > 1 else None

    def top(self) -> jax.Array:
        """Return the offset in rows of this block's tile from the top of its cluster, int32; for use in a kernel."""
        number = jax.lax.axis_index(self.cluster_axis) if self.cluster_axis else jnp.int32(0)
        return number * self.height


class Ring(NamedTuple):
    """The barriers of a ring of buffers. Step numbers count through all tiles of a block."""

    full: Any
    """One barrier for each buffer, at which a copy arrives when it has filled the buffer."""
    free: Any
    """One barrier for each buffer, at which the warpgroups of all blocks of a cluster arrive when they have read it."""
    stages: int
    """The number of buffers."""

    def buffer(self, step: jax.Array) -> jax.Array:
        """Return the index of the buffer that holds a step's operands."""
        return jax.lax.rem(step, jnp.int32(self.stages))

    def claim(self, step: jax.Array) -> jax.Array:
        """Wait until no warpgroup reads the buffer of a step, and return its index; for the copying warpgroup."""
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[self.buffer(step)]))
        return self.buffer(step)

    def drain(self, steps: jax.Array) -> None:
        """Wait until every buffer has been read; the copying warpgroup calls this at its end.

        Afterwards, no barrier has an arrival that no one has waited for.

        Args:
            steps: the total number of steps of the block, int32.
        """

        def wait(step: jax.Array, _: None) -> None:
            plgpu.barrier_wait(self.free.at[self.buffer(step)])

        jax.lax.fori_loop(jnp.maximum(steps - self.stages, 0), steps, wait, None)

    def wait(self, step: jax.Array) -> jax.Array:
        """Wait until the buffer of a step is filled, and return its index; for the multiplying warpgroups."""
        plgpu.barrier_wait(self.full.at[self.buffer(step)])
        return self.buffer(step)

    def release(self, step: jax.Array) -> None:
        """Signal that this warpgroup has read the buffer of a step; for the multiplying warpgroups."""
        plgpu.barrier_arrive(self.free.at[self.buffer(step)])

    def multiply(
        self, sweeps: Sequence[Callable[[jax.Array, jax.Array], int]], first: jax.Array, count: jax.Array
    ) -> None:
        """Run the products of all steps of a tile, and release the buffer of each step as soon as it has been read.

        Args:
            sweeps: one function ``(buffer, index of the step in its sweep) -> count`` for each pass over the
                contraction. It starts the products (wgmma) of a step and returns their number.
            first: the number of the first step of the first sweep. The steps of the other sweeps follow.
            count: the number of steps of a sweep, which may be 0.
        """

        def run_step(start_products: Callable[..., int], index: jax.Array, step: jax.Array) -> jax.Array:
            started = start_products(self.wait(step), index)
            # The products of this step continue; those of the previous step are finished.
            plgpu.wgmma_wait(started)
            pl.when(step > first)(lambda: self.release(step - 1))
            return step + 1

        step = first
        for start_products in sweeps:
            step = jax.lax.fori_loop(0, count, functools.partial(run_step, start_products), step)
        plgpu.wgmma_wait(0)
        pl.when(count > 0)(lambda: self.release(step - 1))


def interpreted() -> bool:
    """Return whether kernels traced now will run in JAX's GPU interpreter."""
    mode = config.pallas_tpu_interpret_mode_context_manager.value
    return isinstance(mode, plgpu.InterpretGPUParams)


def step_of(dtype: Any) -> int:
    """Return the number of elements of the contraction that one buffer holds: `STEP` in bfloat16, 128 in float8."""
    return LINE_BYTES // jnp.dtype(dtype).itemsize


def pad_rows(array: jax.Array) -> jax.Array:
    """Append rows of zeros to an array until their number is a multiple of 8; return it unchanged if it is one."""
    missing_rows = -array.shape[0] % ROW_ALIGNMENT
    return jnp.pad(array, ((0, missing_rows), *((0, 0),) * (array.ndim - 1))) if missing_rows else array


def visit_buffer(
    slots: Sequence[int], group: jax.Array, visit: Callable[[int, jax.Array], None], number: int = 0
) -> None:
    """Call a function with the number of the weight buffer that contains a group's slot, and the slot's index in it.

    Data cannot choose between references, so the program has a branch for every buffer.

    Args:
        slots: the number of slots of each weight buffer, each at least 1, in the order of their groups.
        group: the index of the group, int32.
        visit: the function ``(number of the buffer, slot in the buffer)`` to call.
        number: the number of the first buffer.
    """
    count, *remaining_slots = slots
    if not remaining_slots:
        visit(number, group)
        return
    is_here = group < count
    pl.when(is_here)(lambda: visit(number, group))
    pl.when(~is_here)(lambda: visit_buffer(remaining_slots, group - count, visit, number + 1))


def launch(
    copy_steps: Callable[..., jax.Array],
    multiply_steps: Callable[..., None],
    operands: Any,
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    buffers: Sequence[tuple[int, ...]],
    dtype: Any = jnp.bfloat16,
    out_dtype: Any,
    tiles: TileSizes,
    approximate: bool = False,
    **barriers: Any,
) -> tuple[jax.Array, ...]:
    """Run a kernel with one block on each multiprocessor that it may use.

    Args:
        copy_steps: the function ``(operands, ring, buffers) -> steps`` of the copying warpgroup. It fills the buffers
            with the operands of all steps of the block's tiles, and returns the number of steps.
        multiply_steps: the function ``(operands, outs, ring, buffers, out buffer, **barriers)`` of the multiplying
            warpgroups. It reads the buffers and writes the outputs.
        operands: a tree of arrays. The functions receive the same tree with references instead of arrays.
        outs: the shapes and dtypes of the outputs.
        buffers: the shapes of the buffers that one step fills. Those with one axis hold scales, in float32.
        dtype: the dtype of the other buffers, which is that of the operands.
        out_dtype: the dtype of the two buffers of each warpgroup through which outputs are written.
        tiles: the sizes of the output tiles.
        approximate: whether to compute float32 exponentials with the hardware instruction (``ex2.approx``).
        barriers: additional barriers to pass to ``multiply_steps``, by name.

    Returns:
        The outputs.
    """
    leaves, tree = jax.tree.flatten(operands)
    warpgroups, axis = tiles.height // WARPGROUP_HEIGHT, tiles.cluster_axis

    def body(*refs: Any) -> None:
        inputs, outputs = jax.tree.unflatten(tree, refs[: len(leaves)]), refs[len(leaves) :]

        def scope(buffers: Any, out_buffer: Any, full: Any, free: Any, **barriers: Any) -> None:
            ring = Ring(full, free, tiles.stages)
            warpgroup = jax.lax.axis_index("warpgroup")

            def copy() -> None:
                plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
                ring.drain(copy_steps(inputs, ring, buffers))

            def multiply() -> None:
                plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
                multiply_steps(inputs, outputs, ring, buffers, out_buffer.at[warpgroup], **barriers)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            jax.lax.cond(warpgroup == warpgroups, copy, multiply)

        pl.run_scoped(
            scope, *_scratch(buffers, dtype, out_dtype, tiles), **barriers, collective_axes="warpgroup"
        )

    kernel = plgpu.kernel(
        body,
        out_type=tuple(outs),
        grid=(_count_clusters(tiles),),
        grid_names=("block",),
        cluster=() if axis is None else (tiles.cluster,),
        cluster_names=() if axis is None else (axis,),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=approximate),
    )
    # Inside shard_map, the results of a kernel are not marked as varying over the mesh axes.
    return tuple(match_varying_axes(leaves[0], *kernel(*leaves))[1:])


def _count_clusters(tiles: TileSizes) -> int:
    """Return the number of clusters to launch."""
    # The interpreter runs the clusters sequentially; two are enough to test that they share the work.
    return 2 if interpreted() else max(multiprocessors() // tiles.cluster, 1)


def _scratch(
    buffers: Sequence[tuple[int, ...]], dtype: Any, out_dtype: Any, tiles: TileSizes
) -> tuple[Any, ...]:
    """Return the buffers in shared memory for operands and outputs, and the barriers of the ring, full and free."""
    warpgroups, axis = tiles.height // WARPGROUP_HEIGHT, tiles.cluster_axis
    arrivals: dict[str, Any] = {"num_arrivals": warpgroups, "num_barriers": tiles.stages}
    # A multicast copy writes to both blocks of a cluster, so the warpgroups of both must have read the old values.
    free = plgpu.ClusterBarrier(collective_axes=(axis,), **arrivals) if axis else plgpu.Barrier(**arrivals)
    lines = (WARPGROUP_HEIGHT, LINE_BYTES // jnp.dtype(out_dtype).itemsize)
    tiled = {"dtype": dtype, "transforms": (_tiling((ROW_ALIGNMENT, step_of(dtype))), _swizzle(LINE_BYTES))}
    return (
        [
            plgpu.SMEM((tiles.stages, *shape), **(tiled if len(shape) > 1 else {"dtype": jnp.float32}))
            for shape in buffers
        ],
        plgpu.SMEM((warpgroups, 2, *lines), out_dtype, transforms=(_swizzle(LINE_BYTES),)),
        plgpu.Barrier(num_arrivals=len(buffers), num_barriers=tiles.stages),
        free,
    )
