"""Benchmarks, measurements and training runs of relibra_jax, which are not part of the installed packages."""
