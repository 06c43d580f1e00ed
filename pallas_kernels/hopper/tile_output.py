"""The output path of the Hopper kernels: tiles are written through shared memory, without touching other rows.

The copy of a tile must not overwrite rows of neighbouring tiles, which other blocks write at the same time. The size of
a copy is fixed at compile time, so a tile that is not full is written in several copies, whose numbers of rows are
powers of two. The output buffer is swizzled but not tiled. The swizzle depends only on the address, so a copy may start
at any row.

The last column tile may extend beyond the matrix. TMA copies know the size of every axis of an array. They load zeros
from outside the array, so products there are zero, and they do not write outside it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.persistent_kernel import WARPGROUP_HEIGHT


def output_has(tile: jax.Array, width: int, columns: int) -> Callable[[int], Any]:
    """Return a function that says whether a column of a tile exists in the output.

    Args:
        tile: the index of the tile among the column tiles, int32.
        width: the number of columns of a tile.
        columns: the number of columns of the output. The last tile may extend beyond it.

    Returns:
        A function of the column in the tile. It returns True if all tiles have the column, and otherwise a predicate.
    """
    last_tile_columns = columns % width or width
    return lambda column: True if column < last_tile_columns else tile < columns // width


def write_output(
    parts: Iterable[tuple[int, jax.Array, Callable[..., Any]]],
    out_buffer: Any,
    low: Any,
    high: Any,
    has: Callable[[int], Any],
) -> None:
    """Write rows ``low..high`` of the 64 rows that this warpgroup computed, one part of the columns at a time.

    Args:
        parts: the parts of the columns. Each part consists of its first column in the tile, its values
            ``[64, columns]``, and a function ``(rows, columns) -> reference`` from slices of the tile to the output.
        out_buffer: the two output buffers of the warpgroup.
        low: the first row to write, int32 or Python int, at least 0.
        high: the row after the last one to write, int32 or Python int, at most 64.
        has: the function that `output_has` returned. Columns outside the output are skipped, one line of the buffer at
            a time.
    """
    dtype, width = out_buffer.dtype, out_buffer.shape[-1]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def write_line(line: jax.Array, target: Callable[..., Any], buffer: Any) -> None:
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        buffer[...] = line.astype(dtype)
        plgpu.commit_smem()
        _copy_rows(buffer, target, low, high)

    lines_written = 0
    for begin, value, target in parts:
        for first in range(0, value.shape[1], width):
            place = functools.partial(target, columns=pl.ds(begin + first, width))
            line = value[:, first : first + width]
            write = functools.partial(write_line, line, place, out_buffer.at[lines_written % 2])
            # The lines that are skipped are the last of a tile, so the two buffers still alternate correctly.
            write() if has(begin + first) is True else pl.when(has(begin + first))(write)
            lines_written += 1


def _copy_rows(buffer: Any, target: Callable[..., Any], low: Any, high: Any) -> None:
    """Copy rows ``low..high`` of a buffer to the output: 64 rows at once, or fewer in copies of 32, 16, ... rows."""

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
