"""Loads like those of inference, from the samples of a trace: whole samples, or one token of each at a time."""

import dataclasses
from typing import Final

import numpy as np

from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.evaluation.batches import Batches, make_batches
from relibra_jax.evaluation.settings import Batching
from relibra_jax.traces.trace import Trace

PREFILLS: Final = 4
"""The number of micro-batches of a batch of prefill."""
STEPS: Final = 16
"""The number of decoding steps of a batch, each of which is a micro-batch."""
MOST_SEQUENCES: Final = 256
"""The most sequences that are decoded together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Two batches of one kind of load: one from which predictors learn, and one that is measured."""

    name: str
    """``prefill-like`` or ``decode-like``."""
    batches: Batches
    """The batches."""
    tokens_per_rank: float
    """The tokens of a rank in a micro-batch, to which the trace is scaled."""
    context: float | None = None
    """The tokens in the cache of each sequence; None if tokens attend to their own sample, without a cache."""


def prefill_like(trace: Trace, topology: Topology, *, tokens_per_rank: float, seed: int) -> Load:
    """Make a load of whole samples: half of the trace in each batch, in shuffled order.

    Args:
        trace: the trace.
        topology: the expert-parallel group.
        tokens_per_rank: the tokens of a rank in a micro-batch.
        seed: the seed of the order.

    Raises:
        ValueError: if the trace has too few samples.
    """
    batching = Batching(micro_batches=PREFILLS, order="shuffled", seed=seed)
    return Load(
        name="prefill-like", batches=make_batches(trace, batching, topology), tokens_per_rank=tokens_per_rank
    )


def decode_like(trace: Trace, topology: Topology, *, tokens_per_rank: float, context: float) -> Load:
    """Make a load of decoding steps, with one token of each of the longest samples in every step.

    The steps follow one another, in the middle of the shortest of these samples. A sample stays on its rank. The first
    half of the steps is the batch from which predictors learn.

    Args:
        trace: the trace.
        topology: the expert-parallel group.
        tokens_per_rank: the sequences of a rank.
        context: the tokens in the cache of each sequence.

    Raises:
        ValueError: if the trace has fewer samples with enough tokens than ranks.
    """
    ids, mask = (np.asarray(array) for array in trace.replay)
    ranks, lengths = topology.num_ranks, mask.sum(1)
    longest = np.argsort(-lengths, kind="stable")[:MOST_SEQUENCES]
    longest = longest[lengths[longest] >= 2 * STEPS]
    longest = longest[: len(longest) // ranks * ranks]
    if not len(longest):
        raise ValueError(
            f"{trace.name} has fewer than {ranks} samples of at least {2 * STEPS} tokens, so it has no steps of"
            f" decoding for {ranks} ranks"
        )
    first = int(lengths[longest].min()) // 2 - STEPS
    # Samples of one token are dealt to micro-batches and their ranks in turn (`pack_samples`): [sequence, step, rank].
    tokens = np.stack([ids[one][mask[one]][first : first + 2 * STEPS] for one in longest])
    by_rank = tokens.reshape(ranks, -1, 2, STEPS, *ids.shape[2:]).transpose(2, 1, 3, 0, 4, 5)
    replays = [
        RoutingReplay(batch.reshape(-1, 1, *ids.shape[2:]), np.ones((longest.size * STEPS, 1), bool))
        for batch in by_rank
    ]
    batches = Batches(replays, num_micro_batches=STEPS, history=1, samples_left=0)
    return Load(name="decode-like", batches=batches, tokens_per_rank=tokens_per_rank, context=context)
