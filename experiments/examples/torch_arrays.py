"""Planning for a PyTorch trainer, with NumPy arrays in and out: ``python -m experiments.examples.torch_arrays``.

This script needs neither a device mesh nor PyTorch. A trainer converts its tensors with ``tensor.numpy()``, and the
plan back with ``torch.from_numpy(array)``. JAX plans on the CPU while the GPUs stay with the trainer.
"""

import functools
from typing import Any

import jax
import numpy as np

from relibra_jax import (
    EMPTY,
    BatchPlan,
    Topology,
    assign_samples,
    batch_imbalance,
    check_plan,
    plan_batch,
    rank_load,
    relibra,
    replay_from_rollout,
)

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
SAMPLES, TOKENS, LAYERS, TOP_K, MICRO_BATCHES = 64, 48, 3, 4, 4
# Pass the same planner and the same function for every batch: a new one compiles again.
PLANNER, ASSIGN = relibra(), functools.partial(assign_samples, steps=1000)


def plan(replay, state, topology, key):
    """Assign the samples of one batch to micro-batches and ranks, and place and replicate its experts."""
    options: dict[str, Any] = {"stages": MICRO_BATCHES, "assign": ASSIGN, "key": key}
    return plan_batch(replay, PLANNER, state, topology, **options)


def main() -> BatchPlan:
    """Plan one batch and print the parts of the plan that a trainer follows.

    Returns:
        The plan, as NumPy arrays.
    """
    # Random arrays in place of verl's rollout batch, which has an attention_mask and routed_experts
    # [batch, max_seq, layers, top_k] with zeros as padding.
    rng = np.random.default_rng(0)
    attention_mask = np.arange(TOKENS) < rng.integers(TOKENS // 2, TOKENS + 1, SAMPLES)[:, None]
    scores = rng.normal(size=(1, 1, LAYERS, 32)) + rng.gumbel(size=(SAMPLES, TOKENS, LAYERS, 32))
    routed_experts = np.argsort(-scores)[..., :TOP_K] * attention_mask[..., None, None]

    replay = replay_from_rollout(
        routed_experts, layout="verl", mask=attention_mask, num_experts=32, top_k=TOP_K, num_layers=LAYERS
    )
    # Initialise the planner's state once. Afterwards pass the state that each call returns to the next call.
    state = PLANNER.init(TOPOLOGY, LAYERS, key=jax.random.key(0))
    batch_plan, state = jax.device_get(plan(replay, state, TOPOLOGY, jax.random.key(1)))
    check_plan(batch_plan.plan, batch_plan.load, TOPOLOGY)

    samples = batch_plan.assignment.sample[0, 0, 0]
    print(f"micro-batch 0, node 0, rank 0: samples {samples[samples != EMPTY].tolist()}")
    layer = batch_plan.micro_batch(0).layer(0)
    print(f"layer 0: home slots of experts 0 to 7 are {layer.home[:8].tolist()}")
    replicas = layer.slot_expert[0, 0, TOPOLOGY.held_slots :]
    print(f"  replicas on that rank: {replicas.tolist()}")
    print(f"  token copies that its slots compute: {layer.quota[0, 0].tolist()}")
    print(f"imbalance of the batch: {batch_imbalance(rank_load(batch_plan.plan)):.4f}")
    return batch_plan


if __name__ == "__main__":
    main()
