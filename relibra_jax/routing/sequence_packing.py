"""Packing of several samples into each sequence, so that the computed positions are the tokens that the plan counted.

A *sequence* is a line of the training batch ``[sequences, T]``. Packed sequences hold several samples one after
another, padded sequences hold one sample each. A rank's samples of a micro-batch are placed longest first, each into
the emptiest sequence (LPT, as in `relibra_jax.planning.sample_packing`). All sequences of a batch have one shape. With
more sequences per rank, sequences are shorter and attention costs less, but more positions are padding.
`lay_out_sequences` uses the largest number of sequences whose padding stays below the limit.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan, RoutingReplay

LEAST_FILL: Final = 0.95
"""The default for the smallest allowed share of positions that hold tokens."""


class SequenceLayout(NamedTuple):
    """The token at every position of the sequences: in every micro-batch, each rank has r sequences of T positions."""

    sample: Int[np.ndarray, "M N G r T"]
    """The sample of each position, as an index into the batch; EMPTY for padding. It is also the segment id: a token
    attends only to tokens of its own sample."""
    position: Int[np.ndarray, "M N G r T"]
    """The position of the token in its sample; 0 for padding."""

    @property
    def fill(self) -> float:
        """The share of positions that hold tokens."""
        return float((self.sample != EMPTY).mean())

    @property
    def shape(self) -> tuple[int, int]:
        """``(r, T)``, the part of the layout on which compiled steps depend."""
        sequences, length = self.sample.shape[-2:]
        return sequences, length


def lay_out_sequences(
    assignment: Assignment,
    lengths: Int[Array, " B"],
    *,
    least_fill: float = LEAST_FILL,
    shape: tuple[int, int] | None = None,
    align: int = 1,
) -> SequenceLayout:
    """Pack the samples of every rank into sequences. Runs on the host.

    Args:
        assignment: the samples that each rank holds in each micro-batch.
        lengths: the number of tokens of each sample.
        least_fill: the smallest allowed share of positions that hold tokens. If no number of sequences reaches it, each
            rank gets one sequence, whose padding is then due to the uneven assignment.
        shape: the ``(r, T)`` of an earlier batch. It is kept if the samples fit and fill the sequences enough, so that
            compiled steps can be reused.
        align: the number of positions of whose multiples one is the start of each sample, and one the length of
            sequences: `relibra_jax.execution.ExpertParallel.aligned_positions`.

    Returns:
        The layout. In each sequence the samples follow one another, apart from alignment, and padding comes last.

    Raises:
        ValueError: if ``least_fill`` is not above 0 and at most 1, or if an assigned sample has no entry in
            ``lengths``.

    >>> assignment = Assignment(np.array([[[[0, 1, 2], [3, -1, -1]]]]))
    >>> layout = lay_out_sequences(assignment, np.array([2, 3, 1, 6]))
    >>> layout.sample[0, 0, :, 0].tolist(), layout.fill
    ([[1, 1, 1, 0, 0, 2], [3, 3, 3, 3, 3, 3]], 1.0)
    """
    if not 0 < least_fill <= 1:
        raise ValueError(f"least_fill={least_fill} must be above 0 and at most 1")
    lengths = np.asarray(lengths)
    rooms = -(-lengths // align) * align
    sample = np.asarray(assignment.sample)
    if sample.max(initial=EMPTY) >= len(lengths):
        raise ValueError(
            f"the assignment has sample {sample.max()}, but lengths has only {len(lengths)} entries"
        )
    ranks = [
        [int(index) for index in samples if index != EMPTY]
        for samples in sample.reshape(-1, sample.shape[-1])
    ]
    tokens = int(sum(rooms[samples].sum() for samples in ranks))

    def pack(sequences: int) -> tuple[list[list[list[int]]], int]:
        packed = [_pack(samples, rooms, sequences) for samples in ranks]
        return packed, max(align, *(int(rooms[sequence].sum()) for rank in packed for sequence in rank))

    def is_full(sequences: int, length: int) -> bool:
        return tokens >= least_fill * len(ranks) * sequences * length

    if shape is not None and is_full(*shape):
        packed, longest = pack(shape[0])
        if longest <= shape[1]:
            return _lay_out(packed, lengths, rooms, sample.shape[:-1], *shape)
    for sequences in range(max(1, *map(len, ranks)), 0, -1):
        packed, longest = pack(sequences)
        if is_full(sequences, longest):
            break
    return _lay_out(packed, lengths, rooms, sample.shape[:-1], sequences, longest)


def in_sequences(
    replay: RoutingReplay, batch_plan: BatchPlan, layout: SequenceLayout
) -> tuple[RoutingReplay, BatchPlan]:
    """Return a batch and its plan as if every sequence were a sample, for counts of what each rank has. On the host.

    Args:
        replay: the routing of all samples.
        batch_plan: the plan, whose load and quotas stay as they are.
        layout: the sequences of all ranks.

    Returns:
        The routing of the sequences ``[M * N * G * r, T]``, a copy, and the plan with the assignment of them.
    """
    sample = layout.sample.reshape(-1, layout.sample.shape[-1])
    ids = np.asarray(replay.expert_ids)[np.maximum(sample, 0), layout.position.reshape(sample.shape)]
    places = layout.sample.shape[:-1]
    numbers = np.arange(len(sample), dtype=np.int32).reshape(places)
    return RoutingReplay(ids, sample != EMPTY), batch_plan._replace(assignment=Assignment(numbers))


def _pack(samples: list[int], rooms: np.ndarray, sequences: int) -> list[list[int]]:
    """Distribute one rank's samples over its sequences, longest first, each to the emptiest sequence."""
    packed: list[list[int]] = [[] for _ in range(sequences)]
    filled = [0] * sequences
    for index in sorted(samples, key=lambda index: -rooms[index]):
        emptiest = filled.index(min(filled))
        packed[emptiest].append(index)
        filled[emptiest] += int(rooms[index])
    return packed


def _lay_out(packed, lengths, rooms, places: tuple[int, ...], sequences: int, length: int) -> SequenceLayout:
    sample = np.full((len(packed), sequences, length), EMPTY, np.int32)
    position = np.zeros_like(sample)
    for rank, rank_sequences in enumerate(packed):
        for sequence, samples in enumerate(rank_sequences):
            begin = 0
            for index in samples:
                end = begin + int(lengths[index])
                sample[rank, sequence, begin:end] = index
                position[rank, sequence, begin:end] = np.arange(end - begin)
                begin += int(rooms[index])
    shape = (*places, sequences, length)
    return SequenceLayout(sample.reshape(shape), position.reshape(shape))
