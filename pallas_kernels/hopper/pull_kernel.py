"""A kernel that pulls rows out of the memory of other GPUs, through references to their buffers (NVLink).

A *row* is the weights of one expert, cut into chunks. Each block brings every n-th chunk of the rows that this rank
wants: a copy from the peer's buffer into a ring in shared memory (TMA), and a copy from there into the output. The
peer's multiprocessors take no part in it.

Descriptors of copies are written on the host before the launch, so a peer cannot be chosen by data: the program has a
branch for every peer.

The ranks keep step at both ends of the kernel. Before it starts, XLA lets all devices meet (the barrier that
``plgpu.CompilerParams.skip_device_barrier`` would leave out): whatever wrote a peer's buffer has run, and its
semaphores are zero. Before a block ends, it tells the same block of every peer that it has read what it wanted, and
waits until all of them have told it so: only then may this rank's buffer be written again.

It compiles for H100. It has not run: JAX's GPU interpreter knows neither references to peers nor semaphores, so its
copies alone are tested, with the buffers of all ranks in one array.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.varying_axes import match_varying_axes

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
    rows: Any,
    out: Any,
    ring: Any,
    full: Any,
    *,
    ranks: int,
    blocks: int,
    peer: Callable[[Any, int], Any],
) -> None:
    """Bring this block's chunks of all rows; what a block of the kernel does between the two meetings with its peers.

    Args:
        rank: reference ``[R]`` int32, the peer that holds each row.
        row: reference ``[R]`` int32, the row of the peer's buffer; negative for rows of zeros.
        rows: reference to this rank's buffer, from which ``peer`` makes ``[X, chunks, lines, elements]``.
        out: reference ``[R, chunks, lines, elements]``.
        ring: reference ``[STAGES, lines, elements]`` in shared memory.
        full: the barriers of the ring.
        ranks: the number of peers, this rank among them.
        blocks: the number of blocks.
        peer: ``(rows, rank) -> reference``, the same buffer of a peer.
    """
    wanted, chunks = out.shape[:2]
    block = jax.lax.axis_index("block")
    count = jax.lax.div(wanted * chunks + blocks - 1 - block, jnp.int32(blocks))

    def place(step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        chunk, per_row = block + step * blocks, jnp.int32(chunks)
        return jax.lax.div(chunk, per_row), jax.lax.rem(chunk, per_row), jax.lax.rem(step, jnp.int32(STAGES))

    def start(step: jax.Array) -> None:
        index, chunk, stage = place(step)

        def copy(of: int) -> None:
            source = peer(rows, of).at[row[index], chunk]
            plgpu.copy_gmem_to_smem(source, ring.at[stage], full.at[stage])

        for of in range(ranks):
            pl.when((row[index] >= 0) & (rank[index] == of))(functools.partial(copy, of))

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


def pull(rank: jax.Array, row: jax.Array, rows: jax.Array, axis: str) -> jax.Array:
    """Launch the kernel on this rank; every rank of the mesh has to. Inside `jax.shard_map` over the whole mesh.

    Args:
        rank: ``[R]`` int32, the index along ``axis`` of the rank that holds each row.
        row: ``[R]`` int32, the row of that rank's buffer; negative for rows of zeros.
        rows: this rank's buffer ``[X, *shape]``, as long on all ranks.
        axis: the mesh axis of the ranks that reach each other's memory.

    Returns:
        The rows, ``[R, *shape]``.

    Raises:
        ValueError: if a row is no whole number of lines.
    """
    chunks = chunk_shape(math.prod(rows.shape[1:]), rows.dtype.itemsize)
    ranks = jax.lax.axis_size(axis)

    def device(of: int) -> Any:
        return {axis: jnp.int32(of)}

    def pull_rows(rank: Any, row: Any, rows: Any, out: Any, ring: Any, full: Any, read: Any) -> None:
        pull_chunks(
            *(rank, row, rows, out, ring, full),
            ranks=ranks,
            blocks=BLOCKS,
            peer=lambda rows, of: plgpu.remote_ref(rows, device(of)),
        )
        # Every block has a semaphore of its own, which is zero before the kernel.
        for of in range(ranks):
            pl.semaphore_signal(read, 1, device_id=device(of))
        pl.semaphore_wait(read, ranks, decrement=False)

    kernel = plgpu.kernel(
        pull_rows,
        out_type=jax.ShapeDtypeStruct((len(row), *chunks), rows.dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((STAGES, *chunks[1:]), rows.dtype),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.SemaphoreType.REGULAR,
        ],
    )
    # Behind barriers XLA merges the kernel with no slice: inside such a fusion it may be told others' addresses.
    out = jax.lax.optimization_barrier(
        kernel(*jax.lax.optimization_barrier((rank, row, rows.reshape(-1, *chunks))))
    )
    # Inside shard_map, kernels forget that their results differ between devices.
    return match_varying_axes(rows, out.reshape(-1, *rows.shape[1:]))[1]
