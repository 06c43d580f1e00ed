"""Sample packing: even in tokens and blind to experts, the layout that trainers start from.

Every pair of a micro-batch and a rank is a bin that takes any number of samples. Samples go longest first to the
lightest of all bins of the batch (list scheduling, LPT: R. L. Graham, "Bounds on multiprocessing timing anomalies",
1969), so no bin holds more than the mean and one longest sample. Attention and memory then wait for nobody, and what
planners make of the layout is what they are worth.
"""

import bisect
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.limits import check_integer
from relibra_jax.planning.packing import lightest_pack
from relibra_jax.types import EMPTY, Array, Assignment, Topology


def pack_samples(
    tokens: Int[Array, " B"],
    topology: Topology,
    *,
    num_micro_batches: int,
    samples_per_rank: int | None = None,
) -> Assignment:
    """Give every sample, longest first, to the lightest micro-batch and rank, whatever its experts.

    Of equally long samples the first in the batch goes first. Of equally light bins the first takes it: ranks in
    flat order inside micro-batches in order. A sample without tokens counts as one token, so that such samples spread.

    Args:
        tokens: the length of each sample. Concrete lengths are packed on the host, traced ones in the program, alike.
        topology: the expert-parallel group, which gives N and G.
        num_micro_batches: M.
        samples_per_rank: b, the room of a bin. None makes it the largest number of samples in a bin, so that the shape
            follows the lengths: give it to keep compiled steps. Where lengths are traced, None is four times the mean
            number of samples in a bin, rounded up, and at most B; a bin that is full takes no more.

    Returns:
        An Assignment of int32; the samples of a rank come longest first, EMPTY comes last.

    Raises:
        ValueError: if there is no micro-batch, there are fewer samples than micro-batches, or too little room for all.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> pack_samples(np.array([9, 1, 5, 4, 3]), topology, num_micro_batches=1).sample.tolist()
    [[[[0, 4, -1], [2, 3, 1]]]]
    """
    samples, bins = len(tokens), _num_bins(len(tokens), topology, num_micro_batches)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    traced = isinstance(tokens, jax.core.Tracer)
    room = samples_per_rank
    if room is None:
        room = min(samples, 4 * -(-samples // bins)) if traced else samples
    else:
        check_room(samples, topology, num_micro_batches, room)
    if traced:
        which, position = lightest_pack(jnp.maximum(tokens, 1), jnp.zeros(bins, jnp.float32), room=room)
        number = jnp.arange(samples, dtype=jnp.int32)
        sample = jnp.full((bins, room), EMPTY, jnp.int32).at[which, position].set(number)
        return Assignment(sample.reshape(num_micro_batches, nodes, local, room))
    which, position = _pack_on_host(tokens, bins, room)
    if samples_per_rank is None:
        room = int(position.max()) + 1
    packed = np.full((bins, room), EMPTY, np.int32)
    packed[which, position] = np.arange(samples)
    return Assignment(packed.reshape(num_micro_batches, nodes, local, room))


def micro_batches_for(tokens: Int[Array, " B"], topology: Topology, *, tokens_per_rank: int) -> int:
    """The smallest number of micro-batches for which `pack_samples` keeps every rank within a budget of tokens.

    Runs on the host.

    Args:
        tokens: the length of each sample.
        topology: the expert-parallel group, which gives the number of ranks.
        tokens_per_rank: the most tokens that a rank may hold in one micro-batch.

    Returns:
        M, at least 1 and at most B.

    Raises:
        ValueError: if there is no sample, or one is longer than the budget.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> micro_batches_for(np.array([9, 1, 5, 4, 3]), topology, tokens_per_rank=10)
    2
    """
    check_integer("tokens_per_rank", tokens_per_rank, least=1)
    lengths, ranks = np.asarray(tokens), topology.num_ranks
    if not lengths.size:
        raise ValueError("there are no samples to pack")
    if lengths.max() > tokens_per_rank:
        raise ValueError(
            f"sample {lengths.argmax()} has {lengths.max()} tokens, more than tokens_per_rank={tokens_per_rank}"
        )
    fewest = max(1, -(-int(lengths.sum(dtype=np.int64)) // (ranks * tokens_per_rank)))

    def fits(num_micro_batches):
        bins = num_micro_batches * ranks
        which, _ = _pack_on_host(lengths, bins, lengths.size)
        return np.bincount(which, lengths, bins).max() <= tokens_per_rank

    # With a further bin the i-th fullest is never fuller, sample by sample; with M = B every sample has its own.
    return fewest + bisect.bisect_left(range(fewest, lengths.size), True, key=fits)


def check_micro_batches(samples: int, num_micro_batches: int) -> None:
    """Raise ValueError unless there is a micro-batch, and a sample for each."""
    if not 1 <= num_micro_batches <= samples:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} must be at least 1 and at most {samples} samples"
        )


def check_room(samples: int, topology: Topology, num_micro_batches: int, samples_per_rank: int) -> None:
    """Raise ValueError unless ranks have room for all samples."""
    if num_micro_batches * topology.num_ranks * samples_per_rank < samples:
        raise ValueError(
            f"{samples} samples need more than samples_per_rank={samples_per_rank} on {topology.num_ranks} ranks"
            f" in {num_micro_batches} micro-batches"
        )


def _num_bins(samples: int, topology: Topology, num_micro_batches: int) -> int:
    check_micro_batches(samples, num_micro_batches)
    return num_micro_batches * topology.num_ranks


def _pack_on_host(lengths, bins, room):
    """`lightest_pack` of NumPy arrays, by a heap: the same bins and positions."""
    lengths = np.maximum(np.asarray(lengths), 1).astype(np.float32)
    which, position = np.empty(lengths.size, np.int32), np.empty(lengths.size, np.int32)
    heap, count = [(np.float32(0), number) for number in range(bins)], [0] * bins
    for item in np.argsort(-lengths, kind="stable").tolist():
        total, number = heapq.heappop(heap)
        which[item], position[item] = number, count[number]
        count[number] += 1
        if count[number] < room:
            heapq.heappush(heap, (total + lengths[item], number))
    return which, position
