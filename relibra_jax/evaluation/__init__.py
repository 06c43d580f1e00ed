"""Comparison of planners on traces."""

from relibra_jax.evaluation.settings import Batching, Costs, Ranks

__all__ = ["Batching", "Costs", "Ranks"]
