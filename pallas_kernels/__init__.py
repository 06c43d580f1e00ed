"""Grouped matrix products and SwiGLU MLPs, for the rows of several experts in one call; imports jax alone.

`pallas_kernels.swap_annealing` stands by itself: a kernel for a planner's search.

A *group* is the set of consecutive rows that one weight slot multiplies, as in ``group_sizes``.
"""

from pallas_kernels.grouped_dot.api import grouped_dot, grouped_outer, ragged_dot
from pallas_kernels.grouped_mlp.api import grouped_mlp
from pallas_kernels.grouped_mlp.float8 import grouped_mlp_float8
from pallas_kernels.hopper.multiprocessors import leave_multiprocessors

__all__ = [
    "grouped_dot",
    "grouped_mlp",
    "grouped_mlp_float8",
    "grouped_outer",
    "leave_multiprocessors",
    "ragged_dot",
]
