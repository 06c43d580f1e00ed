"""Jobs and pools for tests of sharing, with numbers small enough to check by hand."""

import dataclasses

from experiments.multiplex.jobs import Job, Pool, Pools

POOL = Pool(device_price=1.0, devices_per_node=1, host_bytes=100, max_nodes=4)
POOLS = Pools(rollout=POOL, training=dataclasses.replace(POOL, device_price=3.0))


def make_job(name="a", rollout=60.0, training=40.0, **others):
    sizes = {"rollout_nodes": 1, "training_nodes": 1} | others
    return Job(name=name, rollout_seconds=rollout, training_seconds=training, **sizes)


def random_jobs(rng, count):
    """Make random jobs with few sizes and many ties, so that every rule matters."""
    return [
        make_job(
            f"job-{number}",
            float(rng.integers(1, 10)),
            float(rng.integers(1, 10)),
            rollout_nodes=int(rng.integers(1, 4)),
            training_nodes=int(rng.integers(1, 4)),
            tail_share=float(rng.choice([0.0, 0.25, 1.0])),
            slo=float(rng.choice([1.0, 1.5, 2.0, 3.0])),
            rollout_bytes=int(rng.integers(0, 70)),
            training_bytes=int(rng.integers(0, 70)),
        )
        for number in range(count)
    ]
