"""The planner from a PyTorch trainer, NumPy arrays in and out: ``python -m experiments.examples.torch_arrays``.

Nothing here needs a device mesh, or PyTorch: what a trainer holds as tensors comes in with ``tensor.numpy()`` and goes
back with ``torch.from_numpy(array)``. JAX plans on the CPU beside the trainer's GPUs.
"""

import functools

import jax
import numpy as np

from relibra_jax import (
    EMPTY,
    Assignment,
    Plan,
    Topology,
    assign_samples,
    batch_imbalance,
    check_plan,
    expert_load,
    plan_batch,
    rank_load,
    relibra,
    replay_from_rollout,
)
from relibra_jax.plan import replica_experts

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
SAMPLES, TOKENS, LAYERS, TOP_K, MICRO_BATCHES = 64, 48, 3, 4, 4


@functools.partial(jax.jit, static_argnums=2)
def plan(replay, state, topology, key):
    assign = functools.partial(assign_samples, key=key, steps=1000)
    assignment, made, state = plan_batch(
        replay, relibra(), state, topology, num_micro_batches=MICRO_BATCHES, assign=assign
    )
    return assignment, made, expert_load(replay, assignment, num_experts=topology.num_experts), state


def main() -> tuple[Assignment, Plan]:
    """Plan one batch, and print what a trainer does with the plan."""
    # In verl's rollout batch: routed_experts [batch, max_seq, layers, top_k], zero padded, and attention_mask.
    rng = np.random.default_rng(0)
    attention_mask = np.arange(TOKENS) < rng.integers(TOKENS // 2, TOKENS + 1, SAMPLES)[:, None]
    scores = rng.normal(size=(1, 1, LAYERS, 32)) + rng.gumbel(size=(SAMPLES, TOKENS, LAYERS, 32))
    routed_experts = np.argsort(-scores)[..., :TOP_K] * attention_mask[..., None, None]

    replay = replay_from_rollout(
        routed_experts, layout="verl", mask=attention_mask, num_experts=32, top_k=TOP_K, num_layers=LAYERS
    )
    state = relibra().init(
        TOPOLOGY, LAYERS, key=jax.random.key(0)
    )  # once; from here on, keep what plan returns
    assignment, made, load, state = jax.device_get(plan(replay, state, TOPOLOGY, jax.random.key(1)))
    check_plan(made, load, TOPOLOGY)

    first = assignment.sample[0, 0, 0]
    print(f"micro-batch 0, node 0, rank 0: samples {first[first != EMPTY].tolist()}")
    print(f"layer 0: home slots of experts 0 to 7 are {made.home[0, :8].tolist()}")
    copied = replica_experts(made)[0, 0, 0, 0]
    print(
        f"  replicas on that rank {copied.tolist()}, token copies of its slots {made.quota[0, 0, 0, 0].tolist()}"
    )
    print(f"imbalance over the batch {batch_imbalance(rank_load(made)):.4f}")
    return assignment, made


if __name__ == "__main__":
    main()
