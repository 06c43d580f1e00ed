"""The block sizes of the Triton kernels, by a heuristic on the shapes. Others have not been measured.

A block of 128 x 128 accumulators takes half of the registers of four warps and computes 64 products per loaded byte.
Matrix kernels for these GPUs commonly use this size. If the expected groups have fewer rows, blocks are lower, since
the rows of a block beyond its group are wasted work. A block that keeps several sums is half as wide. With steps of 64
bytes of the contraction, four stages take at most 64 KiB of shared memory. Every GPU of compute capability 8.0 or
higher has that: the smallest limit is 99 KiB per block (8.6, 8.9, 12.0 and 12.1). Attention has sizes of its own.
"""

from typing import Final, NamedTuple

import jax

from pallas_kernels.products import SCALE_BLOCK

SMALLEST: Final = 16
"""The smallest number of rows, of columns and of contraction elements that Triton multiplies in one step."""
LARGEST: Final = 128
"""The largest number of rows or columns of a block."""
STEP_BYTES: Final = 64
"""The number of bytes of the contraction that one step loads."""
STAGES: Final = 4
"""The number of steps whose operands are in flight or in shared memory."""


ATTENTION_BYTES: Final = 32 * 1024
"""The most bytes of a block of rows in attention: 128 rows of 128 bfloat16 numbers. With two stages and eight warps,
all kernels then fit into 99 KiB of shared memory where the GPU has no more (``make aot``)."""
WIDEST_BYTES: Final = 1024
"""The most bytes of a head, rounded up to a power of two numbers. The smallest blocks of wider heads do not fit."""


class BlockSizes(NamedTuple):
    """The block sizes of a kernel; height, width and step are powers of two."""

    height: int
    """The number of rows of a block of the output."""
    width: int
    """The number of columns of a block of the output."""
    step: int
    """The number of elements of the contraction that one step loads; in attention, the number of rows."""
    warps: int
    """The number of warps that compute a block together."""
    stages: int = STAGES
    """The number of steps whose operands are in flight or in shared memory."""


def row_product_blocks(rows: jax.Array, num_groups: int, columns: int, accumulators: int = 1) -> BlockSizes:
    """Return the block sizes for a row product.

    Args:
        rows: the row operand, ``[r, k]``. The height depends only on the numbers of rows and groups, so all products of
            the same rows can share a table of tiles.
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


def float8_blocks(rows: jax.Array, num_groups: int) -> BlockSizes:
    """Return the block sizes for a row product of float8 operands ``[r, k]``.

    A step is a block of 128 elements that share scales, and three stages take at most 96 KiB of shared memory. A block
    keeps the product of a step and the sum.

    >>> float8_blocks(jax.numpy.zeros((4096, 4096), "float8_e4m3fn"), num_groups=20)
    BlockSizes(height=128, width=128, step=128, warps=8, stages=3)
    """
    height = _power_of_two(rows.shape[0] // num_groups)
    return BlockSizes(height, LARGEST, SCALE_BLOCK, _warps(2 * height * LARGEST), stages=3)


def weight_gradient_blocks(lhs: jax.Array, rhs: jax.Array) -> BlockSizes:
    """Return the block sizes for a weight gradient ``lhs^T rhs`` of row operands ``[r, k]`` and ``[r, n]``.

    >>> weight_gradient_blocks(jax.numpy.zeros((9, 4096), "bfloat16"), jax.numpy.zeros((9, 40), "bfloat16"))
    BlockSizes(height=128, width=64, step=32, warps=4, stages=4)
    """
    height, width = _power_of_two(lhs.shape[1]), _power_of_two(rhs.shape[1])
    return BlockSizes(height, width, _step(lhs), _warps(height * width))


def attention_blocks(query: jax.Array, key: jax.Array) -> tuple[BlockSizes, BlockSizes]:
    """Return the block sizes of attention, forward and backward.

    The width of a block is that of a head, rounded up to a power of two. Blocks of wide heads and of float32 have fewer
    rows, so that a block of rows has at most `ATTENTION_BYTES`; those of gradients have half as many, because they hold
    more operands. A step of the forward kernel is a number of keys, and that of the backward kernels one of keys or
    queries.

    Args:
        query: the queries, ``[T, heads, d]``.
        key: the keys, ``[S, key heads, d]``.

    >>> for blocks in attention_blocks(*[jax.numpy.zeros((8192, 4, 128), "bfloat16")] * 2):
    ...     blocks
    BlockSizes(height=128, width=128, step=64, warps=8, stages=2)
    BlockSizes(height=64, width=128, step=64, warps=8, stages=2)
    """
    width = max(1 << (query.shape[2] - 1).bit_length(), SMALLEST)
    largest = max(min(LARGEST, ATTENTION_BYTES // (width * query.dtype.itemsize)), 2 * SMALLEST)
    height, step = (
        _power_of_two(min(len(array), size)) for array, size in ((query, largest), (key, largest // 2))
    )
    return BlockSizes(height, width, step, 8, 2), BlockSizes(
        min(height, step), width, min(height, step), 8, 2
    )


def _power_of_two(size: int) -> int:
    """Round a size up to a power of two that Triton can multiply, and limit it to the largest size of a block."""
    return min(max(1 << max(size - 1, 0).bit_length(), SMALLEST), LARGEST)


def _step(rows: jax.Array) -> int:
    return STEP_BYTES // rows.dtype.itemsize


def _warps(accumulated: int) -> int:
    """Return the number of warps for a number of accumulators; the registers of four warps suffice for 128 x 128."""
    return 4 if accumulated <= LARGEST * LARGEST else 8
