"""Kernels for grouped expert compute; imports jax alone."""

from pallas_kernels.grouped_mlp.api import grouped_mlp

__all__ = ["grouped_mlp"]
