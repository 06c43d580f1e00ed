"""The answer of a server: what it must contain, whatever the interface of the server.

Every answer is checked before it enters a batch. A wrong one raises `BadAnswer`; nothing is repaired but the route of
the last token: engines never run it, because nothing is sampled from its output. Nothing that training computes depends
on that route, so the token gets the one of the token before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

from experiments.engines.protocol import Sampling
from relibra_jax import replay_from_rollout
from relibra_jax.models import ModelConfig


class BadAnswer(ValueError):
    """An answer that may not enter a batch. The message says what is wrong with it."""


class OtherWeights(BadAnswer):
    """An answer of a server whose weights are of another version, for example because it was started again."""


class Answer(NamedTuple):
    """A response that a server has sampled, or the beginning of one, with R tokens after a prompt of P."""

    tokens: Int[np.ndarray, " R"]
    """The sampled tokens, including the one that ends the response."""
    log_probs: Float[np.ndarray, " R"]
    """The log-probability of each, at the sampling temperature. Servers of this project give it over the whole
    vocabulary; others may leave out tokens that may not be sampled."""
    expert_ids: Integer[np.ndarray, "P+R L K"]
    """The experts of every token of prompt and response."""
    ended: bool
    """Whether an end token ended it, and not the largest length or an interrupt."""
    filled: int
    """1 if the last token has no route of its own, else 0."""


class Told(NamedTuple):
    """The parts of a server's answer, before they are checked."""

    tokens: Any
    """The sampled tokens, a list of integers."""
    log_probs: list[Any]
    """The log-probability of each."""
    logged: list[Any]
    """The tokens that the log-probabilities are of."""
    reason: Any
    """Why the response ended: "stop", "length", or another word."""
    routes: Any
    """The experts of the tokens, a text. Empty or None if there are none."""
    counts: Mapping[str, Any]
    """``prompt_tokens`` and ``completion_tokens``, if the server tells them."""
    versions: Sequence[Any]
    """The names of the weights that have sampled it. Empty if the server does not tell them."""


@contextmanager
def reading() -> Iterator[None]:
    """Raise `BadAnswer` if the block finds that a part of an answer is missing or has another form."""
    try:
        yield
    except KeyError as error:
        raise BadAnswer(f"the answer lacks {error}") from None
    except (TypeError, IndexError, AttributeError) as error:
        raise BadAnswer(f"the answer has another form: {error}") from None


def check_answer(
    told: Told,
    prompt: int,
    sampling: Sampling,
    config: ModelConfig,
    version: str | None,
    *,
    layout: str,
    recording: Mapping[str, Any],
    partial: bool = False,
) -> Answer:
    """Check the parts of a server's answer.

    Args:
        told: the parts of the answer.
        prompt: P, the number of tokens of the prompt.
        sampling: how tokens should have been drawn.
        config: the sizes of the model.
        version: the name of the weights that should have sampled it. None for any. Servers that do not tell it are
            believed.
        layout: the layout of the routes, a key of `relibra_jax.rollout.layouts.LAYOUTS`.
        recording: what that layout reads them from: those of the first token and all after it.
        partial: whether it may be the beginning of a response, whatever the server says why it ended.

    Returns:
        The response, or what there is of it.

    Raises:
        BadAnswer: if something is missing or wrong; `OtherWeights` if it is the version.
    """
    tokens, logged = _integers(told.tokens), _integers(told.logged)
    log_probs, reason = _numbers(told.log_probs), told.reason
    for actual in told.versions:
        if version not in (None, actual):
            raise OtherWeights(f"sampled with weights of version {actual}, where {version} were sent")
    for name, expected in {"prompt_tokens": prompt, "completion_tokens": len(tokens)}.items():
        if told.counts.get(name, expected) != expected:
            raise BadAnswer(f"{name} is {told.counts[name]}, where there are {expected}")
    if reason not in ("stop", "length") and not partial:
        raise BadAnswer(f"the response ended by {reason!r}, not by an end token or its length")
    if not 1 <= len(tokens) <= sampling.max_new_tokens:
        raise BadAnswer(f"{tokens.size} tokens, where 1 to {sampling.max_new_tokens} were asked for")
    ended = bool(np.isin(tokens[-1], sampling.ends))
    # The last token of a partial response may be its end all the same.
    if not partial and ((reason == "stop") != ended or (not ended and len(tokens) < sampling.max_new_tokens)):
        raise BadAnswer(
            f"finish_reason {reason!r} after {len(tokens)} of at most {sampling.max_new_tokens} tokens, the last of"
            f" them {tokens[-1]}; the ends are {', '.join(map(str, sampling.ends))}"
        )
    possible = (tokens >= 0) & (tokens < len(sampling.allowed))
    possible[possible] = sampling.allowed[tokens[possible]]
    if not possible.all():
        raise BadAnswer(f"token {tokens[~possible][0]} may not be sampled")
    if np.isin(tokens[:-1], sampling.ends).any():
        raise BadAnswer("an end token is inside the response")
    if not np.array_equal(logged, tokens):
        raise BadAnswer(f"{len(logged)} log-probabilities are not those of the {len(tokens)} tokens")
    if not (np.isfinite(log_probs) & (log_probs <= 1e-3)).all():
        wrong = log_probs[~(np.isfinite(log_probs) & (log_probs <= 1e-3))][0]
        raise BadAnswer(f"a log-probability is {wrong}")
    if not isinstance(told.routes, str) or not told.routes:
        raise BadAnswer("no routed_experts: does the server run with --enable-return-routed-experts?")
    ids, filled = _read_routes(recording, layout, prompt + len(tokens), config)
    return Answer(tokens.astype(np.int32), np.minimum(log_probs, 0), ids, ended, filled)


def _integers(values: Any) -> np.ndarray:
    """Return tokens as an array; those beyond any vocabulary become -1."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise BadAnswer(f"tokens must be a list of integers, found {str(values)[:60]}")
    return np.array([value if 0 <= value < 2**31 else -1 for value in values], np.int64)


def _numbers(values: list[Any]) -> np.ndarray:
    """Return log-probabilities as an array; what is no number, or too large a one, becomes NaN."""
    finite = [
        value if type(value) in (int, float) and abs(value) < 1e30 else float("nan") for value in values
    ]
    return np.array(finite, np.float32)


def _read_routes(
    recording: Mapping[str, Any], layout: str, tokens: int, config: ModelConfig
) -> tuple[np.ndarray, int]:
    """Return the experts of every token, and the number of tokens that have those of the token before."""

    def read(count: int) -> np.ndarray:
        replay = replay_from_rollout(
            [recording],
            layout=layout,
            mask=np.ones((1, count), bool),
            num_experts=config.num_experts,
            top_k=config.top_k,
            num_layers=config.layers,
            moe_layers=range(config.dense_layers, config.layers),
            start=0,
        )
        return np.asarray(replay.expert_ids[0])

    try:
        ids = read(tokens)
        return ids, 0
    except ValueError as whole:
        try:
            ids = read(tokens - 1)
        except ValueError:
            raise BadAnswer(str(whole)) from None
    return np.concatenate([ids, ids[-1:]]), 1
