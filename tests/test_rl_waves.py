"""Waves return what one wave of the whole batch returns, and a watch sees the whole batch."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.runs import SMALL

from experiments.rl.configs import Train
from experiments.rl.counts import join_counts
from experiments.rl.generation import Watch
from experiments.rl.policy import TINY
from experiments.rl.waves import check_wave, generate_in_waves
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.models import make_model
from relibra_jax.nnx import ExpertParallel, expert_mesh
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.routes import TOKENS, Routes, token_places

# The vocabulary is so small that samples end by chance.
CONFIG = dataclasses.replace(
    TINY, width=16, layers=2, heads=4, kv_heads=2, head_width=6, expert_width=8, vocabulary=7
)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
MESH = expert_mesh(TOPOLOGY)
PARALLEL = ExpertParallel(mesh=MESH, topology=TOPOLOGY)
SAMPLES, WAVE, PER_PROMPT, LONGEST, ROOM = 24, 16, 4, 5, 6
PROMPTS = np.repeat(np.random.default_rng(0).integers(0, 7, (6, LONGEST), np.int32), PER_PROMPT, axis=0)
LENGTHS = np.repeat(np.array([5, 1, 3, 5, 2, 4]), PER_PROMPT)
KEYS = jax.random.split(jax.random.key(5), SAMPLES)


@functools.cache
def policy():
    model = make_model(CONFIG, TOPOLOGY, mesh=MESH, key=jax.random.key(0))
    # In a new model all tokens are about equally likely, so scale the head.
    model.head[...] = model.head[...] * 25
    return model


def sample(**options):
    options = {"max_new_tokens": ROOM, "ends": [3], "temperature": 1.5, **options}
    responses_per_prompt = options.pop("responses_per_prompt", PER_PROMPT)
    return generate_in_waves(
        *(policy(), PROMPTS, LENGTHS, KEYS),
        parallel=PARALLEL,
        responses_per_prompt=responses_per_prompt,
        **options,
    )


@pytest.fixture(scope="module")
def in_waves():
    """Sample in two waves, of which the second is not full; return the responses and what a watch saw."""
    looks = []

    def look(ended, counts):
        looks.append((ended, counts()))
        return True

    return sample(wave_samples=WAVE, watch=Watch(2, look)), looks


@pytest.mark.slow
def test_waves_return_what_one_wave_returns(in_waves):
    actual, _ = in_waves
    expected = sample(responses_per_prompt=1)
    for name in ("tokens", "mask", "response_mask", "expert_ids", "ended"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        assert getattr(actual, name).dtype == getattr(expected, name).dtype
    np.testing.assert_allclose(actual.log_probs, expected.log_probs, atol=5e-6)
    assert 0 < actual.ended.sum() < SAMPLES
    # A wave that is as large as the batch is the batch, without empty sequences.
    whole = sample(responses_per_prompt=1, wave_samples=SAMPLES + 8)
    jax.tree.map(np.testing.assert_array_equal, whole, expected)


@pytest.mark.slow
def test_watch_over_waves_sees_the_whole_batch(in_waves):
    actual, looks = in_waves
    # In each wave after two and four tokens, unless all have ended, and between the waves.
    assert 3 <= len(looks) <= 5
    waves = np.array([ended[WAVE:].any() for ended, _ in looks])
    assert waves.any()
    assert not waves.all()
    complete = 0
    for ended, (load, tokens, routes, *_) in looks:
        assert ended.sum() >= complete
        complete = ended.sum()
        # Samples of the second wave begin when those of the first are complete, whether they have ended or not.
        assert ended[:WAVE].all() or not ended[WAVE:].any()
        replay = RoutingReplay(actual.expert_ids, actual.mask & ended[:, None])
        np.testing.assert_array_equal(load, sample_load(replay, num_experts=CONFIG.num_experts))
        np.testing.assert_array_equal(tokens, np.where(ended, actual.mask.sum(1), 0))
        # Each sample has its share of the sampled routes, and they are its own.
        shares = np.bincount(routes.sample, minlength=SAMPLES) / len(routes.sample)
        np.testing.assert_allclose(shares, tokens / tokens.sum(), atol=2e-4)
        for sample in np.unique(routes.sample):
            of_sample = np.unique(routes.expert_ids[routes.sample == sample], axis=0)
            whole = actual.expert_ids[sample][actual.mask[sample]]
            np.testing.assert_array_equal(of_sample, np.unique(whole, axis=0))
    assert not actual.ended[:WAVE].all(), "some responses of the first wave reached the maximum length"


@pytest.mark.slow
def test_waves_use_the_same_programs_and_call_no_watch_that_has_returned_false(in_waves, caplog):
    looks = []
    with jax.log_compiles(), caplog.at_level("WARNING"):
        again = sample(wave_samples=WAVE, watch=Watch(1, lambda *arguments: bool(looks.append(arguments))))
    assert "(prefill)" not in caplog.text
    assert "(decode)" not in caplog.text
    assert len(looks) == 1
    jax.tree.map(np.testing.assert_array_equal, again, in_waves[0])


@pytest.mark.parametrize(("wave_samples", "nearest"), [(12, "8 and 16"), (4, "8")])
def test_wave_divides_over_the_ranks(wave_samples, nearest):
    message = f"wave_samples={wave_samples} must divide evenly over 8 ranks; nearest: {nearest}$"
    with pytest.raises(ValueError, match=message):
        sample(wave_samples=wave_samples)
    with pytest.raises(ValueError, match=message):
        Train(**(SMALL | {"policy": "tiny", "wave_samples": wave_samples}))
    check_wave(16, 8)


def test_waves_bound_the_memory_that_a_run_needs(monkeypatch):
    config = Train(prompts=2, responses_per_prompt=32, prompt_tokens=4096, response_tokens=4096, updates=2)
    a_sample = 8192 * TINY.cache_bytes
    monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: 2 * a_sample)
    with pytest.raises(
        ValueError, match=r"generating 8 samples of 8192 tokens at a time on each rank \(wave_samples\) needs"
    ):
        dataclasses.replace(config)
    assert dataclasses.replace(config, wave_samples=16).samples_at_once == 16
    assert dataclasses.replace(
        config, prompts=1, updates=1, responses_per_prompt=8, micro_batches=1, wave_samples=16
    )


def test_joined_counts_of_one_part_are_the_part():
    """Sampled routes of a part are taken again, each in its place; of two parts, each gets its share."""
    lengths, rng = np.array([30_000, 13_000]), np.random.default_rng(0)
    sample, _ = token_places(lengths, TOKENS)
    part = Batch(np.ones((2, 1, 4), np.int32), lengths, Routes(rng.integers(4, size=(TOKENS, 1, 1)), sample))
    assert part.routes is not None
    one, two = (join_counts([part] * count, 2 * count).routes for count in (1, 2))
    assert one is not None
    assert two is not None
    jax.tree.map(np.testing.assert_array_equal, one, part.routes)
    assert abs(np.bincount(two.sample) - TOKENS * np.tile(lengths, 2) / (2 * lengths.sum())).max() <= 1
