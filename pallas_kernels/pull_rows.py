"""One-sided reads of rows from the buffers of other devices, for use inside `jax.shard_map`.

Each device names the rows that it needs and receives exactly those. Unlike in an exchange, a device does not need to
know which of its rows the others read.

The Hopper kernel reads the memory of other GPUs through references to their buffers (NVLink). A *row* holds the weights
of one expert, and is cut into chunks. Each block fetches every n-th chunk of the rows that this rank needs. It copies
the chunk from the peer's buffer into a ring in shared memory (TMA), and from there into the output. The peer's
multiprocessors do no work for it.

The host writes the descriptors of copies before the launch, so data cannot choose the peer: the program has a branch
for every peer.

The ranks synchronise before and after the copies. XLA runs a barrier over all devices before the kernel (the one that
``plgpu.CompilerParams.skip_device_barrier`` would omit). After it, all writes to the peers' buffers are complete, and
the semaphores are zero. Before a block ends, it signals to the same block of every peer that it has finished reading,
and waits for the signals of all peers. Only then may this rank's buffer be written again.

The kernel compiles for H100 but has not run on a GPU. JAX's GPU interpreter supports neither peer references nor
semaphores, so the tests cover only the copies, with the buffers of all ranks in one array.
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

IMPLEMENTATIONS: Final = ("mosaic", "xla")
BLOCKS: Final = 32
"""The number of blocks of the kernel. It leaves most multiprocessors to other programs. Each block has three chunks of
16 KB in flight, 1.6 MB in total. By computation, 0.9 MB are enough for NVLink's 450 GB/s at a latency of 2
microseconds."""
STAGES: Final = 4
"""The number of chunks that a block holds in shared memory; all but one are in flight."""
LINE_BYTES: Final = 256
"""The number of bytes of a line of a chunk."""
MAX_LINES: Final = 64
"""The largest number of lines of a chunk. The hardware limit for a TMA copy is 256."""


def pull_rows(
    rank: jax.Array, row: jax.Array, rows: jax.Array, axis: str, *, implementation: str
) -> jax.Array:
    """Read rows from the buffers of the devices along a mesh axis.

    Args:
        rank: the index along ``axis`` of the device that holds each row, int32 ``[R]``.
        row: the index of each row in that device's buffer, int32 ``[R]``. A negative index gives a row of zeros.
        rows: this device's buffer, ``[X, *shape]``. X is the same on all devices.
        axis: the mesh axis of the devices.
        implementation: "mosaic" for the kernel, which needs the call of every rank of the mesh; "xla" for an all-gather
            of all buffers, which is meant for tests.

    Returns:
        The rows, ``[R, *shape]``.

    Raises:
        ValueError: if no implementation has that name, or if the kernel does not support the size of a row.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "mosaic":
        return _pull(rank, row, rows, axis)
    all_rows = jax.lax.all_gather(rows, axis)
    return all_rows.at[rank, jnp.where(row < 0, len(rows), row)].get(mode="fill", fill_value=0)


