"""Generation: sampling from the policy on its own mesh, with every token's experts recorded.

A decoding step draws a token for every sample and runs the model on it at once. So the last token of a response has a
route, too, and the recording is a complete `RoutingReplay`. Other engines never run the last token, because nothing is
sampled from its output.

Routing is live, experts stay at home, and no token is ever dropped. Every sample has its own random key. So its
response does not depend on the rank that holds it, nor on the other samples.

All samples of a call are decoded together, and the cache of keys and values has room for all of them.
`experiments.rl.waves` bounds their number. A rank runs a prompt once for all of its responses, a chunk of positions at
a time. Samples do not leave and enter while others decode: that is the work of a rollout engine.

Log-probabilities are over the whole vocabulary, including tokens that top-p cuts off or that may not be sampled. So
recompute and update need not know which tokens sampling left out. The update also keeps lowering the probability of
tokens that are never sampled here, and another engine that samples from the trained policy computes the same
log-probabilities.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Integer, Key

from experiments.rl.counts import count_on_ranks
from experiments.rl.processes import on_every_host
from experiments.rl.tokens import BYTES
from relibra_jax import Batch
from relibra_jax.contract.replay import id_dtype
from relibra_jax.contract.types import Array, RoutingReplay, check_shape
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.models import Cache, LanguageModel
from relibra_jax.models.cache import repeat_samples, shard_cache
from relibra_jax.support.limits import check_integer, check_not_negative


class Responses(NamedTuple):
    """The samples of one call of `generate`, with T = P + max_new_tokens."""

    tokens: Int[Array, "B T"]
    """The prompt, then the response, then the padding token ``pad``, which is never read."""
    mask: Bool[Array, "B T"]
    """True on prompt and response."""
    response_mask: Bool[Array, "B T"]
    """True on sampled tokens, including the one that ends the response."""
    expert_ids: Integer[Array, "B T L K"]
    """The experts of every token of prompt and response, 0 at padding."""
    log_probs: Float[Array, "B T"]
    """The log-probability of every sampled token over the whole vocabulary, float32, 0 elsewhere. It is at the sampling
    temperature (at 1 if that is 0), as `relibra_jax.models.token_log_probs` recomputes it."""
    ended: Bool[Array, " B"]
    """True for responses that an end token ended, False for those that reached the maximum length."""
    own: Int[np.ndarray, " b"] | None = None
    """The numbers of the samples of which this process has the experts, ``[b, T, L, K]``. None for all samples."""

    @property
    def replay(self) -> RoutingReplay:
        """The routing of the samples of which this process has the experts."""
        return RoutingReplay(self.expert_ids, self.mask if self.own is None else self.mask[self.own])


class DecodingState(NamedTuple):
    """The state of decoding. In arrays over R = max_new_tokens, decoding step s writes column s and nothing else."""

    tokens: Int[jax.Array, "B R"]
    """The responses. Tokens after the end of a response are meaningless."""
    expert_ids: Integer[jax.Array, "B R L K"]
    log_probs: Float[jax.Array, "B R"]
    cache: Cache
    hidden: Float[Array, "B D"]
    """The final hidden state of the last token of every sample."""
    lengths: Int[jax.Array, " B"]
    """The number of tokens in each response so far."""
    ended: Bool[jax.Array, " B"]
    """True for responses that an end token has ended. Sequences without a prompt stay False."""
    step: Int[jax.Array, ""]
    """The number of decoding steps so far."""


class Watch(NamedTuple):
    """A callback that `generate` calls while it is decoding."""

    every: int
    """The number of decoding steps between two calls."""
    look: Callable[[Bool[np.ndarray, " B"], Callable[[], Batch]], bool]
    """The callback ``look(ended, counts) -> again``. `generate` calls it on the host of every process, until all
    samples have ended or it returns False. ``ended`` is True for samples that have ended; in waves
    (`experiments.rl.waves`) also for those that reached the maximum length in an earlier wave. ``counts()`` counts the
    samples that have ended, with a sample of their routes (`experiments.rl.counts`); call it only inside the callback,
    and on every process."""


STOP_EVERY: Final = 8
"""The number of decoding steps between two questions to ``stop`` whether to end."""


def generate(
    policy: LanguageModel,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    keys: Key[jax.Array, " B"],
    *,
    parallel: ExpertParallel,
    max_new_tokens: int,
    responses_per_prompt: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    ends: Sequence[int] = BYTES.ends,
    pad: int = BYTES.pad,
    allowed: Bool[Array, " V"] | None = None,
    watch: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
) -> Responses:
    """Sample a response to every prompt.

    The compiled programs depend only on the shape of the prompts, ``max_new_tokens``, ``responses_per_prompt`` and the
    number of ``ends``. Other temperatures, top-p and watches use the same programs.

    Args:
        policy: the policy, on the mesh of ``parallel``.
        prompts: the prompts, aligned to the left. Tokens after a prompt are not read. B must divide over the ranks.
        lengths: the number of tokens in each prompt, 0 for sequences without a sample.
        keys: a typed random key for each sample, for example ``jax.random.fold_in(key, sample)``.
        parallel: the mesh and options of live routing, `relibra_jax.nnx.Balancer.live`.
        max_new_tokens: the maximum number of tokens in a response, its end included.
        responses_per_prompt: the number of successive samples that have the same prompt. A rank whose number of samples
            is a multiple or a divisor of it runs each of its prompts once. Other ranks run a prompt once for every c
            samples, where c is the greatest common divisor of both numbers.
        temperature: the sampling temperature, which divides the logits. 0 always takes the most likely token.
        top_p: the sum of probabilities, at the temperature, for nucleus sampling: only the fewest most likely tokens
            that reach it are drawn.
        ends: the tokens that end a response, at least one.
        pad: the padding token of the result. The responses do not depend on it.
        allowed: True on tokens that may be sampled, as `experiments.rl.tokens.Tokenizer.allowed` returns them. None
            allows all tokens.
        watch: a callback to call during decoding. It does not change the responses.
        stop: a function of the number of decoding steps so far, which says whether to end with the responses as they
            are. It is asked every `STOP_EVERY` steps, on the host of every process, and must answer the same on all.
            None decodes to the end.

    Returns:
        The responses, sharded over the ranks.

    Raises:
        ValueError: before anything is compiled, if a shape does not fit, a length or option is out of its range, or
            prompts differ that are run once.
    """
    if allowed is None:
        allowed = np.ones(policy.config.vocabulary, bool)
    if watch is None:
        watch = Watch(max_new_tokens, lambda *_: False)
    _check_prompts(prompts, lengths, keys, parallel)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    check_sampling(temperature, top_p)
    _check_ends(ends, allowed, policy.config.vocabulary)
    if watch.every < 1:
        raise ValueError(f"watch.every={watch.every} must be at least 1")
    check_integer("responses_per_prompt", responses_per_prompt, least=1)
    copies = math.gcd(len(prompts) // parallel.num_ranks, responses_per_prompt)
    _check_copies(np.asarray(prompts), np.asarray(lengths), copies, responses_per_prompt)
    has_prompt = np.asarray(lengths) > 0
    prompt = PaddedPrompts(jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32))
    ids, state = prefill(
        policy, prompt, jnp.int32(pad), parallel=parallel, max_new_tokens=max_new_tokens, copies=copies
    )
    sampling = (jnp.float32(temperature), jnp.float32(top_p), jnp.asarray(allowed))
    continue_decoding = functools.partial(
        decode,
        policy,
        keys=keys,
        lengths=prompt.lengths,
        ends=jnp.array(ends, jnp.int32),
        sampling=sampling,
        parallel=parallel,
    )
    if stop is not None:
        continue_decoding = functools.partial(_decode_until_stopped, continue_decoding, stop)
    for column in range(watch.every, max_new_tokens, watch.every):
        state = continue_decoding(state, until=jnp.int32(column))
        ended = np.asarray(on_every_host(state.ended, parallel.mesh))
        if ended[has_prompt].all():
            break
        so_far = functools.partial(_join, prompt, ids, state, jnp.int32(pad), parallel=parallel)

        def counts(ended=ended, so_far=so_far) -> Batch:
            return count_on_ranks(so_far().replay, ended, parallel)

        if not watch.look(ended, counts):
            break
    state = continue_decoding(state, until=jnp.int32(max_new_tokens))
    return _join(prompt, ids, state, jnp.int32(pad), parallel=parallel)


def _decode_until_stopped(
    continue_decoding: Callable[..., DecodingState],
    stop: Callable[[int], bool],
    state: DecodingState,
    *,
    until: Int[jax.Array, ""],
) -> DecodingState:
    """Decode up to column ``until``, or until all samples have ended or ``stop`` says so."""
    step, end = int(state.step), int(until)
    while step < end and not stop(step):
        goal = min(step + STOP_EVERY, end)
        state = continue_decoding(state, until=jnp.int32(goal))
        step = int(state.step)
        if step < goal:
            break
    return state


def _check_prompts(prompts: Array, lengths: Array, keys: Array, parallel: ExpertParallel) -> None:
    check_tokens("prompts", prompts, parallel)
    for name, array in (("prompts", prompts[:, 0]), ("lengths", lengths), ("keys", keys)):
        check_shape(name, array.shape, prompts.shape[:1])
    lengths = np.asarray(lengths)
    if lengths.min() < 0 or lengths.max() > prompts.shape[1]:
        raise ValueError(
            f"lengths {lengths.min()}..{lengths.max()} must be in 0..{prompts.shape[1]}, the width of prompts"
        )


def _check_copies(prompts: np.ndarray, lengths: np.ndarray, copies: int, responses_per_prompt: int) -> None:
    """Check that every ``copies`` successive samples have the same prompt."""
    mask = np.arange(prompts.shape[1]) < lengths[:, None]
    first = np.arange(len(prompts)) // copies * copies
    tokens = np.where(mask, prompts, 0)
    differs = (mask != mask[first]) | (tokens != tokens[first])
    if (mismatches := np.flatnonzero(differs.any(1))).size:
        sample = mismatches[0]
        raise ValueError(
            f"prompts: sample {sample} has another prompt than sample {first[sample]}, but with responses_per_prompt="
            f"{responses_per_prompt} they have the same"
        )


def _check_ends(ends: Sequence[int], allowed: Array, vocabulary: int) -> None:
    if not ends:
        raise ValueError("ends is empty: at least one token must end a response")
    for end in ends:
        if not 0 <= end < vocabulary:
            raise ValueError(f"ends: token {end} is not in the vocabulary of {vocabulary} tokens")
    check_shape("allowed", allowed.shape, (vocabulary,))
    forbidden = [end for end in ends if not allowed[end]]
    if forbidden:
        raise ValueError(f"ends: token {forbidden[0]} is not among the allowed tokens")


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise ValueError if the temperature is negative or infinite, or top-p is not above 0 and at most 1."""
    check_not_negative("temperature", temperature)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")


