"""A trace cut into batches, as a trainer would meet them."""

from typing import NamedTuple

import numpy as np

from relibra_jax.cli.options import Batching
from relibra_jax.cli.traces import Trace
from relibra_jax.limits import check_integer, check_seed
from relibra_jax.types import RoutingReplay


class Batches(NamedTuple):
    """The batches of a trace."""

    replays: list[RoutingReplay]
    """The routing of each batch."""
    num_micro_batches: int
    """The micro-batches of one batch."""
    history: int
    """How many batches at the start are planned but not measured: 1 where there are two or more, else 0."""
    samples_left: int
    """The samples at the end of the trace that do not fill a batch."""


def make_batches(trace: Trace, batching: Batching) -> Batches:
    """Cut a trace into batches.

    Args:
        trace: the trace, whose samples are used once each.
        batching: the sizes, and the order of samples.

    Raises:
        ValueError: if the sizes do not fit each other or the trace, the trace has no tokens, or `check_seed` refuses
            the seed.
    """
    samples, per_micro_batch, batch = len(trace.replay.mask), batching.micro_batch_size, batching.batch_size
    check_seed("seed", batching.seed)
    if not trace.replay.mask.any():
        raise ValueError(f"{trace.name} has no tokens in its {samples} samples: there is no load to balance")
    check_integer("micro_batch_size", per_micro_batch, least=1)
    if per_micro_batch > samples:
        raise ValueError(f"micro_batch_size={per_micro_batch} exceeds the {samples} samples of {trace.name}")
    if batch is None:
        batch = max(1, samples // 2 // per_micro_batch) * per_micro_batch
    if batch < 1 or batch % per_micro_batch:
        raise ValueError(f"batch_size={batch} must be a multiple of micro_batch_size={per_micro_batch}")
    if batch > samples:
        raise ValueError(f"batch_size={batch} exceeds the {samples} samples of {trace.name}")
    order = np.arange(samples)
    if batching.order == "shuffled":
        order = np.random.default_rng(batching.seed).permutation(samples)
    chosen = [order[start : start + batch] for start in range(0, samples - batch + 1, batch)]
    replays = [RoutingReplay(trace.replay.expert_ids[part], trace.replay.mask[part]) for part in chosen]
    return Batches(replays, batch // per_micro_batch, int(len(chosen) > 1), samples - batch * len(chosen))
