"""A trace cut into batches, as a trainer would meet them, and their samples packed over ranks and micro-batches."""

from typing import Final, NamedTuple

import numpy as np

from relibra_jax.cli.options import Batching
from relibra_jax.limits import check_integer, check_seed
from relibra_jax.planning.sample_packing import micro_batches_for, pack_samples
from relibra_jax.traces.bootstrap import bootstrap_samples, check_drawn
from relibra_jax.traces.trace import Trace
from relibra_jax.types import Assignment, RoutingReplay, Topology

SAMPLES_PER_RANK: Final = 4
"""The mean samples of a rank in a micro-batch, unless told: enough for packing to be even to 1% on recorded lengths."""


class Batches(NamedTuple):
    """The batches of a trace."""

    replays: list[RoutingReplay]
    """The routing of each batch."""
    packed: list[Assignment]
    """The samples of each batch, longest first to the lightest rank, with the same room in all batches."""
    num_micro_batches: int
    """The micro-batches of one batch."""
    history: int
    """How many batches at the start are planned but not measured: 1 where there are two or more, else 0."""
    samples_left: int
    """The samples at the end of the trace that do not fill a batch; none where batches are drawn."""


def make_batches(trace: Trace, batching: Batching, topology: Topology) -> Batches:
    """Cut a trace into batches, and pack their samples.

    Args:
        trace: the trace, whose samples are used once each, or drawn with replacement if ``batching.bootstrap`` says so.
        batching: the sizes, and the order of samples.
        topology: the expert-parallel group over whose ranks samples are packed.

    Raises:
        ValueError: if the sizes do not fit each other or the trace, the trace has no tokens, `check_seed` refuses the
            seed, or the drawn batches do not fit this machine's memory.
    """
    check_seed("seed", batching.seed)
    samples = len(trace.replay.mask)
    if not trace.replay.mask.any():
        raise ValueError(f"{trace.name} has no tokens in its {samples} samples: there is no load to balance")
    if batching.bootstrap is None:
        chosen = _cut(samples, batching, trace.name)
    else:
        chosen = _draw(trace, batching, batching.bootstrap)
    tokens = [np.asarray(trace.replay.mask[part]).sum(1) for part in chosen]
    micro_batches = _count_micro_batches(batching, tokens, topology)
    room = max(
        pack_samples(each, topology, num_micro_batches=micro_batches).sample.shape[-1] for each in tokens
    )
    return Batches(
        [RoutingReplay(trace.replay.expert_ids[part], trace.replay.mask[part]) for part in chosen],
        [
            pack_samples(each, topology, num_micro_batches=micro_batches, samples_per_rank=room)
            for each in tokens
        ],
        micro_batches,
        int(len(chosen) > 1),
        0 if batching.bootstrap is not None else samples - sum(map(len, chosen)),
    )


def _cut(samples: int, batching: Batching, name: str) -> list[np.ndarray]:
    """The samples of every batch, each sample used once."""
    batch = max(1, samples // 2) if batching.batch_size is None else batching.batch_size
    check_integer("batch_size", batch, least=1)
    if batch > samples:
        raise ValueError(
            f"batch_size={batch} exceeds the {samples} samples of {name}; bootstrap draws them with replacement"
        )
    order = np.arange(samples)
    if batching.order == "shuffled":
        order = np.random.default_rng(batching.seed).permutation(samples)
    return [order[start : start + batch] for start in range(0, samples - batch + 1, batch)]


def _draw(trace: Trace, batching: Batching, batches: int) -> list[np.ndarray]:
    """The samples of every batch, drawn with replacement."""
    if batching.batch_size is None:
        raise ValueError(f"bootstrap={batches} needs batch_size, the samples of each batch to draw")
    check_integer("bootstrap", batches, least=1)
    check_integer("batch_size", batching.batch_size, least=1)
    check_drawn(trace, batching.batch_size, batches=batches)
    rng = np.random.default_rng(batching.seed)
    drawn = [bootstrap_samples(trace.domain, batching.batch_size, rng) for _ in range(batches)]
    return [rng.permutation(part) for part in drawn] if batching.order == "shuffled" else drawn


def _count_micro_batches(batching: Batching, tokens: list[np.ndarray], topology: Topology) -> int:
    """The micro-batches of every batch, as many as the fullest needs."""
    given, budget = batching.micro_batches, batching.token_budget
    if given is not None and budget is not None:
        raise ValueError(f"micro_batches={given} and token_budget={budget}: give one of them")
    if budget is not None:
        check_integer("token_budget", budget, least=1)
        if budget < (longest := max(each.max() for each in tokens)):
            raise ValueError(f"token_budget={budget} is less than the {longest} tokens of the longest sample")
        return max(micro_batches_for(each, topology, tokens_per_rank=budget) for each in tokens)
    if given is None:
        return max(1, len(tokens[0]) // (SAMPLES_PER_RANK * topology.num_ranks))
    check_integer("micro_batches", given, least=1)
    if given > len(tokens[0]):
        raise ValueError(f"micro_batches={given} exceeds the {len(tokens[0])} samples of a batch")
    return given
