"""Jobs drawn at random, for comparisons of schedulers. Their distributions are assumed; no cluster ran them."""

from typing import Final

import numpy as np

from experiments.multiplex.jobs import Job
from relibra_jax.support.limits import check_integer, check_seed

STEP_SECONDS: Final = (120.0, 900.0)
"""The range of the seconds of a step on separate pools, drawn log-uniformly."""
ROLLOUT_SHARE: Final = (0.4, 0.8)
"""The range of the rollout's share of a step, drawn uniformly. Rollouts of reasoning models are most of a step."""
TAIL_SHARE: Final = (0.2, 0.6)
"""The range of the share of a rollout that waits for its longest responses, drawn uniformly."""
SLO: Final = (1.0, 2.0)
"""The range of the objective, drawn uniformly."""
SIZES: Final = ((7, 1, 1), (14, 1, 2), (32, 2, 4))
"""The sizes of jobs, equally likely: billions of parameters, rollout nodes, and training nodes, of 8 devices each."""
ENGINE_BYTES, TRAINER_BYTES = 2, 16
"""Bytes per parameter. Every rollout node holds bfloat16 weights. The training nodes share bfloat16 weights and
gradients, float32 weights, and two float32 moments of Adam."""


def draw_jobs(count: int, *, seed: int) -> list[Job]:
    """Draw jobs from the assumed distributions, named ``drawn-0`` and so on.

    Args:
        count: the number of jobs.
        seed: the seed of the draw.

    Raises:
        ValueError: if ``count`` is less than 1, or ``seed`` is out of its range.

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