def chunk_shape(elements: int, itemsize: int) -> tuple[int, int, int]:
    """Return the shape of a row that is cut into chunks, ``(chunks, lines, elements of a line)``.

    Args:
        elements: the number of elements of a row.
        itemsize: the number of bytes of an element.

    Raises:
        ValueError: if a row is not a whole number of lines.

    >>> chunk_shape(3 * 2048 * 768, 2)
    (576, 64, 128)
    """
    line = LINE_BYTES // itemsize
    if not elements or elements % line:
        raise ValueError(f"a row of {elements} elements is not a whole number of lines of {line} elements")
    lines = elements // line
    height = min(lines & -lines, MAX_LINES)
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
    """Copy this block's chunks of all rows to the output; the kernel calls it between its two synchronisations.

    Args:
        rank: a reference to the index of the peer that holds each row, int32 ``[R]``.
        row: a reference to the index of each row in the peer's buffer, int32 ``[R]``. A negative index gives a row of
            zeros.
        rows: a reference to this rank's buffer.
        out: a reference to the output, ``[R, chunks, lines, elements]``.
        ring: a reference to the buffers in shared memory, ``[STAGES, lines, elements]``.
        full: the barriers of the ring.
        ranks: the number of peers, including this rank.
        blocks: the number of blocks.
        peer: the function ``(rows, rank) -> reference`` that returns a reference to the same buffer on a peer,
            ``[X, chunks, lines, elements]``.
    """
    num_rows, chunks = out.shape[:2]
    block = jax.lax.axis_index("block")
    count = jax.lax.div(num_rows * chunks + blocks - 1 - block, jnp.int32(blocks))

    def place(step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        chunk, per_row = block + step * blocks, jnp.int32(chunks)
        return jax.lax.div(chunk, per_row), jax.lax.rem(chunk, per_row), jax.lax.rem(step, jnp.int32(STAGES))

    def start(step: jax.Array) -> None:
        index, chunk, stage = place(step)

        def copy(peer_rank: int) -> None:
            source = peer(rows, peer_rank).at[row[index], chunk]
            plgpu.copy_gmem_to_smem(source, ring.at[stage], full.at[stage])

        for peer_rank in range(ranks):
            pl.when((row[index] >= 0) & (rank[index] == peer_rank))(functools.partial(copy, peer_rank))

    def store(step: jax.Array) -> None:
        index, chunk, stage = place(step)
        pl.when(row[index] >= 0)(lambda: plgpu.barrier_wait(full.at[stage]))

        @pl.when(row[index] < 0)
        def _() -> None:
            ring[stage] = jnp.zeros(ring.shape[1:], ring.dtype)
            plgpu.commit_smem()

        plgpu.copy_smem_to_gmem(ring.at[stage], out.at[index, chunk])
        # The next copy overwrites the stage that the previous step stored.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

    def visit(step: jax.Array, _: None) -> None:
        pl.when(step >= 0)(lambda: store(step))
        pl.when(step + ahead < count)(lambda: start(step + ahead))

    ahead = STAGES - 1
    jax.lax.fori_loop(-ahead, count, visit, None)
    plgpu.wait_smem_to_gmem(0)


def _pull(rank: jax.Array, row: jax.Array, rows: jax.Array, axis: str) -> jax.Array:
    """Read rows with the kernel. The arguments are those of `pull_rows`; ``axis`` connects ranks by NVLink."""
    chunks = chunk_shape(math.prod(rows.shape[1:]), rows.dtype.itemsize)
    ranks = jax.lax.axis_size(axis)

    def device(peer_rank: int) -> Any:
        return {axis: jnp.int32(peer_rank)}

    def pull_rows_kernel(rank: Any, row: Any, rows: Any, out: Any, ring: Any, full: Any, read: Any) -> None:
        def peer(rows: Any, peer_rank: int) -> Any:
            return plgpu.remote_ref(rows, device(peer_rank))

        pull_chunks(rank, row, rows, out, ring, full, ranks=ranks, blocks=BLOCKS, peer=peer)
        # Every block has its own semaphore, which is zero before the kernel.
        for peer_rank in range(ranks):
            pl.semaphore_signal(read, 1, device_id=device(peer_rank))
        pl.semaphore_wait(read, ranks, decrement=False)

    kernel = plgpu.kernel(
        pull_rows_kernel,
        out_type=jax.ShapeDtypeStruct((len(row), *chunks), rows.dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((STAGES, *chunks[1:]), rows.dtype),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.SemaphoreType.REGULAR,
        ],
    )
    # The barriers keep XLA from fusing the kernel with a slice: inside such a fusion it may get the wrong addresses.
    out = jax.lax.optimization_barrier(
        kernel(*jax.lax.optimization_barrier((rank, row, rows.reshape(-1, *chunks))))
    )
    # Inside shard_map, the results of a kernel are not marked as varying over the mesh axes.
    return match_varying_axes(rows, out.reshape(-1, *rows.shape[1:]))[1]
