"""Sample packing: assign samples to ranks by token count alone, as trainers do by default.

Every pair of a micro-batch and a rank is a bin that takes any number of samples. Samples go, longest first, to the
lightest of all bins of the batch (list scheduling, LPT: R. L. Graham, "Bounds on multiprocessing timing anomalies",
1969). So no bin holds more than the mean plus one longest sample, and attention time and memory are even. Planners are
measured by their improvement on this assignment.
"""

import bisect
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, Assignment, Topology
from relibra_jax.planning.packing import lightest_pack
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer


@checks_arguments
def pack_samples(
    lengths: Int[Array, " B"],
    topology: Topology,
    *,
    num_micro_batches: int,
    samples_per_rank: int | None = None,
) -> Assignment:
    """Give every sample, longest first, to the lightest micro-batch and rank, regardless of its experts.

    Of equally long samples, the first in the batch goes first. Of equally light bins, the first takes the sample; bins
    are ordered by micro-batch, then by flat rank. A sample without tokens counts as one token, so that such samples
    spread.

    Args:
        lengths: the number of tokens of each sample. Concrete lengths are packed on the host and traced lengths in the
            program, with the same result.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.
        samples_per_rank: b, the number of sample positions of a bin. None takes the largest number of samples in a bin,
            so the shape depends on the lengths; pass a number to avoid recompilation. For traced lengths, None is four
            times the mean number of samples in a bin, rounded up, and at most B. A full bin takes no more samples.

    Returns:
        An Assignment of int32; the samples of a rank are ordered longest first, EMPTY comes last.

    Raises:
        ValueError: if ``num_micro_batches`` is below 1 or above the number of samples, or if ``samples_per_rank`` is
            too small to hold all samples.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> pack_samples(np.array([9, 1, 5, 4, 3]), topology, num_micro_batches=1).sample.tolist()
    [[[[0, 4, -1], [2, 3, 1]]]]
    """
    samples, bins = len(lengths), _num_bins(len(lengths), topology, num_micro_batches)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    traced = isinstance(lengths, jax.core.Tracer)
    positions = samples_per_rank
    if positions is None:
        positions = min(samples, 4 * -(-samples // bins)) if traced else samples
    else:
        check_room(samples, topology, num_micro_batches, positions)
    if traced:
        bins_of_samples, position = lightest_pack(
            jnp.maximum(lengths, 1), jnp.zeros(bins, jnp.float32), capacity=positions
        )
        index = jnp.arange(samples, dtype=jnp.int32)
        sample = jnp.full((bins, positions), EMPTY, jnp.int32).at[bins_of_samples, position].set(index)
        return Assignment(sample.reshape(num_micro_batches, nodes, local, positions))
    bins_of_samples, position = _pack_on_host(lengths, bins, positions)
    if samples_per_rank is None:
        positions = int(position.max()) + 1
    sample_at = np.full((bins, positions), EMPTY, np.int32)
    sample_at[bins_of_samples, position] = np.arange(samples)
    return Assignment(sample_at.reshape(num_micro_batches, nodes, local, positions))


@checks_arguments
def micro_batches_for(lengths: Int[Array, " B"], topology: Topology, *, tokens_per_rank: int) -> int:
    """Return the smallest number of micro-batches for which `pack_samples` keeps every rank within a token budget.

    Runs on the host.

    Args:
        lengths: the number of tokens of each sample.
        topology: the expert-parallel group.
        tokens_per_rank: the most tokens that a rank may hold in one micro-batch.

    Returns:
        M, the number of micro-batches, at least 1 and at most B.

    Raises:
        ValueError: if there is no sample, if a sample is longer than the budget, or if ``tokens_per_rank`` is below 1.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> micro_batches_for(np.array([9, 1, 5, 4, 3]), topology, tokens_per_rank=10)
    2
    """
    check_integer("tokens_per_rank", tokens_per_rank, least=1)
    lengths, ranks = np.asarray(lengths), topology.num_ranks
    if not lengths.size:
        raise ValueError("lengths is empty: there must be at least one sample")
    if lengths.max() > tokens_per_rank:
        raise ValueError(
            f"sample {lengths.argmax()} has {lengths.max()} tokens, more than tokens_per_rank={tokens_per_rank}"
        )
    fewest = max(1, -(-int(lengths.sum(dtype=np.int64)) // (ranks * tokens_per_rank)))

    def fits(num_micro_batches):
        bins = num_micro_batches * ranks
        bins_of_samples, _ = _pack_on_host(lengths, bins, lengths.size)
        return np.bincount(bins_of_samples, lengths, bins).max() <= tokens_per_rank

    # More bins never make the i-th fullest bin fuller, so bisection is valid. With M = B every sample has its own bin.
    return fewest + bisect.bisect_left(range(fewest, lengths.size), True, key=fits)


def check_micro_batches(samples: int, num_micro_batches: int) -> None:
    """Raise ValueError unless there is at least one micro-batch and at least one sample for each."""
    if not 1 <= num_micro_batches <= samples:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} must be at least 1 and at most {samples} samples"
        )


def check_room(samples: int, topology: Topology, num_micro_batches: int, samples_per_rank: int) -> None:
    """Raise ValueError unless the ranks have positions for all samples."""
    if num_micro_batches * topology.num_ranks * samples_per_rank < samples:
        raise ValueError(
            f"samples_per_rank={samples_per_rank} is too small for {samples} samples on {topology.num_ranks} ranks"
            f" in {num_micro_batches} micro-batches"
        )


def _num_bins(samples: int, topology: Topology, num_micro_batches: int) -> int:
    check_micro_batches(samples, num_micro_batches)
    return num_micro_batches * topology.num_ranks


def _pack_on_host(lengths, bins, positions):
    """Compute `lightest_pack` for NumPy arrays with a heap; the bins and positions are the same."""
    lengths = np.maximum(np.asarray(lengths), 1).astype(np.float32)
    bins_of_samples, position = np.empty(lengths.size, np.int32), np.empty(lengths.size, np.int32)
    heap, count = [(np.float32(0), number) for number in range(bins)], [0] * bins
    for item in np.argsort(-lengths, kind="stable").tolist():
        total, number = heapq.heappop(heap)
        bins_of_samples[item], position[item] = number, count[number]
        count[number] += 1
        if count[number] < positions:
            heapq.heappush(heap, (total + lengths[item], number))
    return bins_of_samples, position
