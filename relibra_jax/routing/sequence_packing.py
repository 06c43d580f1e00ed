"""Packing of several samples into each sequence, so that the computed positions are the tokens that the plan counted.

A *sequence* is a line of the training batch ``[sequences, T]``. Packed sequences hold several samples one after
another, padded sequences hold one sample each. A rank has one packed sequence in each micro-batch, with its samples
longest first. All sequences of a batch have one length, for which steps are compiled, so lengths are rounded up to one
of a few (`sequence_length`).
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan, RoutingReplay

STEPS: Final = 16
"""The number of lengths from one power of two to the next. More would need less padding, 1/16 at most, and compile more
often while responses grow."""


class SequenceLayout(NamedTuple):
    """The token at every position of the sequences: in every micro-batch, each rank has r sequences of T positions."""

    sample: Int[np.ndarray, "M N G r T"]
    """The sample of each position, as an index into the batch; EMPTY for padding. It is also the segment id: a token
    attends only to tokens of its own sample."""
    position: Int[np.ndarray, "M N G r T"]
    """The position of the token in its sample; 0 for padding."""


def lay_out_sequences(
    assignment: Assignment,
    lengths: Int[Array, " B"],
    *,
    align: int = 1,
) -> SequenceLayout:
    """Pack the samples of every rank into one sequence. Runs on the host.

    Args:
        assignment: the samples that each rank holds in each micro-batch.
        lengths: the number of tokens of each sample.
        align: the number of positions that divides the start of each sample and the length of sequences:
            `relibra_jax.execution.ExpertParallel.aligned_positions`.

    Returns:
        The layout. In each sequence the samples follow one another, apart from alignment, and padding comes last.

    Raises:
        ValueError: if an assigned sample has no entry in ``lengths``.

    >>> assignment = Assignment(np.array([[[[0, 1, 2], [3, -1, -1]]]]))
    >>> layout = lay_out_sequences(assignment, np.array([2, 3, 1, 6]))
    >>> layout.sample[0, 0, :, 0].tolist()
    [[1, 1, 1, 0, 0, 2], [3, 3, 3, 3, 3, 3]]
    """
    lengths, of_ranks = np.asarray(lengths), np.asarray(assignment.sample)
    if of_ranks.max(initial=EMPTY) >= len(lengths):
        raise ValueError(
            f"the assignment has sample {of_ranks.max()}, but lengths has only {len(lengths)} entries"
        )
    rooms = -(-lengths // align) * align
    tokens = np.append(rooms, 0)[of_ranks].sum(-1)
    length = sequence_length(int(tokens.max(initial=1)), align)
    sample = np.full((tokens.size, length), EMPTY, np.int32)
    position = np.zeros_like(sample)
    for rank, samples in enumerate(of_ranks.reshape(-1, of_ranks.shape[-1])):
        begin = 0
        for index in sorted(samples[samples != EMPTY], key=lambda index: -rooms[index]):
            end = begin + int(lengths[index])
            sample[rank, begin:end] = index
            position[rank, begin:end] = np.arange(end - begin)
            begin += int(rooms[index])
    places = (*tokens.shape, 1, length)
    return SequenceLayout(sample.reshape(places), position.reshape(places))


def sequence_length(tokens: int, align: int) -> int:
    """Return the length of packed sequences: one of `STEPS` between two powers of two, or fewer for large ``align``.

    Args:
        tokens: the number of tokens of the fullest rank.
        align: the number of positions that divides the length.

    >>> sequence_length(100, 1), sequence_length(8100, 256), sequence_length(130, 24)
    (100, 8192, 144)
    """
    step = max(2 ** (tokens.bit_length() - 1) // STEPS, 1)
    step = -(-step // align) * align
    return max(-(-tokens // step), 1) * step


def in_sequences(
    replay: RoutingReplay, batch_plan: BatchPlan, layout: SequenceLayout
) -> tuple[RoutingReplay, BatchPlan]:
    """Return a batch and its plan as if every sequence were a sample, for counts of what each rank has. On the host.

    Args:
        replay: the routing of the samples.
        batch_plan: the plan, whose load and quotas stay as they are.
        layout: the sequences of all ranks, with EMPTY for tokens of samples that ``replay`` does not have.

    Returns:
        The routing of the sequences that have tokens, a copy, and the plan with the assignment of them; EMPTY for
        sequences without tokens.
    """
    filled = (layout.sample != EMPTY).any(-1)
    sample, position = layout.sample[filled], layout.position[filled]
    ids = np.asarray(replay.expert_ids)[np.maximum(sample, 0), position]
    numbers = np.where(filled, np.cumsum(filled).reshape(filled.shape) - 1, EMPTY).astype(np.int32)
    return RoutingReplay(ids, sample != EMPTY), batch_plan._replace(assignment=Assignment(numbers))
