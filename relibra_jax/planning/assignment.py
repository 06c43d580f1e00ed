"""Which samples go to which micro-batch and which rank."""

import numpy as np

from relibra_jax.types import EMPTY, Assignment, Topology


def assign_in_order(num_samples: int, topology: Topology, *, num_micro_batches: int) -> Assignment:
    """Samples in their given order: contiguous runs to micro-batches, and inside each to flat ranks.

    Args:
        num_samples: B; runs differ by one sample at most.
        topology: gives N and G.
        num_micro_batches: M.

    Returns:
        An Assignment of int32; shorter runs end in EMPTY.

    Raises:
        ValueError: there is no micro-batch, or fewer samples than micro-batches.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> assign_in_order(5, topology, num_micro_batches=2).sample.tolist()
    [[[[0, 1], [2, -1]]], [[[3, -1], [4, -1]]]]
    """
    if not 1 <= num_micro_batches <= num_samples:
        raise ValueError(f"num_micro_batches={num_micro_batches} must be at least 1 and at most {num_samples} samples")
    ranks = topology.num_ranks
    per_rank = -(-(-(-num_samples // num_micro_batches)) // ranks)
    sample = np.full((num_micro_batches, ranks, per_rank), EMPTY, np.int32)
    for micro_batch, samples in enumerate(np.array_split(np.arange(num_samples), num_micro_batches)):
        for rank, run in enumerate(np.array_split(samples, ranks)):
            sample[micro_batch, rank, : run.size] = run
    return Assignment(sample.reshape(num_micro_batches, topology.num_nodes, topology.ranks_per_node, per_rank))
