"""Windows: responses that a window cuts off, and how the next rollout continues them.

A rollout adds at most a window of tokens to every response. A response that has neither ended nor reached its maximum
length is carried: it keeps its row of the batch, and the next rollout uses the prompt and the response so far as its
prompt. A response that is whole is carried too, without being sampled further, until the other responses that it is
compared with are whole. The other rows get new prompts. Every token keeps the log-probability and the experts of the
policy that sampled it. The next rollout runs the tokens again, under its own policy, to fill its cache of keys and
values. It does not record the routing of that run. With several processes, each has all carried responses with their
routes.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.generation import Responses
from experiments.rl.responses import whole_routes
from relibra_jax.contract.types import EMPTY, Array


class Carried(NamedTuple):
    """The responses that one rollout carries to the next, as host arrays with a row for every sample of a batch.

    Rows without a carried response are free, and 0.
    """

    drawn: Int[Array, " B"]
    """The learning step that drew the prompt of each row. EMPTY for free rows."""
    prompt_lengths: Int[Array, " B"]
    """The number of tokens in each prompt."""
    lengths: Int[Array, " B"]
    """The number of tokens in each prompt and its response so far."""
    tokens: Int[Array, "B T"]
    """The prompt, then the response."""
    expert_ids: Integer[Array, "B T L K"]
    """The experts of every token under the policy that sampled it. Prompts have the experts of their first rollout."""
    log_probs: Float[Array, "B T"]
    """The log-probability of every sampled token under the policy that sampled it."""
    ended: Bool[Array, " B"]
    """True for responses that an end token ended, and which wait for the others that they are compared with."""

    @property
    def free(self) -> Bool[Array, " B"]:
        """True for rows that get new prompts."""
        return self.drawn == EMPTY

    @property
    def mask(self) -> Bool[Array, "B T"]:
        """True on the tokens of prompts and responses so far."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]

    def to_sample(self, response_tokens: int) -> Int[np.ndarray, " B"]:
        """Return the number of tokens after which each row is sampled, 0 for rows whose responses are whole.

        Args:
            response_tokens: the largest number of tokens of a response.
        """
        whole = is_whole(self.ended, self.lengths - self.prompt_lengths, response_tokens)
        return np.where(whole, 0, self.lengths)


def carry_nothing(samples: int, length: int, *, layers: int, top_k: int, dtype: np.dtype) -> Carried:
    """Make the initial value, without carried responses, for the first rollout.

    Args:
        samples: B, the number of samples in a batch.
        length: T, the maximum number of tokens in a prompt and its response.
        layers: L, the number of mixture-of-experts layers.
        top_k: K, the number of experts of a token.
        dtype: the dtype of expert ids.

    Returns:
        Free rows.
    """
    zeros = np.zeros(samples, np.int32)
    return Carried(
        drawn=np.full(samples, EMPTY, np.int32),
        prompt_lengths=zeros,
        lengths=zeros,
        tokens=np.zeros((samples, length), np.int32),
        expert_ids=np.zeros((samples, length, layers, top_k), dtype),
        log_probs=np.zeros((samples, length), np.float32),
        ended=np.zeros(samples, bool),
    )


def fill_free_rows(carried: Carried, prompts: Int[Array, "B P"], lengths: Int[Array, " B"]) -> Carried:
    """Put new prompts into the free rows. Carried responses keep their rows.

    Args:
        carried: the responses that the last rollout carries to the next.
        prompts: a prompt for every row, of which free rows use theirs; aligned to the left, with P at most T.
        lengths: the number of tokens in each prompt.

    Returns:
        The rows of the next rollout. ``free`` still marks the rows with new prompts.
    """
    free, tokens = carried.free, np.array(carried.tokens)
    tokens[free, : prompts.shape[1]] = prompts[free]
    return carried._replace(
        prompt_lengths=np.where(free, lengths, carried.prompt_lengths),
        lengths=np.where(free, lengths, carried.lengths),
        tokens=tokens,
    )


def join_windows(rows: Carried, window: Responses) -> Responses:
    """Join a new window with the parts of its responses that earlier rollouts sampled.

    Args:
        rows: the rows of the rollout, as `fill_free_rows` returned them.
        window: the result of generating after these rows, on the host. Rows that were not sampled are empty in it.

    Returns:
        ``window``, with the recorded tokens, routing and log-probabilities of carried responses, and with
        ``response_mask`` True on the response tokens of all rollouts.
    """
    carried_tokens = rows.mask & ~rows.free[:, None]
    own = slice(None) if window.own is None else window.own
    carried_response = carried_tokens & (np.arange(carried_tokens.shape[1]) >= rows.prompt_lengths[:, None])
    return window._replace(
        tokens=np.where(carried_tokens, rows.tokens, window.tokens),
        mask=window.mask | carried_tokens,
        ended=window.ended | rows.ended,
        response_mask=window.response_mask | carried_response,
        expert_ids=np.where(carried_tokens[own][..., None, None], rows.expert_ids[own], window.expert_ids),
        log_probs=np.where(carried_response, rows.log_probs, window.log_probs),
    )


def is_whole(
    ended: Bool[Array, " B"], tokens: Int[Array, " B"], response_tokens: int
) -> Bool[np.ndarray, " B"]:
    """Return True for responses that an end token ended, or that have the largest number of tokens."""
    return np.asarray(ended | (tokens == response_tokens))


def find_learned(responses: Responses, *, response_tokens: int, compared: int) -> Bool[np.ndarray, " B"]:
    """Return True for the responses that can be learned from: they and all that they are compared with are whole.

    Args:
        responses: the responses so far, as `join_windows` returned them.
        response_tokens: the largest number of tokens of a response.
        compared: the number of successive responses that are compared with each other.
    """
    whole = is_whole(responses.ended, responses.response_mask.sum(1), response_tokens)
    return whole.reshape(-1, compared).all(1).repeat(compared)


def carry_unfinished(
    rows: Carried, responses: Responses, finished: Bool[Array, " B"], *, step: int
) -> Carried:
    """Select the unfinished responses of a rollout, for the next one to continue.

    Args:
        rows: the rows of the rollout, as `fill_free_rows` returned them.
        responses: the responses so far, as `join_windows` returned them.
        finished: True for responses that `find_learned` found. Their rows become free.
        step: the learning step of the rollout.

    Returns:
        The carried responses.
    """
    drawn = np.where(rows.free, step, rows.drawn)

    def keep(leaf: Array) -> np.ndarray:
        free = np.asarray(finished).reshape(-1, *[1] * (leaf.ndim - 1))
        return np.where(free, 0, leaf).astype(leaf.dtype)

    mask = responses.mask
    return Carried(
        drawn=np.where(finished, EMPTY, drawn).astype(np.int32),
        prompt_lengths=keep(rows.prompt_lengths),
        lengths=keep(mask.sum(1, dtype=np.int32)),
        tokens=keep(np.where(mask, responses.tokens, 0)),
        expert_ids=keep(whole_routes(responses)),
        log_probs=keep(responses.log_probs),
        ended=keep(responses.ended),
    )
