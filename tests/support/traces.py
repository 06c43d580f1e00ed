"""Traces that tests of the command line read."""

from experiments.synthetic_traces import synthetic_trace
from relibra_jax.contract.replay_files import save_replay


def save_small_trace(path):
    """Write a synthetic trace of 32 samples, 2 layers and 16 experts, top-2; return its path."""
    trace = synthetic_trace(samples=32, mean_tokens=20, layers=2, num_experts=16, top_k=2)
    save_replay(path, trace.replay, num_experts=trace.num_experts)
    return path
