"""Requests to a server in SGLang's format: what they may contain, and what is read from them."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from experiments.rl.generation import check_sampling
from relibra_jax.support.limits import check_integer

PARAMS: Final = frozenset(
    (
        "max_new_tokens",
        "temperature",
        "top_p",
        "stop_token_ids",
        "no_stop_trim",
        "logit_bias",
        "sampling_seed",
    )
)
"""The fields of ``sampling_params`` that requests may have. The end token is always there, ``no_stop_trim`` or not."""


class Draw(NamedTuple):
    """How the tokens of a request are drawn. Requests with equal settings can be in one batch."""

    temperature: float
    top_p: float
    ends: tuple[int, ...]
    forbidden: tuple[int, ...]
    """The tokens that may not be sampled."""


class Request(NamedTuple):
    """A request for one response."""

    prompt: tuple[int, ...]
    """The tokens of the prompt."""
    seed: int
    """The random key, as `experiments.engines.protocol.seeds_of` returns it."""
    max_new_tokens: int
    """The largest number of tokens of the response, its end included."""
    draw: Draw
    """How its tokens are drawn."""
    routes: bool
    """Whether the answer has the experts of every token."""


def read_request(body: Mapping[str, Any], prompt: Any, vocabulary: int) -> Request:
    """Read a request for one response in SGLang's format.

    Args:
        body: the request. It may have ``sampling_params`` with the fields that runs send.
        prompt: the tokens of the prompt.
        vocabulary: the number of tokens of the model.

    Raises:
        ValueError: if something is missing, wrong or not supported.
    """
    params = body.get("sampling_params") or {}
    biases = params.get("logit_bias") or {} if isinstance(params, dict) else None
    if not isinstance(params, dict) or not isinstance(biases, dict):
        raise ValueError("sampling_params and logit_bias must be objects")
    if unknown := sorted(params.keys() - PARAMS):
        raise ValueError(f"sampling_params: {', '.join(unknown)} not supported")
    tokens = _tokens("input_ids", prompt, vocabulary)
    if not tokens:
        raise ValueError("input_ids: a prompt must have at least one token")
    ends = _tokens("stop_token_ids", params.get("stop_token_ids") or [], vocabulary)
    if not ends:
        raise ValueError("sampling_params: stop_token_ids must name at least one token")
    kept = [token for token, bias in biases.items() if not _number("logit_bias", bias) <= -1e6]
    if kept:
        raise ValueError(
            f"logit_bias of token {kept[0]}: only tokens that may not be sampled, at -1e6 or less"
        )
    numbers = [int(token) if token.isdecimal() else token for token in biases]
    draw = Draw(
        temperature=_number("temperature", params.get("temperature", 1.0)),
        top_p=_number("top_p", params.get("top_p", 1.0)),
        ends=ends,
        forbidden=tuple(sorted(_tokens("logit_bias", numbers, vocabulary))),
    )
    max_new_tokens = _integer("max_new_tokens", params.get("max_new_tokens", 128))
    check_integer("max_new_tokens", max_new_tokens, least=1)
    check_sampling(draw.temperature, draw.top_p)
    seed = _integer("sampling_seed", params.get("sampling_seed") or 0)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"sampling_seed={seed} has more than 64 bits")
    return Request(tokens, seed, max_new_tokens, draw, bool(body.get("return_routed_experts")))


def _tokens(name: str, values: Any, vocabulary: int) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{name}: expected a list of tokens, found {str(values)[:60]}")
    tokens = tuple(_integer(name, value) for value in values)
    if outside := [token for token in tokens if not 0 <= token < vocabulary]:
        raise ValueError(f"{name}: token {outside[0]} is not in the vocabulary of {vocabulary} tokens")
    return tokens


def _integer(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{name}: expected an integer, found {str(value)[:60]}")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e30:
        raise ValueError(f"{name}: expected a number, found {str(value)[:60]}")
    return float(value)
