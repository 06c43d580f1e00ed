"""A few samples of a step as text with their rewards, for people who want to read what the policy writes."""

from typing import Final, TypedDict

import numpy as np

from experiments.rl.generation import Responses
from experiments.rl.rewards import Rewards
from experiments.rl.tokens import Tokenizer

SHOWN: Final = 4
"""The number of samples of a step that are kept as text."""
LONGEST: Final = 1200
"""The number of characters of a text up to which it is kept whole."""


class SampleText(TypedDict):
    """One sample, as lines of ``samples.jsonl`` have it."""

    prompt: str
    response: str
    reward: float
    """The reward that the policy learned from."""
    tokens: int
    """The number of tokens that the policy wrote."""


def choose_texts(responses: Responses, rewards: Rewards, tokenizer: Tokenizer) -> list[SampleText]:
    """Decode a few samples of a step: those of the least and of the largest reward, and some evenly between them.

    Args:
        responses: the samples, on the host.
        rewards: their rewards. Samples without one are left out.
        tokenizer: the tokenizer of the policy.

    Returns:
        At most `SHOWN` samples, from the least reward to the largest. Of texts longer than `LONGEST` characters the
        middle is left out.
    """
    scored = np.flatnonzero(rewards.scored)
    in_order = scored[np.argsort(rewards.reward[scored], kind="stable")]
    count = min(SHOWN, len(in_order))
    places = np.linspace(0, len(in_order) - 1, count).round().astype(int)
    return [_text_of(responses, rewards, tokenizer, sample) for sample in in_order[places].tolist()]


def _text_of(responses: Responses, rewards: Rewards, tokenizer: Tokenizer, sample: int) -> SampleText:
    tokens = np.asarray(responses.tokens[sample])[np.asarray(responses.mask[sample])].tolist()
    written = np.asarray(responses.response_mask[sample])
    prompt_tokens = int(written.argmax())
    return SampleText(
        prompt=_shorten(tokenizer.decode_text(tokens[:prompt_tokens])),
        response=_shorten(tokenizer.decode_text(tokens[prompt_tokens:])),
        reward=float(rewards.reward[sample]),
        tokens=int(written.sum()),
    )


def _shorten(text: str) -> str:
    """Leave out the middle of a long text.

    >>> len(_shorten("a" * 5000)), _shorten("short")
    (1218, 'short')
    """
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} [... {len(text) - LONGEST:,} more] {text[-half:]}"
