"""The guide's Flax loop on one GPU: plans, moves and trains as users run it, with the losses of every batch."""

import os
import time

from experiments.ladder.facts import print_facts


def train(batches: int, *, rehearsal: bool = False) -> None:
    """Train the model of `experiments.examples.flax_loop` on one device, and print the losses.

    Args:
        batches: the number of batches.
        rehearsal: whether this is a rehearsal, which trains one batch.
    """
    os.environ["XLA_FLAGS"] = ""  # the example's own flags are for CPUs
    from experiments.examples import flax_loop
    from relibra_jax import Topology

    flax_loop.TOPOLOGY = Topology(num_nodes=1, ranks_per_node=1, num_experts=16, replica_slots=0)
    flax_loop.WIDTH = flax_loop.EXPERT_WIDTH = 64
    begin = time.perf_counter()
    losses = flax_loop.main(1 if rehearsal else batches)
    print_facts(losses=losses, seconds=time.perf_counter() - begin)