def draw(
    key: Key[jax.Array, ""],
    logits: Float[jax.Array, " V"],
    temperature: Float[jax.Array, ""],
    top_p: Float[jax.Array, ""],
    allowed: Bool[jax.Array, " V"],
) -> tuple[Int[jax.Array, ""], Float[jax.Array, ""]]:
    """Draw one token, and return it with its log-probability over the whole vocabulary; see `generate`."""
    greedy = temperature == 0
    tempered = logits / jnp.where(greedy, 1, temperature)
    possible = jnp.where(allowed, tempered, -jnp.inf)
    # At top-p 1 no token is cut off, however sums are rounded, and nothing needs sorting.
    likely = jax.lax.cond(top_p < 1, _cut_to_likeliest, lambda possible, _: possible, possible, top_p)
    drawn = jax.random.categorical(key, likely)
    token = jnp.where(greedy, jnp.argmax(possible), drawn).astype(jnp.int32)
    return token, jax.nn.log_softmax(tempered)[token]


def _cut_to_likeliest(logits, top_p):
    """Keep the logits of the fewest most likely tokens whose probabilities reach ``top_p``; -inf for all others."""
    log_probs = jax.nn.log_softmax(logits)
    descending = jnp.sort(log_probs, descending=True)
    likelier_sum = jnp.cumsum(jnp.exp(descending)) - jnp.exp(descending)
    # The sum before the most likely token is 0, so it always stays.
    threshold = jnp.where(likelier_sum < top_p, descending, jnp.inf).min()
    return jnp.where(log_probs >= threshold, logits, -jnp.inf)


