"""Grouped matrix products and SwiGLU MLPs: one call computes the rows of several experts.

A *group* is the set of consecutive rows that one weight slot multiplies; ``group_sizes`` gives the number of rows of
each group. The package depends only on JAX. `pallas_kernels.swap_annealing` is unrelated to grouped products: it is a
kernel for the search of a planner.
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
