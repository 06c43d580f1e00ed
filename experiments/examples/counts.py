"""Counts from rollout workers, the plan where the trainer is: ``python -m experiments.examples.counts``.

The routes stay with the workers until the plan says which rank owns which sample. docs/guides/counts.md has the recipe
for verl and slime, in which the workers are processes; here they are turns of a loop.
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
    plan_loads,
    rank_load,
    relibra,
    replay_from_rollout,
    sample_counts,
)

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
MODEL: dict[str, Any] = {"num_experts": 32, "top_k": 4, "num_layers": 3}
WORKERS, SAMPLES, TOKENS, MICRO_BATCHES = 4, 16, 300, 4


def rollout(rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Make one worker's recording, as slime holds it: ``[tokens - 1, layers, K]`` int32, and a mask of these tokens.

    The last token of a sequence predicts nothing, so that training leaves it out, and needs no route of it.
    """
    routed = rng.integers(TOKENS // 2, TOKENS, SAMPLES)
    popular = rng.normal(size=(MODEL["num_layers"], MODEL["num_experts"]))
    recorded = [
        np.argsort(-popular - rng.gumbel(size=(tokens, *popular.shape)))[..., : MODEL["top_k"]].astype(
            np.int32
        )
        for tokens in routed
    ]
    return recorded, np.arange(TOKENS) < routed[:, None]


def main() -> tuple[BatchPlan, BatchPlan]:
    """Plan a batch from counts, and from all routes; print what each had to be sent."""
    rng = np.random.default_rng(0)
    recordings = [rollout(rng) for _ in range(WORKERS)]
    state = relibra().init(TOPOLOGY, MODEL["num_layers"], key=jax.random.key(0))
    assign = functools.partial(assign_samples, key=jax.random.key(1), steps=1000)
    options: dict[str, Any] = {"num_micro_batches": MICRO_BATCHES, "assign": assign}

    # On every worker: NumPy, no device. These two arrays are all that is sent.
    sent = [sample_counts(source, layout="slime", mask=mask, **MODEL) for source, mask in recordings]
    # On the controller.
    load, tokens = (np.concatenate(part) for part in zip(*sent, strict=True))
    plan = jax.jit(functools.partial(plan_loads, planner=relibra(), topology=TOPOLOGY, **options))
    counted, _ = jax.device_get(plan(load, tokens, state=state))
    check_plan(counted.plan, counted.load, TOPOLOGY)

    # What it would have been with all routes in one place.
    source = [rows for worker, _ in recordings for rows in worker]
    mask = np.concatenate([mask for _, mask in recordings])
    replay = replay_from_rollout(source, layout="slime", mask=mask, **MODEL)
    plan = jax.jit(functools.partial(plan_batch, planner=relibra(), topology=TOPOLOGY, **options))
    whole, _ = jax.device_get(plan(replay, state=state))

    owned = counted.assignment.sample[:, 0, 0]
    print(
        f"routes {sum(rows.nbytes for rows in source):,} bytes, counts {load.nbytes + tokens.nbytes:,} bytes"
    )
    print(f"the routes of samples {sorted(owned[owned != EMPTY].tolist())} go to rank 0 of node 0")
    print(f"imbalance over the batch {batch_imbalance(rank_load(counted.plan)):.4f}")
    return counted, whole


if __name__ == "__main__":
    main()