class PaddedPrompts(NamedTuple):
    """The prompts of samples, aligned to the left."""

    tokens: Int[jax.Array, "B P"]
    """The tokens. Those after a prompt are not read."""
    lengths: Int[jax.Array, " B"]
    """The number of tokens in each prompt, 0 for sequences without a sample."""

    @property
    def mask(self) -> Bool[jax.Array, "B P"]:
        """True on the tokens of prompts."""
        return jnp.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


@nnx.jit(static_argnames=("parallel", "max_new_tokens", "copies"), graph_updates=False)
def prefill(
    policy: LanguageModel,
    prompt: PaddedPrompts,
    pad,
    *,
    parallel: ExpertParallel,
    max_new_tokens: int,
    copies: int,
):
    """Run the prompts; return the routing of their tokens and the state that decoding starts from.

    Every ``copies`` successive samples have the same prompt, which runs once.
    """
    samples, longest = prompt.tokens.shape
    chunk, columns = chunks_of_prompts(
        longest, samples // copies // parallel.num_ranks, parallel.chunk_tokens
    )
    room = columns + max_new_tokens
    prompt = PaddedPrompts(*(leaf[::copies] for leaf in prompt))
    # Attention reads up to the whole cache, so prompts of several responses get one that holds no more than prompts.
    cache = policy.empty_cache(samples // copies, columns if copies > 1 else room, parallel)
    ids, hidden, cache = _run_prompts(
        policy, prompt, pad, cache, chunk=chunk, columns=columns, parallel=parallel
    )
    ids, hidden = (jnp.repeat(leaf, copies, axis=0) for leaf in (ids[:, :longest], hidden))
    written = (samples, max_new_tokens)
    state = DecodingState(
        tokens=jnp.zeros(written, jnp.int32),
        expert_ids=jnp.zeros((*written, *ids.shape[2:]), ids.dtype),
        log_probs=jnp.zeros(written, jnp.float32),
        cache=repeat_samples(cache, copies, room, parallel) if copies > 1 else cache,
        hidden=hidden,
        lengths=jnp.zeros(samples, jnp.int32),
        ended=jnp.zeros(samples, bool),
        step=jnp.int32(0),
    )
    ids = jax.lax.with_sharding_constraint(ids, parallel.token_sharding)
    return ids, _on_ranks(state, parallel)


def chunks_of_prompts(longest: int, prompts: int, chunk_tokens: int) -> tuple[int, int]:
    """Divide the positions of prompts into equal chunks of at most ``chunk_tokens`` tokens of a rank.

    They bound the scores of attention. Experts run in such chunks anyway, also if a rank has more prompts than this.

    Args:
        longest: the width of the prompts.
        prompts: the number of prompts of a rank.
        chunk_tokens: the largest number of tokens of a rank in a chunk, `ExpertParallel.chunk_tokens`.

    Returns:
        The number of positions in a chunk, which is at least 1, and in all chunks together, at least ``longest``.

    >>> chunks_of_prompts(24, 32, 1024), chunks_of_prompts(1000, 3, 1024), chunks_of_prompts(5, 2000, 1024)
    ((24, 24), (334, 1002), (1, 5))
    """
    chunk = -(-longest // -(-longest * prompts // chunk_tokens))
    return chunk, -(-longest // chunk) * chunk


def _run_prompts(policy, prompt: PaddedPrompts, pad, cache: Cache, *, chunk: int, columns: int, parallel):
    """Run prompts in chunks, up to the end of the longest one.

    Returns:
        The routing ``[B, columns, L, K]``, the hidden states ``[B, D]`` of the last tokens, and the cache.
    """
    samples, longest = prompt.tokens.shape
    mask = jnp.pad(prompt.mask, ((0, 0), (0, columns - longest)))
    tokens = jnp.where(mask, jnp.pad(prompt.tokens, ((0, 0), (0, columns - longest))), pad)

    def run_chunk(carry):
        start, ids, hidden, cache = carry
        part = (jax.lax.dynamic_slice_in_dim(array, start, chunk, axis=1) for array in (tokens, mask))
        output, cache = policy.extend(*part, cache, parallel=parallel)
        ids = jax.lax.dynamic_update_slice_in_dim(ids, output.expert_ids, start, axis=1)
        last = prompt.lengths - 1 - start
        in_chunk = (last >= 0) & (last < chunk)
        at_last = jnp.take_along_axis(output.hidden, jnp.clip(last, 0, chunk - 1)[:, None, None], axis=1)[
            :, 0
        ]
        return start + chunk, ids, jnp.where(in_chunk[:, None], at_last, hidden), cache

    config = policy.config
    ids = jnp.zeros((samples, columns, config.moe_layers, config.top_k), id_dtype(config.num_experts))
    hidden = jnp.zeros((samples, config.width), jnp.dtype(config.dtype))
    ids, hidden = jax.lax.with_sharding_constraint((ids, hidden), parallel.token_sharding)
    _, *results = jax.lax.while_loop(
        lambda carry: carry[0] < prompt.lengths.max(), run_chunk, (jnp.int32(0), ids, hidden, cache)
    )
    return results


@nnx.jit(static_argnames="parallel", donate_argnames="state", graph_updates=False)
def decode(
    policy: LanguageModel,
    state: DecodingState,
    *,
    keys,
    lengths,
    ends,
    sampling,
    until,
    parallel: ExpertParallel,
) -> DecodingState:
    """Decode up to column ``until``, or until all samples have ended."""

    def unfinished(state: DecodingState) -> Bool[jax.Array, " B"]:
        return (lengths > 0) & ~state.ended

    def decoding_step(state: DecodingState) -> DecodingState:
        def draw_token(key, logits):
            return draw(jax.random.fold_in(key, state.step), logits, *sampling)

        # Each rank draws for its own samples, from whole rows of logits.
        logits = jax.lax.with_sharding_constraint(policy.logits(state.hidden), parallel.token_sharding)
        tokens, log_probs = jax.vmap(draw_token)(keys, logits)
        active = unfinished(state)
        output, cache = policy.extend(tokens[:, None], active[:, None], state.cache, parallel=parallel)

        def write(array, column):
            return jax.lax.dynamic_update_slice_in_dim(array, column, state.step, axis=1)

        return DecodingState(
            write(state.tokens, tokens[:, None]),
            write(state.expert_ids, output.expert_ids),
            write(state.log_probs, log_probs[:, None]),
            cache,
            output.hidden[:, 0],
            state.lengths + active,
            state.ended | (active & jnp.isin(tokens, ends)),
            state.step + 1,
        )

    state = jax.lax.while_loop(
        lambda state: (state.step < until) & unfinished(state).any(), decoding_step, state
    )
    return _on_ranks(state, parallel)


def _on_ranks(state: DecodingState, parallel: ExpertParallel) -> DecodingState:
    """Shard the samples of a state over the ranks, so that every program gets the sharding it was compiled for."""
    others = ("cache", "step")
    by_sample = {name: leaf for name, leaf in state._asdict().items() if name not in others}
    replicated = NamedSharding(parallel.mesh, PartitionSpec())
    return DecodingState(
        **jax.lax.with_sharding_constraint(by_sample, parallel.token_sharding),
        cache=shard_cache(state.cache, parallel),
        step=jax.lax.with_sharding_constraint(state.step, replicated),
    )


@functools.partial(jax.jit, static_argnames="parallel")
def _join(
    prompt: PaddedPrompts, prompt_ids, state: DecodingState, pad, *, parallel: ExpertParallel
) -> Responses:
    """Join every prompt and its response into one sequence, without a gap between them."""
    longest, max_new_tokens = prompt.tokens.shape[1], state.tokens.shape[1]
    position, lengths = jnp.arange(longest + max_new_tokens)[None], prompt.lengths[:, None]
    mask = position < lengths + state.lengths[:, None]
    response_mask = mask & (position >= lengths)
    source = jnp.where(response_mask, position - lengths + longest, jnp.minimum(position, longest))

    def join(prompt_part, response_part, where, padding):
        both = jnp.concatenate([prompt_part, response_part], axis=1)
        trailing = (..., *[None] * (both.ndim - 2))
        return jnp.where(where[trailing], jnp.take_along_axis(both, source[trailing], axis=1), padding)

    responses = Responses(
        tokens=join(prompt.tokens, state.tokens, mask, pad),
        mask=mask,
        response_mask=response_mask,
        expert_ids=join(prompt_ids, state.expert_ids, mask, 0),
        log_probs=join(jnp.zeros(prompt.tokens.shape), state.log_probs, response_mask, 0),
        ended=state.ended,
    )
    return jax.lax.with_sharding_constraint(responses, parallel.token_sharding)
