"""The passes over the contraction dimension that a row-product kernel sums."""

from typing import NamedTuple


class Sweep(NamedTuple):
    """One pass over the contraction dimension."""

    rows: int
    """The index of the row operand that the sweep multiplies."""
    matrices: tuple[int, ...]
    """The matrices of the slot that the rows are multiplied by, as indices of the second axis of the weights. The
    product with the first matrix is added to the first sum, and so on."""
