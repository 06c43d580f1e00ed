"""The guide's Flax loop on the GPUs of this host: it plans, moves and trains as users run it."""

import dataclasses
import functools
import math
import os
import time

from experiments.ladder.facts import print_facts
from experiments.rl.devices import overlap_exchanges


def train(batches: int, *, rehearsal: bool = False) -> None:
    """Train the model of `experiments.examples.flax_loop` on one node, and print the losses.

    Args:
        batches: the number of batches.
        rehearsal: whether this is a rehearsal, which trains one batch.
    """
    os.environ["XLA_FLAGS"] = ""  # the example's own flags are for CPUs
    overlap_exchanges()
    import jax

    from experiments.examples import flax_loop

    devices = jax.devices()[: math.gcd(flax_loop.TOPOLOGY.num_experts, len(jax.devices()))]
    ranks = {"num_nodes": 1, "ranks_per_node": len(devices), "replica_slots": int(len(devices) > 1)}
    flax_loop.TOPOLOGY = dataclasses.replace(flax_loop.TOPOLOGY, **ranks)
    flax_loop.expert_mesh = functools.partial(flax_loop.expert_mesh, devices=devices)
    flax_loop.WIDTH = flax_loop.EXPERT_WIDTH = 64
    begin = time.perf_counter()
    losses = flax_loop.main(1 if rehearsal else batches)
    print_facts(devices=len(devices), losses=losses, seconds=time.perf_counter() - begin)
