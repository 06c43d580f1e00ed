"""Tokenizers: the interface that a run needs, and a tokenizer of UTF-8 bytes that needs no files.

The tokens of the latter are the 256 bytes and three special tokens after them.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

PAD: Final = 256
"""The padding token of `BYTES`."""
BOS: Final = 257
"""The token of `BYTES` that starts every sequence."""
EOS: Final = 258
"""The token of `BYTES` that ends a response."""
VOCABULARY: Final = 259
"""The number of tokens of `BYTES`."""


class Message(NamedTuple):
    """A message of a chat."""

    role: str
    """The writer of the message, such as system, user or assistant."""
    content: str
    """The text."""


type Prompt = str | tuple[Message, ...]
"""A prompt: a text, which is the user's message in a chat, or all messages of a chat."""


def plain_text(prompt: Prompt) -> str:
    """Return a prompt's text, for tokenizers without a chat template.

    Raises:
        ValueError: if it is a chat.
    """
    if not isinstance(prompt, str):
        raise ValueError("a list of messages needs a chat template, and the tokenizer of this run has none")
    return prompt


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer. `BYTES` is one, and `experiments.rl.checkpoint_tokenizer` reads those of checkpoints.

    >>> BYTES.encode_prompt("aé"), BYTES.encode_answer("b")
    ([257, 97, 195, 169], [98, 258])
    """

    encode_prompt: Callable[[Prompt], list[int]]
    """Encodes a prompt, up to where the response starts: after a start token, or in the model's chat template."""
    encode_text: Callable[[str], list[int]]
    """Encodes a text without special tokens."""
    encode_reply: Callable[[str], list[int]]
    """Encodes a reply to a turn, from after the token that ended the turn up to where the next turn starts: plain text,
    or the user's next message in the model's chat template."""
    decode_text: Callable[[Sequence[int]], str]
    """Decodes tokens to text. It leaves out special tokens and unused ids."""
    ends: tuple[int, ...]
    """The tokens that end a response, at least one. The first of them ends the answers of the warm-up."""
    pad: int
    """The padding token of arrays. Masks tell which positions are real tokens, never this id."""
    size: int
    """A number above all token ids."""
    never: tuple[int, ...]
    """The tokens that a response never contains: the padding and start tokens."""

    def allowed(self, vocabulary: int) -> Bool[np.ndarray, " V"]:
        """Mark the ids that a response may contain.

        Args:
            vocabulary: V, the number of ids of the model, at least ``size``. A model may have unused ids.

        Returns:
            True for ids below ``size`` that are not in ``never``.

        >>> np.flatnonzero(~BYTES.allowed(261)).tolist()
        [256, 257, 259, 260]
        """
        ids = np.arange(vocabulary)
        return (ids < self.size) & ~np.isin(ids, self.never)

    def encode_answer(self, answer: str) -> list[int]:
        """Encode an answer as a whole response, with the token that ends it."""
        return [*self.encode_text(answer), self.ends[0]]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode a response, up to the first token that ends it.

        >>> BYTES.decode([*BYTES.encode_answer("aé"), 98])
        'aé'
        """
        return self.decode_text(list(itertools.takewhile(lambda token: token not in self.ends, tokens)))

    def decode_turns(self, tokens: Iterable[int]) -> list[str]:
        """Decode the sampled tokens of a response turn by turn: a token of ``ends`` is the last of its turn.

        >>> BYTES.decode_turns([*BYTES.encode_answer("1+1="), *BYTES.encode_answer("2")])
        ['1+1=', '2']
        """
        turns: list[list[int]] = [[]]
        for token in tokens:
            if turns[-1] and turns[-1][-1] in self.ends:
                turns.append([])
            turns[-1].append(token)
        return [self.decode(turn) for turn in turns]

    def pad_sequences(self, sequences: Sequence[Sequence[int]], length: int) -> Int[np.ndarray, "B T"]:
        """Put sequences of tokens into one array, aligned to the left.

        Args:
            sequences: the tokens of each sequence.
            length: T, the length of the padded sequences.

        Returns:
            The padded sequences, int32.

        Raises:
            ValueError: if a sequence is longer than ``length``. The message names the first such sequence.

        >>> BYTES.pad_sequences([[1, 2], []], 3).tolist()
        [[1, 2, 256], [256, 256, 256]]
        """
        padded = np.full((len(sequences), length), self.pad, np.int32)
        for number, tokens in enumerate(sequences):
            if len(tokens) > length:
                raise ValueError(f"sequence {number} has {len(tokens)} tokens and must have at most {length}")
            padded[number, : len(tokens)] = tokens
        return padded


def _decode_bytes(tokens: Sequence[int]) -> str:
    """Decode UTF-8, with U+FFFD in place of invalid bytes."""
    return bytes(token for token in tokens if token < PAD).decode(errors="replace")


BYTES: Final = Tokenizer(
    encode_prompt=lambda prompt: [BOS, *plain_text(prompt).encode()],
    encode_text=lambda text: list(text.encode()),
    encode_reply=lambda text: list(text.encode()),
    decode_text=_decode_bytes,
    ends=(EOS,),
    pad=PAD,
    size=VOCABULARY,
    never=(PAD, BOS),
)
"""The tokenizer of UTF-8 bytes, for models that are trained from random weights."""
