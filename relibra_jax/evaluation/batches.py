"""Division of a trace into the batches that a trainer would see."""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Integer, Num

from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.evaluation.settings import Batching
from relibra_jax.planning.sample_packing import micro_batches_for
from relibra_jax.support.limits import check_integer, check_seed
from relibra_jax.traces.bootstrap import bootstrap_samples, check_drawn
from relibra_jax.traces.trace import Trace

SAMPLES_PER_RANK: Final = 4
"""The default mean number of samples of a rank in a micro-batch. It lets packing be even to 1% on recorded lengths."""


class Batches(NamedTuple):
    """The batches of a trace."""

    replays: list[RoutingReplay]
    """The routing of each batch."""
    num_micro_batches: int
    """The number of micro-batches in a batch."""
    history: int
    """The number of batches at the start that are planned but not measured: 1 if there are two or more, else 0."""
    samples_left: int
    """The number of samples at the end of the trace that do not fill a batch; 0 if the batches are drawn."""
    token_ids: list[Integer[np.ndarray, "B T"]] | None = None
    """The vocabulary ids of each batch's tokens; None if the trace has none."""
    predicted: list[Num[np.ndarray, "B L E"]] | None = None
    """The load of each batch's samples that a predictor expects, as in `relibra_jax.planning.batch.Batch`; None to plan
    from what planners know without one."""


def make_batches(trace: Trace, batching: Batching, topology: Topology) -> Batches:
    """Cut a trace into batches, and choose their number of micro-batches.

    Args:
        trace: the trace. Each sample is used once, or samples are drawn with replacement if ``batching.bootstrap`` is
            set.
        batching: the sizes of batches and micro-batches, and the order of the samples.
        topology: the expert-parallel group, whose ranks share the samples of a micro-batch.

    Raises:
        ValueError: if the sizes do not fit each other or the trace, the trace has no tokens, the seed is out of its
            range, or the drawn batches do not fit this machine's memory.
    """
    check_seed("seed", batching.seed)
    samples = len(trace.replay.mask)
    if not trace.replay.mask.any():
        raise ValueError(
            f"{trace.name} has no tokens in its {samples} samples, so there is no load to balance"
        )
    bootstrap = batching.bootstrap
    chosen = _cut(trace, batching) if bootstrap is None else _draw(trace, batching, bootstrap)
    tokens = [np.asarray(trace.replay.mask[part]).sum(1) for part in chosen]
    micro_batches = _count_micro_batches(batching, tokens, topology)
    return Batches(
        [RoutingReplay(trace.replay.expert_ids[part], trace.replay.mask[part]) for part in chosen],
        micro_batches,
        int(len(chosen) > 1),
        0 if batching.bootstrap is not None else samples - sum(map(len, chosen)),
        None if trace.token_ids is None else [trace.token_ids[part] for part in chosen],
    )


def _cut(trace: Trace, batching: Batching) -> list[np.ndarray]:
    """Return the indices of the samples of every batch, with each sample used once."""
    samples, steps = len(trace.replay.mask), trace.recording.step
    if batching.batch_size is None and steps is not None and steps.min() < steps.max():
        by_step = [np.flatnonzero(steps == step) for step in np.unique(steps)]
        rng = np.random.default_rng(batching.seed)
        return [rng.permutation(part) if batching.order == "shuffled" else part for part in by_step]
    batch = max(1, samples // 2) if batching.batch_size is None else batching.batch_size
    check_integer("batch_size", batch, least=1)
    if batch > samples:
        raise ValueError(
            f"batch_size={batch} exceeds the {samples} samples of {trace.name}; set bootstrap to draw them with"
            " replacement"
        )
    order = np.arange(samples)
    if batching.order == "shuffled":
        order = np.random.default_rng(batching.seed).permutation(samples)
    return [order[start : start + batch] for start in range(0, samples - batch + 1, batch)]


def _draw(trace: Trace, batching: Batching, batches: int) -> list[np.ndarray]:
    """Return the indices of the samples of every batch, drawn with replacement."""
    if batching.batch_size is None:
        raise ValueError(
            f"bootstrap={batches} needs batch_size, the number of samples to draw for each batch"
        )
    check_integer("bootstrap", batches, least=1)
    check_integer("batch_size", batching.batch_size, least=1)
    check_drawn(trace, batching.batch_size, batches=batches)
    rng = np.random.default_rng(batching.seed)
    drawn = [bootstrap_samples(trace.domain, batching.batch_size, rng) for _ in range(batches)]
    return [rng.permutation(part) for part in drawn] if batching.order == "shuffled" else drawn


def _count_micro_batches(batching: Batching, tokens: list[np.ndarray], topology: Topology) -> int:
    """Return the number of micro-batches of every batch. With a token budget, the fullest batch determines it."""
    micro_batches, budget = batching.micro_batches, batching.token_budget
    fewest = min(map(len, tokens))
    if micro_batches is not None and budget is not None:
        raise ValueError(
            f"micro_batches={micro_batches} and token_budget={budget} exclude each other: give only one"
        )
    if budget is not None:
        check_integer("token_budget", budget, least=1)
        if budget < (longest := max(each.max() for each in tokens)):
            raise ValueError(f"token_budget={budget} is less than the {longest} tokens of the longest sample")
        return max(micro_batches_for(each, topology, tokens_per_rank=budget) for each in tokens)
    if micro_batches is None:
        return max(1, fewest // (SAMPLES_PER_RANK * topology.num_ranks))
    check_integer("micro_batches", micro_batches, least=1)
    if micro_batches > fewest:
        raise ValueError(f"micro_batches={micro_batches} exceeds the {fewest} samples of a batch")
    return micro_batches
