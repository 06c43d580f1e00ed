"""The sizes of a kernel's blocks: a heuristic from the shapes alone. Nothing here was measured on a GPU.

A block of 128 x 128 accumulators takes half of the registers of four warps, and its operands come in at 64 products a
byte: what matrix kernels for these GPUs commonly use. Groups that expect fewer rows get lower blocks, since a block's
rows beyond its group are computed for nothing. A block that keeps several sums is half as wide. A step of 64 bytes of a
contraction and four stages take at most 64 KiB of shared memory, which every GPU from compute capability 8.0 on has:
99 KiB a block is the least (8.6, 8.9, 12.0 and 12.1).
"""

from typing import Final, NamedTuple

import jax

SMALLEST: Final = 16
"""The fewest rows, columns and elements of a contraction that Triton multiplies in one step."""
LARGEST: Final = 128
"""The most rows or columns of a block."""
STEP_BYTES: Final = 64
"""The bytes of a contraction in one step."""
STAGES: Final = 4
"""The number of steps whose operands are on their way or in shared memory."""


class BlockSizes(NamedTuple):
    """The sizes of the blocks of a kernel; all sizes of arrays are powers of two."""

    height: int
    """Rows of a block of the output."""
    width: int
    """Columns of a block of the output."""
    step: int
    """Elements of a contraction that are loaded at a time."""
    warps: int
    """Warps that work on a block together."""
    stages: int = STAGES
    """Steps whose operands are on their way or in shared memory."""


def row_product_blocks(rows: jax.Array, num_groups: int, columns: int, accumulators: int = 1) -> BlockSizes:
    """Return the sizes for a product that keeps the rows.

    Args:
        rows: ``[r, k]``, the row operand. The height depends on the number of rows and groups alone, so all products
            with the same rows can share a table of tiles.
        num_groups: the number of groups.
        columns: the number of columns of the output.
        accumulators: the number of sums that a block keeps.

    >>> row_product_blocks(jax.numpy.zeros((1000, 4096), "bfloat16"), num_groups=20, columns=1536)
    BlockSizes(height=64, width=128, step=32, warps=4, stages=4)
    >>> row_product_blocks(jax.numpy.zeros((10, 24)), num_groups=20, columns=20, accumulators=2)
    BlockSizes(height=16, width=32, step=16, warps=4, stages=4)
    """
    height = _power_of_two(rows.shape[0] // num_groups)
    width = min(_power_of_two(columns), LARGEST if accumulators == 1 else LARGEST // 2)
    return BlockSizes(height, width, _step(rows), _warps(height * width * accumulators))


def weight_gradient_blocks(lhs: jax.Array, rhs: jax.Array) -> BlockSizes:
    """Return the sizes for a product ``lhs^T rhs`` that is summed over rows, ``[r, k]`` and ``[r, n]``.

    >>> weight_gradient_blocks(jax.numpy.zeros((9, 4096), "bfloat16"), jax.numpy.zeros((9, 40), "bfloat16"))
    BlockSizes(height=128, width=64, step=32, warps=4, stages=4)
    """
    height, width = _power_of_two(lhs.shape[1]), _power_of_two(rhs.shape[1])
    return BlockSizes(height, width, _step(lhs), _warps(height * width))


def _power_of_two(size: int) -> int:
    """Return the next power of two that Triton can multiply, or the largest size of a block."""
    return min(max(1 << max(size - 1, 0).bit_length(), SMALLEST), LARGEST)


def _step(rows: jax.Array) -> int:
    return STEP_BYTES // rows.dtype.itemsize


def _warps(accumulated: int) -> int:
    """Return how many warps share so many sums: four have registers for 128 x 128 and little else."""
    return 4 if accumulated <= LARGEST * LARGEST else 8
