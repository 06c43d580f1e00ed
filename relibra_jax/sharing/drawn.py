"""Jobs that are drawn, for comparisons of schedulers: no cluster ever ran them, and their distributions are assumed."""

from typing import Final

import numpy as np

from relibra_jax.limits import check_integer, check_seed
from relibra_jax.sharing.jobs import Job

STEP_SECONDS: Final = (120.0, 900.0)
"""A step alone takes this long, log-uniform."""
ROLLOUT_SHARE: Final = (0.4, 0.8)
"""This share of it is rollout, uniform: rollouts of reasoning models are most of a step."""
TAIL_SHARE: Final = (0.2, 0.6)
"""This share of a rollout waits for its longest responses, uniform."""
SLO: Final = (1.0, 2.0)
"""The objective, uniform."""
SIZES: Final = ((7, 1, 1), (14, 1, 2), (32, 2, 4))
"""Billions of parameters, rollout nodes and training nodes of 8 devices, one of them by equal chance."""
ENGINE_BYTES, TRAINER_BYTES = 2, 16
"""Bytes of a parameter: bfloat16 on every rollout node; bfloat16 with its gradient, and float32 with two moments of
Adam, divided over the training nodes."""


def draw_jobs(count: int, *, seed: int) -> list[Job]:
    """Jobs of assumed distributions, named ``drawn-0`` and so on.

    Args:
        count: the number of jobs.
        seed: the seed.

    Raises:
        ValueError: if ``count`` is below 1, or ``seed`` is none.

    >>> [job.name for job in draw_jobs(2, seed=0)]
    ['drawn-0', 'drawn-1']
    """
    check_integer("count", count, least=1)
    check_seed("seed", seed)
    rng = np.random.default_rng(seed)
    return [_draw_job(f"drawn-{number}", rng) for number in range(count)]


def _draw_job(name: str, rng: np.random.Generator) -> Job:
    seconds = float(np.exp(rng.uniform(*np.log(STEP_SECONDS))))
    share = rng.uniform(*ROLLOUT_SHARE)
    billions, rollout_nodes, training_nodes = SIZES[rng.integers(len(SIZES))]
    return Job(
        name=name,
        rollout_seconds=seconds * share,
        training_seconds=seconds * (1 - share),
        rollout_nodes=rollout_nodes,
        training_nodes=training_nodes,
        tail_share=rng.uniform(*TAIL_SHARE),
        slo=rng.uniform(*SLO),
        rollout_bytes=billions * 10**9 * ENGINE_BYTES,
        training_bytes=billions * 10**9 * TRAINER_BYTES // training_nodes,
    )
