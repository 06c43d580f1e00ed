"""Grouped matrix products, SwiGLU MLPs of experts, and attention.

A *group* is the set of consecutive rows that one weight slot multiplies; ``group_sizes`` gives the number of rows of
each group. `grouped_mlp` and `grouped_dot` compute the rows of several experts in one call, and `grouped_dot_float8`
multiplies operands in float8. `flash_attention` attends from every query to a range of keys. All choose the fastest
implementation that can run: Pallas kernels for Hopper GPUs (``mosaic``, not for attention), Pallas kernels for other
NVIDIA GPUs (``triton``), or plain XLA on every platform (``xla``). They choose a kernel only after
`pallas_kernels.self_check` has verified its results on the machine, and in a program of several processes only after
`agree_on_kernels`.

The package depends only on JAX. `pallas_kernels.pull_rows` is about something else: it reads rows from other devices.
"""

from pallas_kernels.agreement import agree_on_kernels
from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.grouped_dot.api import grouped_dot, grouped_outer, ragged_dot
from pallas_kernels.grouped_dot_float8.api import grouped_dot_float8
from pallas_kernels.grouped_mlp.api import grouped_mlp
from pallas_kernels.hopper.multiprocessors import leave_multiprocessors

__all__ = [
    "agree_on_kernels",
    "flash_attention",
    "grouped_dot",
    "grouped_dot_float8",
    "grouped_mlp",
    "grouped_outer",
    "leave_multiprocessors",
    "ragged_dot",
]
