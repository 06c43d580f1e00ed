"""Planning from token counts instead of routes: ``python -m experiments.examples.counts``.

Each rollout worker sends two small arrays of counts to the controller, which plans from them. The routes stay on the
workers until the plan says which rank owns which sample. Here one process plays all workers in a loop. The
recipes for verl and slime, where workers are separate processes, are in docs/guides/counts.md.
"""

import functools
from typing import Any

import jax
import numpy as np

from relibra_jax import (
    EMPTY,
    Batch,
    BatchPlan,
    Topology,
    assign_samples,
    batch_imbalance,
    check_plan,
    join_batches,
    plan_batch,
    rank_load,
    relibra,
    replay_from_rollout,
    sample_counts,
)

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
MODEL: dict[str, Any] = {"num_experts": 32, "top_k": 4, "num_layers": 3}
WORKERS, SAMPLES, TOKENS, MICRO_BATCHES = 4, 16, 300, 4
PLANNER, ASSIGN = relibra(), functools.partial(assign_samples, steps=1000)


def rollout(rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Make one worker's random recording in slime's layout.

    Training leaves out the last token of a sequence, because it predicts nothing. So that token needs no route.

    Returns:
        The routes of every sample, int32 ``[tokens - 1, layers, K]``; and the mask of the tokens that have one.
    """
    lengths = rng.integers(TOKENS // 2, TOKENS, SAMPLES)
    popularity = rng.normal(size=(MODEL["num_layers"], MODEL["num_experts"]))
    routes = [
        np.argsort(-popularity - rng.gumbel(size=(tokens, *popularity.shape)))[..., : MODEL["top_k"]].astype(
            np.int32
        )
        for tokens in lengths
    ]
    return routes, np.arange(TOKENS) < lengths[:, None]


def main() -> tuple[BatchPlan, BatchPlan]:
    """Plan a batch from counts and again from all routes, and print the bytes that each way sends.

    Returns:
        The plan from counts and the plan from all routes, which are equal.
    """
    rng = np.random.default_rng(0)
    recordings = [rollout(rng) for _ in range(WORKERS)]
    state = PLANNER.init(TOPOLOGY, MODEL["num_layers"], key=jax.random.key(0))
    options: dict[str, Any] = {"stages": MICRO_BATCHES, "assign": ASSIGN, "key": jax.random.key(1)}

    # On every worker, in NumPy and without a device. The worker sends only these counts.
    counts = [
        Batch(*sample_counts(routes, layout="slime", mask=mask, **MODEL)) for routes, mask in recordings
    ]
    # On the controller.
    batch = join_batches(counts)
    plan_from_counts, _ = jax.device_get(plan_batch(batch, PLANNER, state, TOPOLOGY, **options))
    check_plan(plan_from_counts.plan, plan_from_counts.load, TOPOLOGY)

    # For comparison: the plan from all routes, gathered in one place.
    all_routes = [routes for worker_routes, _ in recordings for routes in worker_routes]
    mask = np.concatenate([mask for _, mask in recordings])
    replay = replay_from_rollout(all_routes, layout="slime", mask=mask, **MODEL)
    plan_from_routes, _ = jax.device_get(plan_batch(replay, PLANNER, state, TOPOLOGY, **options))

    samples = plan_from_counts.assignment.sample[:, 0, 0]
    routes_bytes = sum(routes.nbytes for routes in all_routes)
    sent = sum(np.asarray(part).nbytes for part in (batch.sample_load, batch.lengths))
    print(f"routes {routes_bytes:,} bytes, counts {sent:,} bytes")
    print(f"the routes of samples {sorted(samples[samples != EMPTY].tolist())} go to rank 0 of node 0")
    print(f"imbalance of the batch: {batch_imbalance(rank_load(plan_from_counts.plan)):.4f}")
    return plan_from_counts, plan_from_routes


if __name__ == "__main__":
    main()
