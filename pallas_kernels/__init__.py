"""Kernels for grouped expert compute; imports jax alone."""

from pallas_kernels.grouped_dot.api import grouped_dot, grouped_outer, ragged_dot
from pallas_kernels.grouped_mlp.api import grouped_mlp

__all__ = ["grouped_dot", "grouped_mlp", "grouped_outer", "ragged_dot"]
