"""Generation records log-probabilities and experts that equal those of a forward pass over whole sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from experiments.rl.generation import Watch, chunks_of_prompts, draw, generate
from experiments.rl.policy import TINY
from relibra_jax.contract.replay import check_replay
from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.models import make_model, token_log_probs
from relibra_jax.nnx import ExpertParallel, expert_mesh
from relibra_jax.planning.batch import count_batch

# The vocabulary is so small that samples end by chance.
CONFIG = dataclasses.replace(
    TINY, width=16, layers=2, heads=4, kv_heads=2, head_width=6, expert_width=8, vocabulary=7
)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
MESH = expert_mesh(TOPOLOGY)
PARALLEL = ExpertParallel(mesh=MESH, topology=TOPOLOGY)
SAMPLES, LONGEST, ROOM, EOS, PAD = 16, 5, 6, 3, 256
RNG = np.random.default_rng(0)
PROMPTS = RNG.integers(0, 7, (SAMPLES, LONGEST)).astype(np.int32)
LENGTHS = RNG.integers(1, LONGEST + 1, SAMPLES)
LENGTHS[15] = 0
KEYS = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(5)))(jnp.arange(SAMPLES))


@functools.cache
def policy():
    model = make_model(CONFIG, TOPOLOGY, mesh=MESH, key=jax.random.key(0))
    # In a new model all tokens are about equally likely, so scale the head.
    model.head[...] = model.head[...] * 25
    return model


def sample(prompts=PROMPTS, lengths=LENGTHS, keys=KEYS, **options):
    options = {"parallel": PARALLEL, "max_new_tokens": ROOM, "ends": [EOS], **options}
    actual = generate(policy(), prompts, lengths, keys, **options)
    return jax.tree.map(np.asarray, actual)


@functools.cache
def drawn():
    return sample(temperature=1.5, top_p=0.9)


@functools.cache
def full_forward():
    """Return a function that runs the model on whole sequences."""
    run = nnx.jit(lambda policy, tokens, mask: policy(tokens, mask, parallel=PARALLEL))
    return lambda actual: run(policy(), actual.tokens, actual.mask)


@functools.cache
def recompute():
    """Return a function that computes log-probabilities from the hidden states of whole sequences."""
    run = nnx.jit(token_log_probs, static_argnames=("parallel", "temperature"))
    return lambda output, actual, temperature=1.0: run(
        *(policy(), output.hidden, np.minimum(actual.tokens, 6)), parallel=PARALLEL, temperature=temperature
    )


@pytest.mark.slow
def test_generate_returns_prompts_followed_by_responses():
    actual = drawn()
    total, behind = actual.mask.sum(-1), np.arange(LONGEST + ROOM) >= LENGTHS[..., None]
    np.testing.assert_array_equal(actual.mask, np.arange(LONGEST + ROOM) < total[..., None])
    np.testing.assert_array_equal(actual.response_mask, actual.mask & behind)
    assert (actual.tokens[~actual.mask] == PAD).all()
    for place in np.ndindex(LENGTHS.shape):
        tokens, prompt = actual.tokens[place][: total[place]].tolist(), LENGTHS[place]
        assert tokens[:prompt] == PROMPTS[place][:prompt].tolist()
        if prompt:
            response = tokens[prompt:]
            assert EOS not in response[:-1]
            assert actual.ended[place] == (response[-1] == EOS)
            assert actual.ended[place] or len(response) == ROOM
        else:
            assert not tokens
            assert not actual.ended[place]
    # Some samples end early, and some do not.
    assert len(set(actual.response_mask.sum(-1).ravel().tolist())) > 3
    assert 0 < actual.ended.sum() < actual.ended.size - 1


@pytest.mark.slow
def test_generate_log_probs_and_routes_equal_those_of_one_forward_pass():
    actual, output = drawn(), full_forward()(drawn())
    expected = np.where(actual.response_mask, recompute()(output, actual, 1.5), 0)
    np.testing.assert_allclose(actual.log_probs, expected, atol=5e-6)
    assert (actual.log_probs[actual.response_mask] < 0).all()
    # All tokens have routes, including prompts and the last token of a response.
    np.testing.assert_array_equal(actual.expert_ids[actual.mask], output.expert_ids[actual.mask])
    assert not actual.expert_ids[~actual.mask].any()
    replay = actual.replay
    assert replay.expert_ids.shape == (SAMPLES, LONGEST + ROOM, CONFIG.layers, CONFIG.top_k)
    assert replay.expert_ids.dtype == np.uint8
    np.testing.assert_array_equal(replay.expert_ids, actual.expert_ids)
    check_replay(replay, num_experts=CONFIG.num_experts)


@pytest.mark.slow
def test_generate_stops_at_any_of_several_ends():
    _, other = ends = (EOS, 5)
    actual, one = sample(temperature=1.5, top_p=0.9, ends=ends), drawn()
    last = actual.tokens[np.arange(SAMPLES), actual.mask.sum(-1) - 1]
    np.testing.assert_array_equal(actual.ended, np.isin(last, ends) & (LENGTHS > 0))
    assert {EOS, other} <= set(last[actual.ended].tolist())
    # Nothing changes up to the first end token, and nothing follows it.
    np.testing.assert_array_equal(actual.tokens[actual.mask], one.tokens[actual.mask])
    before_last = actual.response_mask & (np.arange(LONGEST + ROOM) < actual.mask.sum(-1)[:, None] - 1)
    assert not np.isin(actual.tokens[before_last], ends).any()


@pytest.mark.slow
def test_generate_does_not_recompile_for_other_ends_and_padding(caplog):
    options = {"temperature": 1.5, "top_p": 0.9}
    with jax.log_compiles(), caplog.at_level("WARNING"):
        first = sample(ends=(EOS, 5, 1), **options)
        assert "(decode)" in caplog.text
        caplog.clear()
        swapped = sample(ends=(1, 5, EOS), pad=0, **options)
        sample(ends=(2, 4, 6), pad=6, **options)
        assert "(decode)" not in caplog.text
    np.testing.assert_array_equal(swapped.tokens, np.where(first.mask, first.tokens, 0))
    for name in ("mask", "response_mask", "expert_ids", "log_probs", "ended"):
        np.testing.assert_array_equal(getattr(swapped, name), getattr(first, name))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_generate_never_samples_tokens_that_are_not_allowed(temperature):
    allowed = ~np.isin(np.arange(7), (1, 6))
    free = sample(temperature=temperature)
    assert not allowed[free.tokens[free.response_mask]].all()
    actual = sample(temperature=temperature, allowed=allowed)
    assert allowed[actual.tokens[actual.response_mask]].all()
    # Log-probabilities are over all tokens, as training recomputes them.
    log_probs = recompute()(full_forward()(actual), actual, temperature or 1.0)
    np.testing.assert_allclose(actual.log_probs, np.where(actual.response_mask, log_probs, 0), atol=5e-6)


def test_generate_is_greedy_at_temperature_0():
    actual = sample(temperature=0.0)
    output = full_forward()(actual)
    best = np.roll(np.argmax(policy().logits(output.hidden), -1), 1, axis=-1)
    np.testing.assert_array_equal(actual.tokens[actual.response_mask], best[actual.response_mask])
    log_probs = recompute()(output, actual)
    np.testing.assert_allclose(actual.log_probs, np.where(actual.response_mask, log_probs, 0), atol=5e-6)


def test_generate_does_not_depend_on_the_places_of_samples():
    order = np.random.default_rng(2).permutation(SAMPLES)
    moved = sample(PROMPTS[order], LENGTHS[order], KEYS[order], temperature=1.5, top_p=0.9)
    for name in ("tokens", "mask", "expert_ids", "ended"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(drawn(), name)[order])
    np.testing.assert_allclose(moved.log_probs, drawn().log_probs[order], atol=5e-6)
    other = sample(keys=jax.vmap(lambda key: jax.random.fold_in(key, 1))(KEYS))
    assert (other.tokens != drawn().tokens).any()


@pytest.mark.slow
def test_watch_gets_ended_responses_and_changes_none():
    looks = []

    def look(ended, counts):
        looks.append((ended, counts()))
        return True

    actual = sample(temperature=1.5, top_p=0.9, watch=Watch(2, look))
    for name, value in drawn()._asdict().items():
        np.testing.assert_array_equal(getattr(actual, name), value)
    assert len(looks) == (ROOM - 1) // 2
    sampled = actual.response_mask.sum(1)
    for columns, (ended, counts) in zip(range(2, ROOM, 2), looks, strict=True):
        np.testing.assert_array_equal(ended, actual.ended & (sampled <= columns))
        replay = RoutingReplay(np.asarray(actual.expert_ids), np.asarray(actual.mask) & ended[:, None])
        # The routes are those that planning samples from the whole batch.
        expected = count_batch(replay, PARALLEL.topology)
        jax.tree.map(np.testing.assert_array_equal, counts, expected)
    seen = []
    actual = sample(
        temperature=1.5, top_p=0.9, watch=Watch(1, lambda *arguments: bool(seen.append(arguments)))
    )
    assert len(seen) == 1, "a callback that returns False is not called again"
    np.testing.assert_array_equal(actual.tokens, drawn().tokens)
    # After all samples have ended, the callback is not called.
    everything, looks[:] = range(7), []
    assert sample(ends=everything, watch=Watch(1, look)).ended.sum() == SAMPLES - 1
    assert not looks


@pytest.mark.slow
def test_stop_ends_responses_where_they_are_and_changes_none(monkeypatch):
    monkeypatch.setattr("experiments.rl.generation.STOP_EVERY", 2)
    asked = []

    def stop(step):
        asked.append(step)
        return step == 4

    whole, stopped = drawn(), sample(temperature=1.5, top_p=0.9, stop=stop)
    assert asked == [0, 2, 4]
    first = np.arange(LONGEST + ROOM) < LENGTHS[:, None] + 4
    np.testing.assert_array_equal(stopped.mask, whole.mask & first)
    for name in ("tokens", "expert_ids", "log_probs"):
        actual, expected = getattr(stopped, name), getattr(whole, name)
        np.testing.assert_array_equal(actual[stopped.mask], expected[stopped.mask], err_msg=name)
    np.testing.assert_array_equal(stopped.ended, whole.ended & (whole.response_mask.sum(1) <= 4))
    for leaf, other in zip(sample(temperature=1.5, top_p=0.9, stop=lambda _: False), whole, strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.slow
def test_prompt_of_several_responses_runs_once_in_chunks_with_the_same_results():
    first = np.arange(SAMPLES) // 2 * 2
    prompts, lengths = PROMPTS[first], LENGTHS[first]
    lengths[:2] = 0
    expected = sample(prompts, lengths, temperature=1.5, top_p=0.9)
    assert chunks_of_prompts(LONGEST, prompts=1, chunk_tokens=3) == (3, 6)
    chunked = dataclasses.replace(PARALLEL, chunk_tokens=3)
    actual = sample(prompts, lengths, temperature=1.5, top_p=0.9, responses_per_prompt=2, parallel=chunked)
    for name in ("tokens", "mask", "response_mask", "expert_ids", "ended"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
    np.testing.assert_allclose(actual.log_probs, expected.log_probs, atol=5e-6)
    # The responses to a prompt differ, and some prompts end in the first chunk and some in the second.
    assert (actual.tokens[::2] != actual.tokens[1::2]).any()
    assert {True, False} == set(lengths[2:] > 3)


@functools.cache
def many_draws():
    run = jax.vmap(draw, (0, None, None, None, None))
    return jax.jit(lambda *args: run(jax.random.split(jax.random.key(3), 20_000), *args))


@pytest.mark.parametrize("allowed", [np.ones(5, bool), np.arange(5) != 1], ids=["all", "not the likeliest"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.75), (2.0, 0.4), (0, 1)])
def test_draw_follows_temperature_top_p_and_allowed(temperature, top_p, allowed):
    chance = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    options = (*np.float32([temperature, top_p]), allowed)
    tokens, log_probs = many_draws()(np.log(chance, dtype=np.float32), *options)
    tempered = chance ** (1 / (temperature or 1))
    tempered /= tempered.sum()
    np.testing.assert_allclose(log_probs, np.log(tempered)[np.asarray(tokens)], atol=1e-5)
    # Top-p applies to the allowed tokens.
    tempered = np.where(allowed, tempered, 0) / tempered[allowed].sum()
    kept, reached = np.zeros(5, bool), 0.0
    for token in np.argsort(-tempered):
        if reached < (top_p if temperature else 1e-9):
            kept[token], reached = True, reached + tempered[token]
    expected = np.where(kept, tempered, 0)
    actual = np.bincount(tokens, minlength=5) / len(tokens)
    np.testing.assert_allclose(actual, expected / expected.sum(), atol=0.015)
    assert not actual[~kept].any()


@pytest.fixture
def without_type_checks():
    """Disable the tests' checks of annotations, so that the functions' own checks raise, as they do for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_generate_stays_on_the_mesh_and_rejects_bad_input(without_type_checks):
    def call(prompts=PROMPTS, lengths=LENGTHS, keys=KEYS, **options):
        options = {"max_new_tokens": ROOM, "ends": [EOS], **options}
        return generate(policy(), prompts, lengths, keys, parallel=PARALLEL, **options)

    for leaf in jax.tree.leaves(call()):
        assert leaf.sharding.is_equivalent_to(PARALLEL.token_sharding, leaf.ndim)
    with pytest.raises(ValueError, match=r"prompts: expected \[B, ...\] with B a multiple of 8 .*\(12, 5\)"):
        call(prompts=PROMPTS[:12])
    with pytest.raises(ValueError, match=r"prompts: expected shape \(16,\), found \(16, 1\)"):
        call(prompts=PROMPTS[..., None])
    with pytest.raises(ValueError, match=r"lengths: expected shape \(16,\), found \(15,\)"):
        call(lengths=LENGTHS[:15])
    with pytest.raises(ValueError, match=r"lengths 1\.\.6 must be in 0\.\.5, the width of prompts"):
        call(lengths=np.maximum(LENGTHS, 1) + (np.maximum(LENGTHS, 1) == LENGTHS.max()) * (6 - LENGTHS.max()))
    with pytest.raises(
        ValueError, match=r"prompts: sample 1 has another prompt than sample 0, but with resp.*=4"
    ):
        call(responses_per_prompt=4)
    with pytest.raises(ValueError, match="responses_per_prompt=0 must be an integer of at least 1"):
        call(responses_per_prompt=0)
    with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):
        call(max_new_tokens=0)
    with pytest.raises(ValueError, match=r"watch\.every=0 must be at least 1"):
        call(watch=Watch(0, print))
    with pytest.raises(ValueError, match=r"temperature=-1.0 must be at least 0"):
        call(temperature=-1.0)
    with pytest.raises(ValueError, match=r"top_p=0.0 must be above 0 and at most 1"):
        call(top_p=0.0)
    with pytest.raises(ValueError, match="ends: token 7 is not in the vocabulary of 7 tokens"):
        call(ends=[EOS, 7])
    with pytest.raises(ValueError, match="ends is empty: at least one token must end a response"):
        call(ends=[])
    with pytest.raises(ValueError, match=r"allowed: expected shape \(7,\), found \(6,\)"):
        call(allowed=np.ones(6, bool))
    with pytest.raises(ValueError, match="ends: token 3 is not among the allowed tokens"):
        call(allowed=np.arange(7) != EOS)
