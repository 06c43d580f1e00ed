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
    """The log-probability of each, over the whole vocabulary."""
    expert_ids: Integer[np.ndarray, "P+R L K"]
    """The experts of every token of prompt and response."""
    ended: bool
    """Whether an end token ended it, and not the largest length."""
    filled: int
    """1 if the last token has no route of its own, else 0."""


def read_answer(answer: Any, prompt: int, sampling: Sampling, config: ModelConfig, version: int) -> Answer:
    """Read and check the answer to one request.

    Args:
        answer: the answer, as JSON was parsed.
        prompt: P, the number of tokens of the prompt.
        sampling: how tokens should have been drawn.
        config: the sizes of the model.
        version: the version of the weights that should have sampled it. Servers that do not tell it are believed.

    Returns:
        The response.

    Raises:
        BadAnswer: if something is missing or wrong; `OtherWeights` if it is the version.
    """
    try:
        tokens, meta = np.asarray(answer["output_ids"], np.int64), answer["meta_info"]
        log_probs = np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
        logged = np.array([entry[1] for entry in meta["output_token_logprobs"]], np.int64)
        reason = meta["finish_reason"]["type"]
        routes = meta["routed_experts"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadAnswer(f"the answer lacks {error}" if isinstance(error, KeyError) else str(error)) from None
    _check_version(meta, version)
    if reason not in ("stop", "length"):
        raise BadAnswer(f"the response ended by {reason!r}, not by an end token or its length")
    if tokens.ndim != 1 or not 1 <= len(tokens) <= sampling.max_new_tokens:
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


def _check_version(meta: Mapping[str, Any], version: int) -> None:
    actual = meta.get("weight_version")
    if actual not in (None, str(version)):
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
