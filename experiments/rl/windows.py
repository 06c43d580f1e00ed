"""Responses that a window cuts off, and how the next rollout goes on with them.

A rollout adds at most a window of tokens to every response. One that has neither ended nor filled its room keeps its
row of the batch, and the next rollout takes prompt and response so far for its prompt; the rows of the others take new
prompts, so the batch stays full. What is kept of a token is what the policy that sampled it said: its log-probability
and its experts. The next rollout runs the tokens again to fill its cache of keys and values, under the policy as it is
then, and what that run routes is not recorded.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.generation import Responses
from relibra_jax.types import EMPTY, Array


class Carried(NamedTuple):
    """What one rollout leaves to the next: host arrays of a row for every sample of a batch, zeros in free rows."""

    drawn: Int[Array, " B"]
    """The learning step in which the prompt of each row was drawn; EMPTY for free rows."""
    prompt_lengths: Int[Array, " B"]
    """The tokens of each prompt."""
    lengths: Int[Array, " B"]
    """The tokens of each prompt and its response so far."""
    tokens: Int[Array, "B T"]
    """Prompt, then response."""
    expert_ids: Integer[Array, "B T L K"]
    """The experts of every token, as the policy that sampled it chose them; of prompts, those of the first rollout."""
    log_probs: Float[Array, "B T"]
    """The log-probability of every sampled token under the policy that sampled it."""

    @property
    def free(self) -> Bool[Array, " B"]:
        """The rows that take new prompts."""
        return self.drawn == EMPTY

    @property
    def known(self) -> Bool[Array, "B T"]:
        """The tokens that earlier rollouts have left."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]


def carry_nothing(samples: int, length: int, *, layers: int, top_k: int, dtype: np.dtype) -> Carried:
    """What the first rollout begins with.

    Args:
        samples: the samples B of a batch.
        length: the room T for a prompt and its whole response.
        layers: the layers L with experts.
        top_k: the experts K of a token.
        dtype: the dtype of expert ids.
    """
    row = np.zeros(samples, np.int32)
    return Carried(
        drawn=np.full(samples, EMPTY, np.int32),
        prompt_lengths=row,
        lengths=row,
        tokens=np.zeros((samples, length), np.int32),
        expert_ids=np.zeros((samples, length, layers, top_k), dtype),
        log_probs=np.zeros((samples, length), np.float32),
    )


def fill_free_rows(carried: Carried, prompts: Int[Array, "B P"], lengths: Int[Array, " B"]) -> Carried:
    """Give every free row the prompt of its number; rows that go on are left as they are.

    Args:
        carried: what the last rollout left.
        prompts: a prompt for every row, aligned to the left, P at most T.
        lengths: their tokens.

    Returns:
        The rows of the next rollout; what it does not go on with is still free.
    """
    free, tokens = carried.free, np.array(carried.tokens)
    tokens[free, : prompts.shape[1]] = prompts[free]
    return carried._replace(
        prompt_lengths=np.where(free, lengths, carried.prompt_lengths),
        lengths=np.where(free, lengths, carried.lengths),
        tokens=tokens,
    )


def join_windows(rows: Carried, window: Responses) -> Responses:
    """The responses with all that earlier rollouts have sampled of them.

    Args:
        rows: what `fill_free_rows` returned.
        window: what was generated behind it, on the host.

    Returns:
        ``window`` with the recorded routing and log-probabilities of the rows that go on, and ``response`` true on the
        tokens of all rollouts.
    """
    kept = rows.known & ~rows.free[:, None]
    answered = kept & (np.arange(kept.shape[1]) >= rows.prompt_lengths[:, None])
    return window._replace(
        response=window.response | answered,
        expert_ids=np.where(kept[..., None, None], rows.expert_ids, window.expert_ids),
        log_probs=np.where(answered, rows.log_probs, window.log_probs),
    )


def carry_unfinished(
    rows: Carried, responses: Responses, finished: Bool[Array, " B"], *, step: int
) -> Carried:
    """What a rollout leaves to the next one.

    Args:
        rows: what `fill_free_rows` returned.
        responses: what `join_windows` returned.
        finished: the responses that have ended or filled their room, whose rows become free.
        step: the learning step of the rollout.
    """
    drawn = np.where(rows.free, step, rows.drawn)

    def keep(leaf: Array) -> np.ndarray:
        gone = np.asarray(finished).reshape(-1, *[1] * (leaf.ndim - 1))
        return np.where(gone, 0, leaf).astype(leaf.dtype)

    mask = responses.mask
    return Carried(
        drawn=np.where(finished, EMPTY, drawn).astype(np.int32),
        prompt_lengths=keep(rows.prompt_lengths),
        lengths=keep(mask.sum(1, dtype=np.int32)),
        tokens=keep(np.where(mask, responses.tokens, 0)),
        expert_ids=keep(responses.expert_ids),
        log_probs=keep(responses.log_probs),
    )
