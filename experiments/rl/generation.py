"""Generation: sampling from the policy on its own mesh, every token's experts recorded as it passes through them.

A step of decoding draws a token of every sample and at once runs the model on it. So the last token of a response,
which decides nothing that is sampled and which other engines therefore never run, has a route like all others, and
the recording is a complete `RoutingReplay`.

Routing is live, experts stay at home, and no token is ever dropped. A sample's randomness comes from its own key, so
what is sampled does not depend on where or beside what.

Log-probabilities are among all tokens of the vocabulary, those that top-p cuts off and those that may not be sampled
included: so recompute and update need not know what sampling left out, the update goes on making unlikely what is never
sampled here, and another engine that samples from the trained policy has the same log-probabilities.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Integer, Key

from experiments.rl.processes import on_every_host
from experiments.rl.tokens import BYTES
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.limits import check_not_negative
from relibra_jax.models import Cache, LanguageModel
from relibra_jax.models.cache import shard_cache
from relibra_jax.types import Array, RoutingReplay, check_shape


class Responses(NamedTuple):
    """Samples that one call generated; T = P + max_new_tokens."""

    tokens: Int[Array, "B T"]
    """Prompt, then response, then the filler ``pad``, which is never read."""
    mask: Bool[Array, "B T"]
    """True on prompt and response."""
    response: Bool[Array, "B T"]
    """True on sampled tokens, the one that ends the response among them."""
    expert_ids: Integer[Array, "B T L K"]
    """The experts of every token of prompt and response, zeros at padding."""
    log_probs: Float[Array, "B T"]
    """float32, of every sampled token among all tokens of the vocabulary, under the policy at its temperature (1 where
    that is 0): what `experiments.rl.policy.token_log_probs` recomputes. 0 elsewhere."""
    ended: Bool[Array, " B"]
    """Whether a token ended the response, rather than its length."""

    @property
    def replay(self) -> RoutingReplay:
        """The routing of all samples."""
        return RoutingReplay(self.expert_ids, self.mask)


class _State(NamedTuple):
    """What decoding carries from token to token. Step number s writes column s of arrays over R = max_new_tokens, and
    nothing else of them."""

    tokens: Int[jax.Array, "B R"]
    """The responses; what stands behind their ends means nothing."""
    expert_ids: Integer[jax.Array, "B R L K"]
    log_probs: Float[jax.Array, "B R"]
    cache: Cache
    logits: Float[Array, "B V"]
    """The logits of the next token of every sample."""
    lengths: Int[jax.Array, " B"]
    """The tokens of each response so far."""
    ended: Bool[jax.Array, " B"]
    """Whether a token has ended the response; there may also have been no prompt."""
    step: Int[jax.Array, ""]


class Watch(NamedTuple):
    """Looks at a generation that goes on."""

    every: int
    """The tokens between two looks."""
    look: Callable[[Bool[np.ndarray, " B"], Callable[[], Responses]], bool]
    """Called on the host, on all processes, as long as a sample goes on: with the samples that have ended, and a
    function that returns the responses so far, those that go on without their ends, before the look is over. Returns
    whether to look again."""


def generate(
    policy: LanguageModel,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    keys: Key[jax.Array, " B"],
    *,
    parallel: ExpertParallel,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    ends: Sequence[int] = BYTES.ends,
    pad: int = BYTES.pad,
    allowed: Bool[Array, " V"] | None = None,
    watch: Watch | None = None,
) -> Responses:
    """Sample a response to every prompt.

    The same compiled programs serve all prompts of a shape and all ``ends`` of a number, whatever temperature and top-p
    and however often somebody looks.

    Args:
        policy: the policy, on the mesh of ``parallel``.
        prompts: the prompts, aligned to the left; what stands behind a prompt is not read. B divides over the ranks.
        lengths: the tokens of each prompt; 0 where there is no sample.
        keys: a typed key for each sample: ``jax.random.fold_in(key, number of the sample)``, for instance.
        parallel: mesh and ways of live routing, `relibra_jax.nnx.Balancer.live`.
        max_new_tokens: the longest response, its end included.
        temperature: what divides the logits; 0 takes the likeliest token.
        top_p: only the likeliest tokens whose probabilities, at the temperature, first reach this sum are drawn.
        ends: the tokens that end a response, at least one; whichever is drawn first ends it.
        pad: the token that fills ``tokens`` of the result where there is none; what is sampled does not depend on it.
        allowed: the tokens that may be sampled, `experiments.rl.tokens.Tokenizer.allowed`; None for all of them.
        watch: looks at what is generated from time to time, which changes none of it.

    Returns:
        See `Responses`; sharded over the ranks.

    Raises:
        ValueError: before anything is compiled, if a shape, length or knob is out of its range, with the numbers.
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
    has_prompt = np.asarray(lengths) > 0
    prompt = _Prompts(jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32))
    ids, state = _begin(policy, prompt, jnp.int32(pad), parallel=parallel, room=max_new_tokens)
    knobs = (jnp.float32(temperature), jnp.float32(top_p), jnp.asarray(allowed))
    decode = functools.partial(
        _decode,
        policy,
        keys=keys,
        lengths=prompt.lengths,
        ends=jnp.array(ends, jnp.int32),
        knobs=knobs,
        parallel=parallel,
    )
    for column in range(watch.every, max_new_tokens, watch.every):
        state = decode(state, until=jnp.int32(column))
        ended = np.asarray(on_every_host(state.ended, parallel.mesh))
        if ended[has_prompt].all():
            break
        so_far = functools.partial(_join, prompt, ids, state, jnp.int32(pad), parallel=parallel)
        if not watch.look(ended, so_far):
            break
    state = decode(state, until=jnp.int32(max_new_tokens))
    return _join(prompt, ids, state, jnp.int32(pad), parallel=parallel)


