"""Rows that hold several samples, one behind the other, so that what a plan counts in tokens is what runs.

A rank's samples of a micro-batch go to its rows longest first, each to the emptiest row (LPT, as in
`relibra_jax.planning.sample_packing`). All rows of a batch have one shape: the more rows a rank has, the shorter they
are and the less attention costs, but the more of them is padding. So there are as many rows as leave no more padding
than is allowed.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int

from relibra_jax.types import EMPTY, Array, Assignment

LEAST_FILL: Final = 0.95
"""The share of positions that hold tokens, at least, where samples allow it."""


class RowLayout(NamedTuple):
    """Which token stands where: r rows a rank of T positions, in every micro-batch."""

    sample: Int[np.ndarray, "M N G r T"]
    """The sample of each position, its index in the batch; EMPTY for none. It serves as segment id: a token attends to
    the tokens of its sample."""
    position: Int[np.ndarray, "M N G r T"]
    """The token's position in its sample; 0 where there is none."""

    @property
    def fill(self) -> float:
        """The share of positions that hold tokens."""
        return float((self.sample != EMPTY).mean())

    @property
    def shape(self) -> tuple[int, int]:
        """``(r, T)``, what compiled steps depend on."""
        rows, length = self.sample.shape[-2:]
        return rows, length


def pack_rows(
    assignment: Assignment,
    lengths: Int[Array, " B"],
    *,
    least_fill: float = LEAST_FILL,
    shape: tuple[int, int] | None = None,
) -> RowLayout:
    """Lay the samples of every rank out in rows. Runs on the host.

    Args:
        assignment: which samples each rank holds in each micro-batch.
        lengths: the tokens of each sample, which come first in it.
        least_fill: the share of positions that must hold tokens. Where no number of rows allows it, a rank has one row,
            which is as full as the assignment is even.
        shape: the ``(r, T)`` of an earlier batch, kept if the samples fit and leave the rows full enough, so that
            compiled steps serve again.

    Returns:
        The layout; positions of a row come sample by sample, padding last.

    Raises:
        ValueError: if ``least_fill`` is not above 0 and at most 1, or an assigned sample has no length.

    >>> assignment = Assignment(np.array([[[[0, 1, 2], [3, -1, -1]]]]))
    >>> layout = pack_rows(assignment, np.array([2, 3, 1, 6]))
    >>> layout.sample[0, 0, :, 0].tolist(), layout.fill
    ([[1, 1, 1, 0, 0, 2], [3, 3, 3, 3, 3, 3]], 1.0)
    """
    if not 0 < least_fill <= 1:
        raise ValueError(f"least_fill={least_fill} must be above 0 and at most 1")
    lengths = np.asarray(lengths)
    sample = np.asarray(assignment.sample)
    if sample.max(initial=EMPTY) >= len(lengths):
        raise ValueError(f"assignment of sample {sample.max()}, there are lengths of {len(lengths)}")
    ranks = [[int(one) for one in held if one != EMPTY] for held in sample.reshape(-1, sample.shape[-1])]
    tokens = int(sum(lengths[held].sum() for held in ranks))

    def pack(rows: int) -> tuple[list[list[list[int]]], int]:
        packed = [_pack(held, lengths, rows) for held in ranks]
        return packed, max(1, *(int(lengths[row].sum()) for rank in packed for row in rank))

    def is_full(rows: int, length: int) -> bool:
        return tokens >= least_fill * len(ranks) * rows * length

    if shape is not None and is_full(*shape):
        packed, longest = pack(shape[0])
        if longest <= shape[1]:
            return _lay_out(packed, lengths, sample.shape[:-1], *shape)
    for rows in range(max(1, *map(len, ranks)), 0, -1):
        packed, longest = pack(rows)
        if is_full(rows, longest):
            break
    return _lay_out(packed, lengths, sample.shape[:-1], rows, longest)


def _pack(held: list[int], lengths: np.ndarray, rows: int) -> list[list[int]]:
    """One rank's samples in its rows, longest first to the emptiest row."""
    packed: list[list[int]] = [[] for _ in range(rows)]
    filled = [0] * rows
    for one in sorted(held, key=lambda one: -lengths[one]):
        row = filled.index(min(filled))
        packed[row].append(one)
        filled[row] += int(lengths[one])
    return packed


def _lay_out(packed, lengths, places: tuple[int, ...], rows: int, length: int) -> RowLayout:
    sample = np.full((len(packed), rows, length), EMPTY, np.int32)
    position = np.zeros_like(sample)
    for rank, of_rank in enumerate(packed):
        for row, held in enumerate(of_rank):
            end = 0
            for one in held:
                begin, end = end, end + int(lengths[one])
                sample[rank, row, begin:end] = one
                position[rank, row, begin:end] = np.arange(end - begin)
    shape = (*places, rows, length)
    return RowLayout(sample.reshape(shape), position.reshape(shape))
