"""Sample packing by token count: each sample once, even, and the same on the host and under jit."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.planning.sample_packing import micro_batches_for, pack_samples

SMALL = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=1)
LENGTHS = st.lists(st.integers(0, 2000), min_size=1, max_size=60)


def held_tokens(sample, tokens):
    """Return the tokens of each rank, ``[M, ranks]``, under an assignment."""
    by_position = np.append(tokens, 0)[np.asarray(sample)]
    return by_position.sum(-1).reshape(len(sample), -1)


def each_once(sample, samples):
    sample = np.asarray(sample)
    return np.array_equal(np.sort(sample[sample != EMPTY]), np.arange(samples))


def longest_first(tokens, bins):
    """Return the samples of every bin by a plain loop."""
    load, packed = [0] * bins, [[] for _ in range(bins)]
    for sample in sorted(range(len(tokens)), key=lambda sample: (-max(tokens[sample], 1), sample)):
        lightest = load.index(min(load))
        load[lightest] += max(tokens[sample], 1)
        packed[lightest].append(sample)
    return packed


@settings(deadline=None)
@given(tokens=LENGTHS, data=st.data())
def test_pack_samples_puts_the_longest_first_into_the_lightest(tokens, data):
    micro_batches = data.draw(st.integers(1, len(tokens)))
    sample = np.asarray(pack_samples(np.array(tokens), SMALL, num_micro_batches=micro_batches).sample)
    packed = longest_first(tokens, 4 * micro_batches)
    assert sample.shape == (micro_batches, 2, 2, max(map(len, packed)))
    for places, samples in zip(sample.reshape(len(packed), -1), packed, strict=True):
        assert places.tolist() == samples + [EMPTY] * (len(places) - len(samples))
    per_rank = held_tokens(sample, np.maximum(tokens, 1))
    assert per_rank.max() < per_rank.mean() + max(*tokens, 1) + 1e-6


@settings(deadline=None, max_examples=8)
@given(tokens=st.lists(st.integers(0, 2000), min_size=23, max_size=23), room=st.sampled_from([2, 3, 23]))
def test_pack_samples_packs_in_a_program_as_on_the_host(tokens, room):
    pack = functools.partial(pack_samples, topology=SMALL, num_micro_batches=3, samples_per_rank=room)
    sample = np.asarray(pack(np.array(tokens)).sample)
    assert sample.shape == (3, 2, 2, room)
    assert each_once(sample, 23)
    np.testing.assert_array_equal(jax.jit(pack)(np.array(tokens)).sample, sample)
    both = jax.vmap(pack)(np.stack([tokens, tokens[::-1]])).sample
    np.testing.assert_array_equal(both[0], sample)


@pytest.mark.parametrize(("samples", "room"), [(3, 3), (12, 4), (13, 8), (40, 16)])
def test_pack_samples_default_room_holds_all_under_jit(samples, room):
    """Under jit the room of bins depends on sizes alone, so other lengths do not recompile."""
    pack = jax.jit(functools.partial(pack_samples, topology=SMALL, num_micro_batches=3))
    for tokens in (np.full(samples, 7), np.array([10**6] * 2 + [1] * (samples - 2)), np.zeros(samples, int)):
        sample = pack(tokens).sample
        assert sample.shape == (3, 2, 2, room)
        assert each_once(sample, samples)
    assert pack._cache_size() == 1


def test_pack_samples_spreads_samples_without_tokens():
    sample = pack_samples(np.zeros(24, int), SMALL, num_micro_batches=2).sample
    assert sample.shape == (2, 2, 2, 3)
    assert each_once(sample, 24)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches=0 must be at least 1 and at most 11 samples"),
        ({"num_micro_batches": 12}, "num_micro_batches=12 must be at least 1 and at most 11 samples"),
        (
            {"samples_per_rank": 1},
            "samples_per_rank=1 is too small for 11 samples on 4 ranks in 2 micro-batches",
        ),
        ({"samples_per_rank": -3}, "samples_per_rank=-3 is too small for 11 samples on 4 ranks"),
    ],
)
def test_pack_samples_rejects_too_little_room(change, message, jit):
    pack = functools.partial(pack_samples, topology=SMALL, **{"num_micro_batches": 2, **change})
    with pytest.raises(ValueError, match=message):
        (jax.jit(pack) if jit else pack)(np.ones(11, int))


@settings(deadline=None)
@given(tokens=LENGTHS, spare=st.integers(0, 3000))
def test_micro_batches_for_is_the_fewest_within_the_budget(tokens, spare):
    tokens, budget = np.array(tokens), max(tokens) + spare + 1
    fewest = micro_batches_for(tokens, SMALL, tokens_per_rank=budget)
    for number in range(1, fewest + 1):
        sample = pack_samples(tokens, SMALL, num_micro_batches=number).sample
        assert (held_tokens(sample, tokens).max() <= budget) == (number == fewest)


@pytest.mark.parametrize(
    ("tokens", "budget", "message"),
    [
        ([3, 9, 4], 8, "sample 1 has 9 tokens, more than tokens_per_rank=8"),
        ([3], 0, "tokens_per_rank=0 must be an integer of at least 1"),
        ([], 8, "lengths is empty: there must be at least one sample"),
    ],
)
def test_micro_batches_for_rejects_budgets_that_hold_no_batch(tokens, budget, message):
    with pytest.raises(ValueError, match=message):
        micro_batches_for(np.array(tokens, int), SMALL, tokens_per_rank=budget)


@pytest.mark.parametrize(("nodes", "attention"), [(2, 1.010), (4, 1.012)])
def test_pack_samples_evens_out_recorded_lengths(shared, nodes, attention):
    """With four samples per rank on average, every rank is within its budget and attention is even to about 1%."""
    trace = np.load(shared / "traces" / "gptoss20b_rollouts.npz", allow_pickle=False)
    tokens = trace["lengths"][np.random.default_rng(0).permutation(352)[:256]]
    topology = Topology(num_nodes=nodes, ranks_per_node=4, num_experts=32, replica_slots=2)
    micro_batches = 16 // nodes
    per_rank = held_tokens(pack_samples(tokens, topology, num_micro_batches=micro_batches).sample, tokens)
    assert per_rank.max() <= max(1.05 * per_rank.mean(), tokens.max())
    assert per_rank.max(1).sum() / per_rank.mean(1).sum() <= attention
