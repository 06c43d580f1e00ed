"""Trainers that are not ours: adapters on top of `relibra_jax.nnx`, one module or package for each."""
