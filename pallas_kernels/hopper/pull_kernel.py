"""A kernel that pulls rows out of the memory of other GPUs, through references to their buffers (NVLink).

A *row* is the weights of one expert, cut into chunks. Each block brings every n-th chunk of the rows that this rank
wants: a copy from the peer's buffer into a ring in shared memory (TMA), and a copy from there into the output. Nothing
is packed and nothing is sent: the peer's multiprocessors take no part in it.

Descriptors of copies are written on the host before the launch, so a peer cannot be chosen by data: the program has a
branch for every peer and buffer.

The peers keep step at both ends of the kernel. Before it starts, XLA lets all devices meet (the barrier that
``plgpu.CompilerParams.skip_device_barrier`` would leave out): whatever wrote a peer's buffers has run, and its
semaphores are zero. Before a block ends, it tells the same block of every peer that it has read what it wanted, and
waits until all of them have told it so: only then do this rank's buffers belong to others again.

It compiles for H100. It has not run: JAX's GPU interpreter knows neither references to peers nor semaphores, so its
copies alone are tested, with all peers' buffers in one array.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.persistent_kernel import visit_buffer

BLOCKS: Final = 32
"""Blocks of the kernel, so that most multiprocessors are left to what runs beside it. Three
chunks of 16 KB are on their way in each, 1.6 MB together; 0.9 MB would fill NVLink's 450 GB/s at a latency of 2
microseconds."""
STAGES: Final = 4
"""Chunks that a block has room for in shared memory; all but one are on their way."""
LINE_BYTES: Final = 256
"""Bytes of a line of a chunk."""
MOST_LINES: Final = 64
"""Most lines of a chunk; a box of a TMA copy has at most 256."""


def chunk_shape(elements: int, itemsize: int) -> tuple[int, int, int]:
    """The shape of a row in chunks, ``(chunks, lines, elements of a line)``.

    Args:
        elements: the elements of a row.
        itemsize: the bytes of an element.

    Raises:
        ValueError: if a row is no whole number of lines.

    >>> chunk_shape(3 * 2048 * 768, 2)
    (576, 64, 128)
    """
    line = LINE_BYTES // itemsize
    if not elements or elements % line:
        raise ValueError(f"a row of {elements} elements is no whole number of lines of {line}")
    lines = elements // line
    height = min(lines & -lines, MOST_LINES)
    return lines // height, height, line


def pull_chunks(
    rank: Any,
    row: Any,
    buffers: Sequence[Any],
    out: Any,
    ring: Any,
    full: Any,
    *,
    slots: Sequence[int],
    ranks: int,
    blocks: int,
    peer: Callable[[Any, int], Any],
) -> None:
    """Bring this block's chunks of all rows; what a block of the kernel does between the two meetings with its peers.

    Args:
        rank: reference ``[R]`` int32, the peer that holds each row.
        row: reference ``[R]`` int32, the number of each row in the peer's buffers, which are counted through;
            negative for rows of zeros.
        buffers: references to this rank's buffers, from which ``peer`` makes ``[slots, chunks, lines, elements]``.
        out: reference ``[R, chunks, lines, elements]``.
        ring: reference ``[STAGES, lines, elements]`` in shared memory.
        full: the barriers of the ring.
        slots: the number of slots of each buffer.
        ranks: the number of peers, this rank among them.
        blocks: the number of blocks.
        peer: ``(buffer, rank) -> reference``, the same buffer of a peer.
    """
    wanted, chunks = out.shape[:2]
    block = jax.lax.axis_index("block")
    count = jax.lax.div(wanted * chunks + blocks - 1 - block, jnp.int32(blocks))

    def place(step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        chunk, per_row = block + step * blocks, jnp.int32(chunks)
        return jax.lax.div(chunk, per_row), jax.lax.rem(chunk, per_row), jax.lax.rem(step, jnp.int32(STAGES))

    def start(step: jax.Array) -> None:
        index, chunk, stage = place(step)

        def copy(number: int, slot: jax.Array, of: int) -> None:
            source = peer(buffers[number], of).at[slot, chunk]
            plgpu.copy_gmem_to_smem(source, ring.at[stage], full.at[stage])

        for of in range(ranks):
            there = (row[index] >= 0) & (rank[index] == of)
            pl.when(there)(functools.partial(visit_buffer, slots, row[index], functools.partial(copy, of=of)))

    def store(step: jax.Array) -> None:
        index, chunk, stage = place(step)
        pl.when(row[index] >= 0)(lambda: plgpu.barrier_wait(full.at[stage]))

        @pl.when(row[index] < 0)
        def _() -> None:
            ring[stage] = jnp.zeros(ring.shape[1:], ring.dtype)
            plgpu.commit_smem()

        plgpu.copy_smem_to_gmem(ring.at[stage], out.at[index, chunk])
        # The next copy fills the stage that the step before this one has stored.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

    def visit(step: jax.Array, _: None) -> None:
        pl.when(step >= 0)(lambda: store(step))
        pl.when(step + ahead < count)(lambda: start(step + ahead))

    ahead = STAGES - 1
    jax.lax.fori_loop(-ahead, count, visit, None)
    plgpu.wait_smem_to_gmem(0)


def pull(
    rank: jax.Array, row: jax.Array, buffers: Sequence[jax.Array], axis: str
) -> jax.Array:
    """Launch the kernel on this rank; every rank of the mesh has to. Inside `jax.shard_map` over the whole mesh.

    Args:
        rank: ``[R]`` int32, the index along ``axis`` of the rank that holds each row.
        row: ``[R]`` int32, the number of each row in that rank's buffers, which are counted through; negative for
            rows of zeros.
        buffers: the buffers ``[slots, *shape]`` of this rank, of one dtype and row shape.
        axis: the mesh axis of the ranks that reach each other's memory.

    Returns:
        The rows, ``[R, *shape]``.

    Raises:
        ValueError: if a row is no whole number of lines.
    """
    shape, dtype = buffers[0].shape[1:], buffers[0].dtype
    chunks = chunk_shape(math.prod(shape), dtype.itemsize)
    ranks = jax.lax.axis_size(axis)

    def body(rank: Any, row: Any, *refs: Any) -> None:
        *homes, out, ring, full, read = refs
        pull_chunks(
            *(rank, row, homes, out, ring, full),
            slots=[len(buffer) for buffer in buffers],
            ranks=ranks,
            blocks=BLOCKS,
            peer=lambda buffer, of: plgpu.remote_ref(buffer, {axis: jnp.int32(of)}),
        )
        for of in range(ranks):
            pl.semaphore_signal(read, 1, device_id={axis: jnp.int32(of)})
        # A block has a semaphore of its own, which is zero before the kernel.
        pl.semaphore_wait(read, ranks, decrement=False)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(row), *chunks), dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((STAGES, *chunks[1:]), dtype),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.SemaphoreType.REGULAR,
        ],
    )
    out = kernel(rank, row, *(buffer.reshape(-1, *chunks) for buffer in buffers))
    # Inside shard_map, kernels forget that their results differ between devices.
    axes = tuple(jax.typeof(buffers[0]).manual_axis_type.varying)
    return (jax.lax.pcast(out, axes, to="varying") if axes else out).reshape(-1, *shape)
