"""Text as tokens: what a run asks of a tokenizer, and the one that needs no files, the bytes of UTF-8.

The 256 bytes are themselves, and three ids behind them mean something else.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Int

PAD: Final = 256
"""Fills arrays of bytes where there is no token."""
BOS: Final = 257
"""Starts every sequence of bytes."""
EOS: Final = 258
"""Ends a response of bytes."""
VOCABULARY: Final = 259


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to tokens and back. `BYTES` is one; `experiments.rl.checkpoint_tokenizer` reads those of checkpoints.

    >>> BYTES.encode_prompt("aé"), BYTES.encode_answer("b")
    ([257, 97, 195, 169], [98, 258])
    """

    encode_prompt: Callable[[str], list[int]]
    """The tokens that a response follows: a prompt with what starts a sequence, or in the model's chat template."""
    encode_text: Callable[[str], list[int]]
    """The tokens of a text and nothing else."""
    decode_text: Callable[[Sequence[int]], str]
    """The text of tokens; those that mean something else, and ids that mean nothing, are left out."""
    ends: tuple[int, ...]
    """The tokens that end a response, at least one; the first of them ends answers that are taught."""
    pad: int
    """Fills arrays where there is no token. Which positions are real is said by a mask, never by this id."""
    size: int
    """All ids are below this number."""
    never: tuple[int, ...]
    """The tokens that no response contains: padding, and what starts a sequence."""

    def allowed(self, vocabulary: int) -> Bool[np.ndarray, " V"]:
        """Which ids a response may contain.

        Args:
            vocabulary: the ids V of the model, at least ``size``: models may have rows that mean nothing.

        Returns:
            True where ``never`` does not have the id and it is below ``size``.

        >>> np.flatnonzero(~BYTES.allowed(261)).tolist()
        [256, 257, 259, 260]
        """
        ids = np.arange(vocabulary)
        return (ids < self.size) & ~np.isin(ids, self.never)

    def encode_answer(self, answer: str) -> list[int]:
        """The tokens of a whole response, its end included."""
        return [*self.encode_text(answer), self.ends[0]]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a response, up to the first token that ends it.

        >>> BYTES.decode([*BYTES.encode_answer("aé"), 98])
        'aé'
        """
        return self.decode_text(list(itertools.takewhile(lambda token: token not in self.ends, tokens)))

    def pad_rows(self, rows: Sequence[Sequence[int]], length: int) -> Int[np.ndarray, "B T"]:
        """Rows of tokens as one array, aligned to the left.

        Args:
            rows: the tokens of each row.
            length: the length T of every padded row.

        Returns:
            int32, ``pad`` behind the tokens of each row.

        Raises:
            ValueError: if a row is longer than ``length``; names the first one.

        >>> BYTES.pad_rows([[1, 2], []], 3).tolist()
        [[1, 2, 256], [256, 256, 256]]
        """
        padded = np.full((len(rows), length), self.pad, np.int32)
        for number, row in enumerate(rows):
            if len(row) > length:
                raise ValueError(f"row {number}: {len(row)} tokens, there is room for {length}")
            padded[number, : len(row)] = row
        return padded


def _decode_bytes(tokens: Sequence[int]) -> str:
    """Bytes that are no UTF-8 become U+FFFD."""
    return bytes(token for token in tokens if token < PAD).decode(errors="replace")


BYTES: Final = Tokenizer(
    encode_prompt=lambda prompt: [BOS, *prompt.encode()],
    encode_text=lambda text: list(text.encode()),
    decode_text=_decode_bytes,
    ends=(EOS,),
    pad=PAD,
    size=VOCABULARY,
    never=(PAD, BOS),
)
"""The bytes of UTF-8: for models that are trained from nothing."""
