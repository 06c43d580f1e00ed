"""Byte-level tokens: the 256 bytes of UTF-8 text are themselves, and three ids behind them mean something else."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from jaxtyping import Int

PAD: Final = 256
"""Fills arrays where there is no token. Which positions are real is said by a mask, never by this id."""
BOS: Final = 257
"""Starts every sequence."""
EOS: Final = 258
"""Ends a response."""
VOCABULARY: Final = 259


def encode(text: str) -> list[int]:
    """The bytes of ``text``; the caller adds BOS and EOS.

    >>> encode("aé")
    [97, 195, 169]
    """
    return list(text.encode())


def decode(tokens: Iterable[int]) -> str:
    """The text of ``tokens`` up to the first EOS. PAD and BOS are left out; bytes that are no UTF-8 become U+FFFD.

    >>> decode([BOS, *encode("aé"), EOS, 98])
    'aé'
    """
    text = bytearray()
    for token in tokens:
        if token == EOS:
            break
        if token < PAD:
            text.append(token)
    return text.decode(errors="replace")


def pad(rows: Sequence[Sequence[int]], length: int) -> Int[np.ndarray, "B T"]:
    """Rows of tokens as one int32 array, aligned to the left and padded with PAD to ``length``.

    Raises:
        ValueError: if a row is longer; names the first one.

    >>> pad([[1, 2], []], 3).tolist()
    [[1, 2, 256], [256, 256, 256]]
    """
    padded = np.full((len(rows), length), PAD, np.int32)
    for number, row in enumerate(rows):
        if len(row) > length:
            raise ValueError(f"row {number}: {len(row)} tokens, there is room for {length}")
        padded[number, : len(row)] = row
    return padded
