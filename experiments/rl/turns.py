"""Responses of several turns: the policy writes a turn, the task replies, and the policy writes the next one.

Each turn is one call of the rollout engine, with the conversation so far as its prompt, so that the engine may reuse
what it has computed for the prefix. A response then has tokens that the policy did not write. Its masks tell which:
``mask`` is True on all tokens, and ``response_mask`` only on those of the policy, which alone are learned from.

- The log-probability of a token is that of the turn which sampled it.
- The experts of a token are those with which the following token was sampled. So the last token of a turn, which not
  all engines run, and the reply after it have the experts of the next turn, which runs both as a part of its prompt.
  All other tokens have those of their own turn.
- A turn starts only if there is room for the largest turn in the maximum length of a response, replies included. A
  reply without a turn after it is left out, so every response ends with a turn of the policy.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from experiments.engines.protocol import UNSAMPLED, Generation
from experiments.rl.generation import Responses
from experiments.rl.processes import from_first, is_first
from experiments.rl.prompts import Prompts
from experiments.rl.tasks import Example
from relibra_jax.contract.types import EMPTY, Array

GenerateTurn = Callable[[Int[Array, "B P"], Int[Array, " B"], int], Generation]
"""A function that samples a turn: ``(conversations, lengths, number of the turn) -> generation``. Responses without a
further turn have length 0."""


class Replies(NamedTuple):
    """The replies to the turns of a batch."""

    tokens: Int[np.ndarray, "B R"]
    """The tokens of the replies, aligned to the left."""
    lengths: Int[np.ndarray, " B"]
    """The number of tokens in each reply. EMPTY for responses that end without a reply."""
    failed: Bool[np.ndarray, " B"]
    """True for responses to which the task failed to reply."""
    failures: tuple[str, ...]
    """A text for each of them, on the process that replied."""


def respond_in_turns(
    generate: GenerateTurn,
    prompts: Prompts,
    examples: list[Example],
    tokens: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
) -> Generation:
    """Sample a response of several turns to each example's prompt.

    Args:
        generate: the function that samples a turn.
        prompts: the source of prompts, with the settings of the run and the task that replies.
        examples: the example of every sample.
        tokens: the tokens of their prompts, aligned to the left.
        prompt_lengths: the number of tokens in each prompt.

    Returns:
        The responses, on the host. Those to which the task failed to reply count as dropped.
    """
    config = prompts.config
    assert config.turn_tokens is not None
    # All turns have prompts of this width, so that they share compiled programs.
    context = config.prompt_tokens + config.response_tokens - config.turn_tokens
    conversations = np.pad(tokens, ((0, 0), (0, context - tokens.shape[1])))
    generation = generate(conversations, prompt_lengths, 0)
    going_on = ~generation.dropped
    for turn in range(1, config.turns):
        responses = generation.responses
        lengths = responses.mask.sum(1, dtype=np.int32)
        room = config.response_tokens - config.turn_tokens - (lengths - prompt_lengths)
        asking = going_on & responses.ended & (room >= 0)
        replies = write_replies(prompts, examples, responses, asking, room)
        generation = _leave_out(generation, replies.failed)
        generation = generation._replace(failures=(*generation.failures, *replies.failures))
        going_on = replies.lengths != EMPTY
        if not going_on.any():
            break
        conversations = append_replies(responses.tokens[:, :context], lengths, replies)
        lengths = np.where(going_on, lengths + replies.lengths, 0)
        generation = join_turns(generation, generate(conversations, lengths, turn), going_on)
        going_on &= ~generation.dropped
    return generation


def write_replies(
    prompts: Prompts,
    examples: list[Example],
    responses: Responses,
    asking: Bool[Array, " B"],
    room: Int[Array, " B"],
) -> Replies:
    """Let the task reply to the last turns of responses.

    With servers, each process has samples of its own, and replies to them. Without servers all processes have all
    samples, and the first one replies and shares its replies.

    Args:
        prompts: the source of prompts, with the task and the tokenizer.
        examples: the example of every sample.
        responses: the responses so far.
        asking: True for responses whose last turn gets a reply.
        room: the largest number of tokens of each reply. Longer ones are left out.

    Returns:
        The replies. Exceptions of the task are caught and reported in ``failures``.
    """
    task, tokenizer, config = prompts.task, prompts.tokenizer, prompts.config
    assert task.reply is not None
    samples = len(examples)
    tokens = np.full((samples, config.response_tokens), tokenizer.pad, np.int32)
    lengths, failed, failures = np.full(samples, EMPTY, np.int32), np.zeros(samples, bool), []
    for sample in np.flatnonzero(asking) if config.engine or is_first() else ():
        sampled = responses.tokens[sample][responses.response_mask[sample]]
        turns, example = tokenizer.decode_turns(sampled.tolist()), examples[sample]
        try:
            reply = task.reply(turns, example)
            encoded = None if reply is None else tokenizer.encode_reply(reply)
        except Exception as error:  # the user's task may raise anything
            failed[sample] = True
            failures.append(
                f"sample {sample}: prompt {example.prompt!r}, reply to turns {turns!r}: {error!r}"
            )
            continue
        if encoded is not None and len(encoded) <= room[sample]:
            tokens[sample, : len(encoded)], lengths[sample] = encoded, len(encoded)
    replies = Replies(tokens, lengths, failed, tuple(failures))
    if config.engine:
        return replies
    tokens, lengths, failed = from_first((tokens, lengths, failed))
    return replies._replace(tokens=np.asarray(tokens), lengths=np.asarray(lengths), failed=np.asarray(failed))


def append_replies(
    tokens: Int[Array, "B P"], lengths: Int[Array, " B"], replies: Replies
) -> Int[np.ndarray, "B P"]:
    """Append replies to conversations.

    Args:
        tokens: the tokens of the conversations, aligned to the left.
        lengths: the number of tokens in each conversation.
        replies: the replies.

    Returns:
        The tokens of conversations and replies, aligned to the left.

    >>> replies = Replies(np.array([[7, 8], [9, 0]]), np.array([2, EMPTY]), np.zeros(2, bool), ())
    >>> append_replies(np.array([[1, 2, 0, 0], [3, 0, 0, 0]]), np.array([2, 1]), replies).tolist()
    [[1, 2, 7, 8], [3, 0, 0, 0]]
    """
    place = np.arange(tokens.shape[1]) - lengths[:, None]
    in_reply = (place >= 0) & (place < replies.lengths[:, None])
    source = np.clip(place, 0, replies.tokens.shape[1] - 1)
    return np.where(in_reply, np.take_along_axis(replies.tokens, source, axis=1), tokens)


def join_turns(earlier: Generation, turn: Generation, going_on: Bool[Array, " B"]) -> Generation:
    """Join a turn with the turns before it.

    Args:
        earlier: the responses before this turn.
        turn: the result of generating after these responses and the replies to them.
        going_on: True for responses that have this turn.

    Returns:
        The responses with this turn. Those that the engine dropped have no tokens.
    """
    before, after, rows = earlier.responses, turn.responses, going_on[:, None]
    lengths = before.mask.sum(1, keepdims=True)
    # In the turns before nothing was sampled after the last token, so its experts are those of this turn.
    own = slice(None) if after.own is None else after.own
    recorded = ~rows | (np.arange(before.mask.shape[1])[None] < lengths - 1)
    responses = Responses(
        tokens=np.where(rows, after.tokens, before.tokens),
        mask=np.where(rows, after.mask, before.mask),
        response_mask=before.response_mask | after.response_mask,
        expert_ids=np.where(recorded[own][..., None, None], before.expert_ids, after.expert_ids),
        log_probs=np.where(before.response_mask, before.log_probs, after.log_probs),
        ended=np.where(going_on, after.ended, before.ended),
        own=after.own,
    )
    generation = earlier._replace(
        responses=responses,
        version=np.where(before.response_mask, earlier.version, turn.version),
        filled=np.where(going_on, turn.filled, earlier.filled),
        retried=earlier.retried + turn.retried,
    )
    return _leave_out(generation, turn.dropped)


def _leave_out(generation: Generation, dropped: Bool[Array, " B"]) -> Generation:
    """Drop some responses, too: they have no tokens."""
    if not dropped.any():
        return generation
    responses = generation.responses
    kept, own = ~dropped[:, None], slice(None) if responses.own is None else responses.own
    return generation._replace(
        responses=responses._replace(
            mask=responses.mask & kept,
            response_mask=responses.response_mask & kept,
            expert_ids=np.where(kept[own][..., None, None], responses.expert_ids, 0).astype(
                responses.expert_ids.dtype
            ),
            log_probs=np.where(kept, responses.log_probs, 0).astype(np.float32),
            ended=responses.ended & ~dropped,
        ),
        version=np.where(kept, generation.version, UNSAMPLED),
        dropped=generation.dropped | dropped,
        filled=np.where(dropped, 0, generation.filled),
    )


def turn_ends(responses: Responses, ends: Sequence[int]) -> Bool[np.ndarray, "B T"]:
    """Find the last token of every turn.

    Args:
        responses: the responses, on the host.
        ends: the tokens that end a turn.

    Returns:
        True on the last token of every turn. The last turn of a response may have no end.
    """
    lengths = responses.mask.sum(1, keepdims=True)
    is_last = np.arange(responses.mask.shape[1])[None] == lengths - 1
    return responses.response_mask & (np.isin(responses.tokens, ends) | is_last)


def count_tokens_run(responses: Responses, ends: Sequence[int]) -> int:
    """Count the tokens that the model ran on in all turns: every turn runs the conversation before it again."""
    return int((np.flatnonzero(turn_ends(responses, ends)) % responses.mask.shape[1] + 1).sum())


def measure_turns(responses: Responses, ends: Sequence[int], samples_at_once: int) -> dict[str, Any]:
    """Compute the metrics of responses of several turns, of which ``samples_at_once`` were decoded together."""
    last = turn_ends(responses, ends)
    turns, responded = last.sum(1), responses.response_mask.any(1)
    replies = responses.mask.sum(1) - responses.response_mask.argmax(1) - responses.response_mask.sum(1)
    number = np.cumsum(last, axis=1) - last
    first = np.arange(0, len(turns), samples_at_once)
    steps = sum(
        int(np.maximum.reduceat((responses.response_mask & (number == turn)).sum(1), first).sum())
        for turn in range(turns.max())
    )
    return {
        "response/turns": float(turns[responded].mean()),
        "response/reply_tokens": float(replies[responded].mean()),
        "response/slots_used_share": float(responses.response_mask.sum() / (samples_at_once * steps)),
    }