def _check_prompts(prompts: Array, lengths: Array, keys: Array, parallel: ExpertParallel) -> None:
    check_tokens("prompts", prompts, parallel)
    for name, array in (("prompts", prompts[:, 0]), ("lengths", lengths), ("keys", keys)):
        check_shape(name, array.shape, prompts.shape[:1])
    longest = np.asarray(lengths)
    if longest.min() < 0 or longest.max() > prompts.shape[1]:
        raise ValueError(
            f"lengths {longest.min()}..{longest.max()}, prompts have room for 0..{prompts.shape[1]}"
        )


def _check_ends(ends: Sequence[int], allowed: Array, vocabulary: int) -> None:
    if not ends:
        raise ValueError("ends: at least one token must end a response")
    for end in ends:
        if not 0 <= end < vocabulary:
            raise ValueError(f"ends: {end} is no token of a vocabulary of {vocabulary}")
    check_shape("allowed", allowed.shape, (vocabulary,))
    never = [end for end in ends if not allowed[end]]
    if never:
        raise ValueError(f"ends: {never[0]} is not among the tokens that may be sampled")


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise ValueError unless tokens can be drawn at this temperature and top-p."""
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
    """One token and its log-probability, as `generate` says."""
    greedy = temperature == 0
    tempered = logits / jnp.where(greedy, 1, temperature)
    possible = jnp.where(allowed, tempered, -jnp.inf)
    # At 1 nothing is cut, to whatever a sum would be rounded, and nothing need be sorted.
    likely = jax.lax.cond(top_p < 1, _cut_to_likeliest, lambda possible, _: possible, possible, top_p)
    drawn = jax.random.categorical(key, likely)
    token = jnp.where(greedy, jnp.argmax(possible), drawn).astype(jnp.int32)
    return token, jax.nn.log_softmax(tempered)[token]


def _cut_to_likeliest(logits, top_p):
    """The logits of the likeliest tokens whose probabilities first reach ``top_p``; -inf for all others."""
    log_probs = jax.nn.log_softmax(logits)
    falling = jnp.sort(log_probs, descending=True)
    likelier = jnp.cumsum(jnp.exp(falling)) - jnp.exp(falling)
    # The likeliest token always stays.
    least = jnp.where(likelier < top_p, falling, jnp.inf).min()
    return jnp.where(log_probs >= least, logits, -jnp.inf)


class _Prompts(NamedTuple):
    tokens: Int[jax.Array, "B P"]
    lengths: Int[jax.Array, " B"]

    @property
    def mask(self) -> Bool[jax.Array, "B P"]:
        return jnp.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


@nnx.jit(static_argnames=("parallel", "room"))
def _begin(policy: LanguageModel, prompt: _Prompts, pad, *, parallel: ExpertParallel, room: int):
    """The routing of the prompts' tokens, and the state behind them."""
    samples, longest = prompt.tokens.shape
    tokens = jnp.where(prompt.mask, prompt.tokens, pad)
    cache = policy.empty_cache(samples, longest + room, parallel)
    output, cache = policy.extend(tokens, prompt.mask, cache, parallel=parallel)
    last = jnp.maximum(prompt.lengths - 1, 0)[:, None, None]
    state = _State(
        tokens=jnp.zeros((samples, room), jnp.int32),
        expert_ids=jnp.zeros((samples, room, *output.expert_ids.shape[2:]), output.expert_ids.dtype),
        log_probs=jnp.zeros((samples, room), jnp.float32),
        cache=cache,
        logits=jnp.take_along_axis(output.logits, last, axis=1)[:, 0],
        lengths=jnp.zeros(samples, jnp.int32),
        ended=jnp.zeros(samples, bool),
        step=jnp.int32(0),
    )
    ids = jax.lax.with_sharding_constraint(output.expert_ids, parallel.token_sharding)
    return ids, _on_ranks(state, parallel)


