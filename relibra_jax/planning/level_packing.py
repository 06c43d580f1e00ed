"""Sample packing for attention: long samples share micro-batches, so that their ranks wait for each other least.

A micro-batch lasts as long as its busiest rank, and a sample cannot be divided, so the rank of a sample that is longer
than an even share makes all others wait. If the other ranks have samples as long, they do not wait. Micro-batches are
therefore filled one after another. The longest sample that is left opens the next one, and limits the attention of its
ranks: to its own squared length, or to a *level* that all micro-batches share if that is more. Samples go, longest
first, to the rank with the fewest tokens among those of open micro-batches that stay below their limit. High levels
spread long samples, as packing by tokens does, and low levels group them. Of several levels, the one with the least
attention is taken.

This is list scheduling (R. L. Graham, 1969) with limits that a search sets, as in MULTIFIT (E. G. Coffman, M. R. Garey,
D. S. Johnson, "An application of bin-packing to multiprocessor scheduling", 1978).
"""

from typing import Final

import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.types import EMPTY, Array, Assignment, Topology
from relibra_jax.planning.sample_packing import check_micro_batches, check_room

LEVELS: Final = (0.25, 0.45, 0.7, 0.95, 1.2, 1.6)
"""The levels to try, as multiples of the mean squared length of a rank in a micro-batch. Twelve levels gained 0.1% of
attention."""


def pack_by_level(
    lengths: Int[Array, " B"],
    topology: Topology,
    *,
    num_micro_batches: int,
    tokens_per_rank: int,
    samples_per_rank: int,
) -> Assignment | None:
    """Pack samples so that attention of the busiest ranks, summed over micro-batches, takes little time.

    Runs on the host.

    Args:
        lengths: the number of tokens of each sample.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.
        tokens_per_rank: the most tokens of a rank in a micro-batch.
        samples_per_rank: b, the most samples of a rank in a micro-batch.

    Returns:
        An Assignment of int32, in which the samples of a rank are ordered longest first and EMPTY comes last. None if
        no level keeps within the most tokens.

    Raises:
        ValueError: if ``num_micro_batches`` is below 1 or above the number of samples, or if ``samples_per_rank`` is
            too small to hold all samples.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> limits = {"tokens_per_rank": 10, "samples_per_rank": 4}
    >>> pack_by_level(np.array([9, 9, 3, 2, 3, 2]), topology, num_micro_batches=2, **limits).sample.tolist()
    [[[[0, -1, -1, -1], [1, -1, -1, -1]]], [[[2, 3, -1, -1], [4, 5, -1, -1]]]]
    """
    samples, ranks = len(lengths), topology.num_ranks
    check_micro_batches(samples, num_micro_batches)
    check_room(samples, topology, num_micro_batches, samples_per_rank)
    tokens = np.maximum(np.asarray(lengths, float), 1)
    order = np.argsort(-tokens, kind="stable")
    bins = num_micro_batches * ranks
    levels = np.array(LEVELS) * (tokens**2).sum() / bins
    packings = _pack(tokens[order], levels, num_micro_batches, ranks, tokens_per_rank, samples_per_rank)
    best = None
    for bin_of in packings:
        if np.bincount(bin_of, tokens[order], bins).max() > tokens_per_rank:
            continue
        squares = np.bincount(bin_of, tokens[order] ** 2, bins).reshape(num_micro_batches, ranks)
        attention = squares.max(1).sum()
        if best is None or attention < best[0]:
            best = attention, bin_of
    if best is None:
        return None
    by_bin = np.argsort(best[1], kind="stable")
    bin_of = best[1][by_bin]
    sample = np.full((bins, samples_per_rank), EMPTY, np.int32)
    sample[bin_of, np.arange(samples) - np.searchsorted(bin_of, bin_of)] = order[by_bin]
    grid = (num_micro_batches, topology.num_nodes, topology.ranks_per_node, samples_per_rank)
    return Assignment(sample.reshape(grid))


def _pack(
    tokens: Float[np.ndarray, " B"],
    levels: Float[np.ndarray, " K"],
    micro_batches: int,
    ranks: int,
    most_tokens: int,
    most_samples: int,
) -> Int[np.ndarray, "K B"]:
    """Return the bin of each sample, in descending order of tokens, at every level."""
    row, bins = np.arange(len(levels)), micro_batches * ranks
    held, count = np.zeros((len(levels), bins)), np.zeros((len(levels), bins), int)
    left = np.full(
        (len(levels), bins), -1.0
    )  # squared tokens below the limit; a closed micro-batch has none left
    opened = np.zeros(len(levels), int)
    packed = np.empty((len(levels), len(tokens)), int)
    for number, length in enumerate(tokens):
        square, open_bins = length**2, max(opened.max(), 1) * ranks
        fits = (left[:, :open_bins] >= square) & (held[:, :open_bins] <= most_tokens - length)
        room = np.where(fits, held[:, :open_bins], np.inf)
        chosen = room.argmin(1)
        for k in np.flatnonzero(room[row, chosen] == np.inf):
            first = opened[k] * ranks
            if opened[k] < micro_batches:
                left[k, first : first + ranks] = max(levels[k], square)
                opened[k] += 1
                chosen[k] = first
                continue
            # Where the limit rises least; if no rank has room, the lightest takes too many tokens, which rules out
            # this level.
            room_left = np.where(held[k] <= most_tokens - length, left[k], -np.inf)
            chosen[k] = room_left.argmax() if room_left.max() > -np.inf else held[k].argmin()
            first = chosen[k] // ranks * ranks
            left[k, first : first + ranks] += max(square - left[k, chosen[k]], 0)
        packed[:, number] = chosen
        held[row, chosen] += length
        left[row, chosen] -= square
        count[row, chosen] += 1
        full = np.flatnonzero(count[row, chosen] == most_samples)
        held[full, chosen[full]] = np.inf
    return packed
