"""Each workload of the imbalance benchmark has the property that it is named after."""

import functools

import numpy as np
import pytest

from relibra_jax.contract.replay import check_replay, sample_load
from relibra_jax.traces.imbalance_benchmark import WORKLOADS, imbalance_benchmark
from relibra_jax.traces.read import read_trace

STEPS, SAMPLES, TOKENS, EXPERTS, TOP_K = 24, 32, 64, 32, 4
HEAT = 3 / 4 * 4 + 1 / 4
"""The load of a hot expert / the mean: three of four tokens use a quarter of the experts, the fourth uses all."""


@functools.cache
def drawn(name):
    return imbalance_benchmark(name)


def loads(name):
    """Token copies / the mean over experts, [step, layer, expert]."""
    per_sample = np.asarray(sample_load(drawn(name).replay, num_experts=EXPERTS))
    load = per_sample.reshape(STEPS, SAMPLES, -1, EXPERTS).sum(1)
    return load / load.mean(-1, keepdims=True)


def hot(load):
    return load > 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_imbalance_benchmark_traces_are_whole_and_named(name):
    trace = drawn(name)
    check_replay(trace.replay, num_experts=EXPERTS)
    assert trace.name == f"{name} {WORKLOADS[name].title}"
    assert trace.synthetic
    assert trace.note.startswith("synthetic")
    assert trace.replay.mask.sum() == STEPS * SAMPLES * TOKENS
    np.testing.assert_array_equal(trace.replay.expert_ids, read_trace(name).replay.expert_ids)
    other = imbalance_benchmark(name, seed=1).replay.expert_ids
    assert (other != trace.replay.expert_ids).any() == (name != "W0"), "W0 draws nothing"


def test_imbalance_benchmark_w0_is_exactly_balanced():
    assert (loads("W0") == 1).all()


def test_imbalance_benchmark_w1_has_fixed_hot_experts_that_lie_anywhere():
    load = loads("W1")
    assert (hot(load).sum(-1) == EXPERTS // 4).all()
    assert (hot(load) == hot(load)[0, 0]).all()
    assert set(np.diff(np.flatnonzero(hot(load)[0, 0]))) != {1}
    np.testing.assert_allclose(load[hot(load)], HEAT, rtol=0.15)


def test_imbalance_benchmark_w2_heats_one_rank_of_four():
    by_rank = loads("W2").reshape(STEPS, -1, 4, 8).mean(-1)
    np.testing.assert_allclose(by_rank[..., 0], HEAT, rtol=0.05)
    np.testing.assert_allclose(by_rank[..., 1:], 1 / 4, rtol=0.15)


def test_imbalance_benchmark_w3_spreads_the_heat_of_w2_evenly_over_ranks():
    load = loads("W3")
    assert (hot(load).reshape(STEPS, -1, 8, 4).sum(-1) == 1).all(), "one hot expert on each of 8 ranks"
    np.testing.assert_allclose(load[hot(load)].mean(), loads("W2")[..., :8].mean(), rtol=0.01)


def test_imbalance_benchmark_w4_is_uneven_at_the_source_alone():
    lengths = drawn("W4").replay.mask.sum(1).reshape(STEPS, SAMPLES)
    assert (lengths.max(1) * 4 == lengths.sum(1)).all()
    assert (np.sort(lengths, 1)[:, :-1] <= TOKENS).all()
    assert loads("W4").max() < 1.3


def test_imbalance_benchmark_w5_leaves_half_of_the_ranks_without_tokens():
    load = loads("W5")
    assert (load[..., : EXPERTS // 2] == 0).all()
    np.testing.assert_allclose(load[..., EXPERTS // 2 :], 2, rtol=0.2)


def test_imbalance_benchmark_w6_moves_its_hotspot_every_third_step():
    first = hot(loads("W6")).argmax(-1)[:, 0]
    np.testing.assert_array_equal(first, np.arange(STEPS) // 3 * 8 % EXPERTS)


def test_imbalance_benchmark_w7_bursts_in_every_fourth_step():
    heat = loads("W7")[..., : EXPERTS // 4].mean((1, 2))
    burst = np.arange(STEPS) % 4 == 3
    np.testing.assert_allclose(heat[burst], 2 / 4 * 4 + 2 / 4, rtol=0.05)
    np.testing.assert_allclose(heat[~burst], 1, rtol=0.05)


def test_imbalance_benchmark_has_the_sizes_that_are_given():
    trace = imbalance_benchmark(
        "W2",
        steps=2,
        samples_per_step=4,
        tokens_per_sample=8,
        layers=1,
        num_experts=300,
        top_k=8,
        hot_experts=10,
    )
    ids = trace.replay.expert_ids
    assert (ids.shape, ids.dtype) == ((8, 8, 1, 8), np.uint16)
    assert (ids[:, [0, 1, 2, 4]] < 10).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "W8"}, "workload 'W8' must be one of W0, W1"),
        ({"name": "W1", "hot_experts": 3}, "hot_experts=3 must be an integer of at least 4 and at most 32"),
        ({"name": "W1", "top_k": 33}, "top_k=33 must be an integer of at least 1 and at most 32"),
        ({"name": "W5", "top_k": 17}, "W5: top-17 needs more experts than the 16 that get tokens"),
        ({"name": "W4", "samples_per_step": 3}, "samples_per_step=3 must be an integer of at least 4"),
    ],
)
def test_imbalance_benchmark_rejects_what_cannot_be_drawn(options, message):
    with pytest.raises(ValueError, match=message):
        imbalance_benchmark(**options)


def test_imbalance_benchmark_counts_memory_before_it_is_taken(monkeypatch):
    monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: 2**20)
    with pytest.raises(ValueError, match="W1: 768 samples x 64 tokens x 4 layers needs 1 GiB of memory"):
        imbalance_benchmark("W1")
