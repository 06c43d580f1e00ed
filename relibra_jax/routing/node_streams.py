"""Split sequences: the samples of a node lie one after another in one stream, which its local ranks share.

If every rank holds whole samples, a sample that is longer than a rank's share of the tokens makes all other ranks wait.
Only attention needs whole samples. So with split sequences, the samples of a node follow one another in a *stream*,
which is cut into chunks of equal length: local rank g has the chunks g, G + g, 2 G + g, ... Every rank then has equally
many tokens. It has about an equal share of attention too, because the later chunks of a long sample, which attend to
more tokens, go to all ranks in turn. Ranks that had one run of the stream each would wait for the one with the end of
the longest sample. (Striped Attention, arXiv 2311.09431, deals single tokens; chunks keep attention in blocks.)

A rank has one sequence of ``T`` positions, its chunks in their order. `lay_out_streams` lays out the samples on the
host, and `relibra_jax.execution.node_streams` puts chunks in the order of the stream on devices.
"""

from typing import Final

import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, Assignment
from relibra_jax.routing.sequence_packing import SequenceLayout, sequence_length

CHUNK: Final = 256
"""The number of positions of a chunk, if a rank has more than that: the block of attention. With log-normal lengths
(median 4,096) on nodes of 8 ranks with 8,192 tokens each, the busiest rank of a node has 5% more attention than the
mean; it is 10% with chunks of 512, and 165% with one run of the stream for each rank."""


def chunk_length(length: int) -> int:
    """Return the number of positions of a chunk, for ranks with ``length`` positions.

    Args:
        length: T, the number of positions of a rank: a multiple of `CHUNK`, or fewer, which are a single chunk.

    Raises:
        ValueError: if ``length`` is neither.
    """
    if length > CHUNK and length % CHUNK:
        raise ValueError(f"split sequences of {length} positions must be a multiple of {CHUNK} positions")
    return min(length, CHUNK)


def lay_out_streams(
    assignment: Assignment,
    lengths: Int[Array, " B"],
    *,
    align: int = 1,
) -> SequenceLayout:
    """Lay out the samples of every node in its stream, longest first, and cut it over the local ranks. On the host.

    Args:
        assignment: the samples of each node in each micro-batch, in the entries of its ranks in any order.
        lengths: the number of tokens of each sample.
        align: the number of positions that divides T (`ExpertParallel.aligned_positions`).

    Returns:
        The layout, with one sequence of T positions for each rank, which hold the tokens of every node.

    Raises:
        ValueError: if ``align`` does not divide `CHUNK` where sequences are longer.

    >>> layout = lay_out_streams(Assignment(np.array([[[[1], [-1]]]])), np.array([9, 3]))
    >>> layout.sample[0, 0, :, 0].tolist(), layout.position[0, 0, :, 0].tolist()
    ([[1, 1], [1, -1]], [[0, 1], [2, 0]])
    """
    lengths, sample = np.asarray(lengths), np.asarray(assignment.sample)
    *nodes, local, places = sample.shape
    tokens = np.append(lengths, 0)[sample].sum((-2, -1))
    share = -(-int(tokens.max(initial=1)) // local)
    # A share that fits into one chunk is not rounded up beyond it.
    length = min(sequence_length(share, align), max(-(-share // align) * align, CHUNK // align * align))
    if length > CHUNK:
        if CHUNK % align:
            raise ValueError(
                f"aligned positions {align} must divide the {CHUNK} positions of a chunk of split sequences"
            )
        length = sequence_length(share, CHUNK)
    of_stream = np.full((tokens.size, local * length), EMPTY, np.int32)
    positions = np.zeros_like(of_stream)
    for node, samples in enumerate(sample.reshape(-1, local * places)):
        samples = samples[samples != EMPTY]
        samples = samples[np.argsort(-lengths[samples], kind="stable")]
        real = lengths[samples].sum()
        of_stream[node, :real] = np.repeat(samples, lengths[samples])
        starts = np.cumsum(lengths[samples]) - lengths[samples]
        positions[node, :real] = np.arange(real) - np.repeat(starts, lengths[samples])

    def cut(stream: Int[np.ndarray, "nodes stream"]) -> Int[np.ndarray, "M N G 1 T"]:
        chunks = stream.reshape(len(stream), -1, local, chunk_length(length))
        return chunks.swapaxes(1, 2).reshape(*nodes, local, 1, length)

    return SequenceLayout(cut(of_stream), cut(positions))
