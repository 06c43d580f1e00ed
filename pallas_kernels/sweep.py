"""What a kernel for products that keep the rows sums up: its passes over the contraction."""

from typing import NamedTuple


class Sweep(NamedTuple):
    """One pass over the contraction."""

    rows: int
    """The index of the row operand that the sweep's steps load."""
    matrices: tuple[int, ...]
    """The matrices of the slot that are multiplied, as indices of the weights' second axis: the product with the first
    is added to the first sum, and so on."""
