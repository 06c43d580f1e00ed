"""An answer of a server in SGLang's format: what it must contain, and what is read from it.

Every answer is checked before it enters a batch. A wrong one raises `BadAnswer`; nothing is repaired but the route of
the last token: engines never run it, because nothing is sampled from its output. Nothing that training computes depends
on that route, so the token gets the one of the token before it.
"""

from collections.abc import Mapping
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
    """A response that a server has sampled, with R tokens after a prompt of P."""

    tokens: Int[np.ndarray, " R"]
    """The sampled tokens, including the one that ends the response."""
    log_probs: Float[np.ndarray, " R"]
    """The log-probability of each, at the sampling temperature. Servers of this project give it over the whole
    vocabulary; others may leave out tokens that may not be sampled."""
    expert_ids: Integer[np.ndarray, "P+R L K"]
    """The experts of every token of prompt and response."""
    ended: bool
    """Whether an end token ended it, and not the largest length."""
    filled: int
    """1 if the last token has no route of its own, else 0."""


def read_answer(
    answer: Any, prompt: int, sampling: Sampling, config: ModelConfig, version: str | None
) -> Answer:
    """Read and check the answer to one request.

    Args:
        answer: the answer, as JSON was parsed.
        prompt: P, the number of tokens of the prompt.
        sampling: how tokens should have been drawn.
        config: the sizes of the model.
        version: the name of the weights that should have sampled it. None for any. Servers that do not tell it are
            believed.

    Returns:
        The response.

    Raises:
        BadAnswer: if something is missing or wrong; `OtherWeights` if it is the version.
    """
    try:
        meta, reason = answer["meta_info"], answer["meta_info"]["finish_reason"]["type"]
        tokens = _integers(answer["output_ids"])
        logged = _integers([entry[1] for entry in meta["output_token_logprobs"]])
        log_probs = _numbers([entry[0] for entry in meta["output_token_logprobs"]])
        routes = meta["routed_experts"]
    except (KeyError, TypeError, IndexError) as error:
        what = (
            f"the answer lacks {error}"
            if isinstance(error, KeyError)
            else f"the answer has another form: {error}"
        )
        raise BadAnswer(what) from None
    _check_version(meta, version)
    for name, expected in {"prompt_tokens": prompt, "completion_tokens": len(tokens)}.items():
        if meta.get(name, expected) != expected:
            raise BadAnswer(f"{name} is {meta[name]}, where there are {expected}")
    if reason not in ("stop", "length"):
        raise BadAnswer(f"the response ended by {reason!r}, not by an end token or its length")
    if not 1 <= len(tokens) <= sampling.max_new_tokens:
        raise BadAnswer(f"{tokens.size} tokens, where 1 to {sampling.max_new_tokens} were asked for")
    ended = bool(np.isin(tokens[-1], sampling.ends))
    if (reason == "stop") != ended or (not ended and len(tokens) < sampling.max_new_tokens):
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
    ids, filled = _read_routes(meta, routes, prompt + len(tokens), config)
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


def _check_version(meta: Mapping[str, Any], version: str | None) -> None:
    actual = meta.get("weight_version")
    if version is not None and actual not in (None, version):
        raise OtherWeights(f"sampled with weights of version {actual}, where {version} were sent")


def _read_routes(
    meta: Mapping[str, Any], routes: Any, tokens: int, config: ModelConfig
) -> tuple[np.ndarray, int]:
    """Return the experts of every token, and the number of tokens that have those of the token before."""
    if not isinstance(routes, str) or not routes:
        raise BadAnswer("no routed_experts: does the server run with --enable-return-routed-experts?")

    def read(count: int) -> np.ndarray:
        replay = replay_from_rollout(
            [meta],
            layout="sglang",
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