@nnx.jit(static_argnames="parallel", donate_argnames="state")
def _decode(
    policy: LanguageModel, state: _State, *, keys, lengths, ends, knobs, until, parallel: ExpertParallel
) -> _State:
    """Decode up to column ``until``, or until all samples have ended."""

    def goes_on(state: _State) -> Bool[jax.Array, " B"]:
        return (lengths > 0) & ~state.ended

    def next_token(state: _State) -> _State:
        def of_sample(key, logits):
            return draw(jax.random.fold_in(key, state.step), logits, *knobs)

        drawn, log_probs = jax.vmap(of_sample)(keys, state.logits)
        active = goes_on(state)
        output, cache = policy.extend(drawn[:, None], active[:, None], state.cache, parallel=parallel)

        def write(array, column):
            return jax.lax.dynamic_update_slice_in_dim(array, column, state.step, axis=1)

        return _State(
            write(state.tokens, drawn[:, None]),
            write(state.expert_ids, output.expert_ids),
            write(state.log_probs, log_probs[:, None]),
            cache,
            output.logits[:, 0],
            state.lengths + active,
            state.ended | (active & jnp.isin(drawn, ends)),
            state.step + 1,
        )

    end = jax.lax.while_loop(lambda state: (state.step < until) & goes_on(state).any(), next_token, state)
    return _on_ranks(end, parallel)


def _on_ranks(state: _State, parallel: ExpertParallel) -> _State:
    """Samples over the ranks, so that what one program returns is what the next one was compiled for."""
    alone = ("cache", "step")
    of_samples = {name: leaf for name, leaf in state._asdict().items() if name not in alone}
    everywhere = NamedSharding(parallel.mesh, PartitionSpec())
    return _State(
        **jax.lax.with_sharding_constraint(of_samples, parallel.token_sharding),
        cache=shard_cache(state.cache, parallel),
        step=jax.lax.with_sharding_constraint(state.step, everywhere),
    )


@functools.partial(jax.jit, static_argnames="parallel")
def _join(prompt: _Prompts, prompt_ids, state: _State, pad, *, parallel: ExpertParallel) -> Responses:
    """Prompts and the responses right behind them."""
    longest, room = prompt.tokens.shape[1], state.tokens.shape[1]
    position, lengths = jnp.arange(longest + room)[None], prompt.lengths[:, None]
    mask = position < lengths + state.lengths[:, None]
    response = mask & (position >= lengths)
    source = jnp.where(response, position - lengths + longest, jnp.minimum(position, longest))

    def join(of_prompts, of_responses, where, filler):
        both = jnp.concatenate([of_prompts, of_responses], axis=1)
        trailing = (..., *[None] * (both.ndim - 2))
        return jnp.where(where[trailing], jnp.take_along_axis(both, source[trailing], axis=1), filler)

    responses = Responses(
        tokens=join(prompt.tokens, state.tokens, mask, pad),
        mask=mask,
        response=response,
        expert_ids=join(prompt_ids, state.expert_ids, mask, 0),
        log_probs=join(jnp.zeros(prompt.tokens.shape), state.log_probs, response, 0),
        ended=state.ended,
    )
    return jax.lax.with_sharding_constraint(responses, parallel.token_sharding)
