"""The terms in which the kernels describe their products; Hopper's and Triton's kernels share them.

A *row product* multiplies every tile of rows by matrices of its group's slot. ``sums`` says which: lists of sweeps over
the contraction. Each list starts with new sums, and the sweeps of one list add to the same sums. For example, the
backward pass of the grouped MLP has two row products. The first one reads the rows ``x`` and ``dy``:

    sums = [[Sweep(0, (GATE, UP))], [Sweep(1, (DOWN,))]]

    sweep over x     sum 0 = x gate,  sum 1 = x up     one pass over x loads both matrices
    sweep over dy    sum 2 = dy down                   a new list, so sums 0 and 1 are complete

Its epilogue gets the three sums and returns three outputs, among them ``dg`` and ``du``. The second one adds two sweeps
into one sum:

    sums = [[Sweep(0, (GATE,)), Sweep(1, (UP,))]]      sum 0 = dg gate^T + du up^T, with transposed matrices

Of float8 operands, every block of 128 elements of the contraction has scales (`BlockScales`). The product of a block is
multiplied by them before it is added to the sum, which is the only one.

A *weight gradient* sums ``a^T b`` over the rows of each group, for one or more pairs of row operands a and b.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax

SCALE_BLOCK: Final = 128
"""The number of elements of the contraction that share a scale: of one row, or of 128 columns of a matrix."""


class Sweep(NamedTuple):
    """One pass over the contraction dimension."""

    rows: int
    """The index of the row operand that the sweep multiplies."""
    matrices: tuple[int, ...]
    """The matrices of the slot that the rows are multiplied by, as indices of the second axis of the weights. The
    product with the first matrix is added to the first sum, and so on."""


type Epilogue = Callable[[Sequence[jax.Array], Any], tuple[Sequence[jax.Array], jax.Array | None]]
"""A function ``(sums, scale or None) -> (values, row sums or None)`` for a part of a tile: sums and values are ``[rows,
columns]``, row sums ``[rows]``. The scale can be multiplied with the sums."""


class BlockScales(NamedTuple):
    """The scales of float8 operands, float32; in a kernel, references to them."""

    rows: Any
    """The scales of each row's blocks, ``[k / 128, r]``: neighbouring rows are read together."""
    weights: Any
    """The scales of the blocks of each slot's matrix, ``[all slots, n / 128, k / 128]``."""


class RowProductOperands(NamedTuple):
    """The arrays that a row-product kernel reads; in the kernel, references to them."""

    groups: Any
    """Where the groups are: the group offsets for Hopper, the table of tiles for Triton."""
    rows: list[Any]
    """The row operands."""
    weights: list[Any]
    """The weight buffers."""
    scale: list[Any]
    """The factor of each row for the epilogue; empty if it uses none."""
    block_scales: list[BlockScales]
    """The scales of float8 operands; empty for other operands."""


class WeightGradientOperands(NamedTuple):
    """The arrays that a weight-gradient kernel reads; in the kernel, references to them."""

    groups: Any
    """Where the groups are: the group offsets for Hopper, the group bounds for Triton."""
    pairs: list[tuple[Any, Any]]
    """The pairs (a, b) of row operands."""
