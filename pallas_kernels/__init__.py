"""Kernels for grouped expert compute; imports jax alone. Empty as yet."""
