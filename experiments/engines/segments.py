"""A response in segments, each of which one version of the weights sampled.

New weights interrupt a response. It carries on from its tokens, which the engine runs again as the prompt of the next
segment. Every token keeps the log-probability and the experts of the version that sampled it, and prompts keep the
experts of the first segment. One route comes from the next segment: engines do not run the last token of a segment, and
the next one does.
"""

import hashlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from experiments.engines.answers import Answer
from experiments.engines.protocol import Sampling


class Segments:
    """The segments of one response so far.

    Args:
        prompt: the tokens of the prompt.
        sampling: how tokens are drawn.
    """

    def __init__(self, prompt: Int[np.ndarray, " P"], sampling: Sampling):
        self._prompt, self._sampling = prompt, sampling
        self._answers: list[tuple[Answer, int]] = []
        self._sampled = 0

    @property
    def tokens(self) -> Int[np.ndarray, " T"]:
        """The prompt and the response so far, which are the prompt of the next segment."""
        return np.concatenate([self._prompt, *(answer.tokens for answer, _ in self._answers)])

    @property
    def sampling(self) -> Sampling:
        """How the tokens of the next segment are drawn: as many as are left."""
        return self._sampling._replace(max_new_tokens=self._sampling.max_new_tokens - self._sampled)

    @property
    def complete(self) -> bool:
        """Whether the response has ended, or has its largest length."""
        whole = self._sampled == self._sampling.max_new_tokens
        return whole or (bool(self._answers) and self._answers[-1][0].ended)

    def seed(self, key: int) -> int:
        """Return the seed of the next segment: the key of the sample, or one of its own after the first.

        The decoding steps of a request count from 0, so with the same seed it would draw the same numbers again.
        """
        if not self._sampled:
            return key
        digest = hashlib.sha256(f"{key} after {self._sampled} tokens".encode()).digest()
        return int.from_bytes(digest[:8], signed=True)

    def add(self, answer: Answer, version: int) -> None:
        """Add a segment that this version of the weights has sampled."""
        self._answers.append((answer, version))
        self._sampled += len(answer.tokens)

    def join(self) -> "Joined":
        """Join the segments of a complete response."""
        (first, _), *others = self._answers
        ids = first.expert_ids
        for (before, _), (answer, _) in zip(self._answers, others, strict=False):
            recorded = len(ids) - before.filled
            ids = np.concatenate([ids[:recorded], answer.expert_ids[recorded:]])
        last, _ = self._answers[-1]
        answers = [answer for answer, _ in self._answers]
        return Joined(
            Answer(
                np.concatenate([answer.tokens for answer in answers]),
                np.concatenate([answer.log_probs for answer in answers]),
                ids,
                last.ended,
                last.filled,
            ),
            np.concatenate([np.full(len(answer.tokens), version) for answer, version in self._answers]),
        )


class Joined(NamedTuple):
    """A whole response."""

    answer: Answer
    """Its tokens, with the log-probability and the experts of each under the version that sampled it."""
    version: Int[np.ndarray, " R"]
    """The version of the weights that sampled each token."""
