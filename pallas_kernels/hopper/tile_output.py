"""How the Hopper kernels write a tile's output: through shared memory, with copies that spare what is not theirs.

The copy of a tile's output must spare rows of its neighbours, which other blocks write at the same time. Sizes of
copies are fixed in the program, so a tile that is not full is copied as a sum of powers of two rows. Outputs pass
through a buffer that is swizzled but not tiled: the swizzle follows the address, so any row may start a copy.

The last tile of columns may reach beyond the matrix. Copies (TMA) know the sizes of every axis of an array: what they
load from beyond an edge is zeros, so that products there are zero, and what lies beyond it is not written.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.persistent_kernel import WARPGROUP_HEIGHT


def output_has(tile: jax.Array, width: int, columns: int) -> Callable[[int], Any]:
    """Return the function that says whether an output has a column of a tile: True, or a predicate if it may not.

    Args:
        tile: the tile's number among the tiles of columns, int32.
        width: the number of columns of a tile.
        columns: the number of columns of the output, which the last tile may reach beyond.
    """
    of_last = columns % width or width
    return lambda column: True if column < of_last else tile < columns // width


def write_output(
    parts: Iterable[tuple[int, jax.Array, Callable[..., Any]]],
    out_buffer: Any,
    low: Any,
    high: Any,
    has: Callable[[int], Any],
) -> None:
    """Write rows ``low..high`` of the 64 rows that this warpgroup computed, one part of the columns after the other.

    Args:
        parts: the parts: the number of the first column in the tile, the values ``[64, columns]``, and the function
            ``(rows, columns) -> reference`` that gives the place in the output for slices of the tile.
        out_buffer: the warpgroup's two buffers.
        low: the first row to write, int32 or a number, at least 0.
        high: the row after the last one to write, int32 or a number, at most 64.
        has: the result of `output_has`. Columns that the output does not have are left out, a line of the buffer at a
            time.
    """
    dtype, width = out_buffer.dtype, out_buffer.shape[-1]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def write_line(line: jax.Array, target: Callable[..., Any], buffer: Any) -> None:
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        buffer[...] = line.astype(dtype)
        plgpu.commit_smem()
        _copy_rows(buffer, target, low, high)

    turn = 0
    for begin, value, target in parts:
        for first in range(0, value.shape[1], width):
            place = functools.partial(target, columns=pl.ds(begin + first, width))
            line = value[:, first : first + width]
            write = functools.partial(write_line, line, place, out_buffer.at[turn % 2])
            # Lines that are left out are the last of a tile: buffers take turns as if there were none.
            write() if has(begin + first) is True else pl.when(has(begin + first))(write)
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
