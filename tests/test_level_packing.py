"""Packing for attention: each sample once, within the memory of packing by tokens, and close to the least wait."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_jax.contract.types import EMPTY, Price, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.long_samples import least_waits, split_exchange, split_waits
from relibra_jax.cost.models import MODELS
from relibra_jax.planning.level_packing import pack_by_level
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.planning.starts import start_assignment

SMALL = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=1)
LARGE = Topology(num_nodes=2, ranks_per_node=8, num_experts=32, replica_slots=0)
PRICE = Price(token=1.0, pair=1.0, copy=1.0, crossing=0.0, spread=0.0, move=0.0, push=0.0)


def waits(packing, lengths):
    """Return the squared lengths of the busiest rank of each micro-batch, and the tokens of the fullest rank."""
    held = np.append(lengths, 0).astype(float)[np.asarray(packing.sample)]
    return (held**2).sum(-1).max((1, 2)), held.sum(-1).max()


def lognormal(samples, *, seed, sigma=1.0, most=16_384):
    lengths = np.random.default_rng(seed).lognormal(np.log(4096) - sigma**2 / 2, sigma, samples)
    return np.clip(lengths, 8, most).astype(int)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 2000), min_size=3, max_size=40), data=st.data())
def test_start_assignment_never_waits_longer_or_holds_more_than_packing_by_tokens(lengths, data):
    lengths = np.array(lengths)
    micro_batches = data.draw(st.integers(1, len(lengths)))
    by_tokens = pack_samples(lengths, SMALL, num_micro_batches=micro_batches)
    packing = start_assignment(lengths, SMALL, num_micro_batches=micro_batches, price=PRICE)
    sample = np.asarray(packing.sample)
    assert np.array_equal(np.sort(sample[sample != EMPTY]), np.arange(len(lengths)))
    (before, most_before), (after, most_after) = (waits(each, lengths) for each in (by_tokens, packing))
    assert after.sum() <= before.sum()
    # A sample without tokens counts as one, so that such samples spread.
    assert most_after <= max(most_before, waits(by_tokens, np.maximum(lengths, 1))[1])
    assert after.sum() >= least_waits(
        lengths, SMALL, num_micro_batches=micro_batches, tokens_per_rank=max(int(most_after), lengths.max())
    ) * (1 - 1e-9)


@pytest.mark.parametrize(("micro_batches", "per_rank", "share"), [(4, 1, 0.93), (4, 2, 0.93), (4, 4, 0.96)])
def test_long_samples_together_save_attention(micro_batches, per_rank, share):
    """On log-normal lengths the sum of the busiest ranks falls, and is close to what any packing must leave."""
    before, after, least = np.zeros(3)
    for seed in range(3):
        lengths = lognormal(micro_batches * per_rank * LARGE.num_ranks, seed=seed)
        sizes = {"num_micro_batches": micro_batches}
        by_tokens = pack_samples(lengths, LARGE, **sizes)
        packing = start_assignment(lengths, LARGE, price=PRICE, **sizes)
        most = int(waits(by_tokens, lengths)[1])
        before, after = before + waits(by_tokens, lengths)[0].sum(), after + waits(packing, lengths)[0].sum()
        least += least_waits(lengths, LARGE, tokens_per_rank=most, **sizes)
    assert after <= share * before
    assert after <= 1.05 * least


def test_equally_long_samples_stay_packed_by_tokens():
    lengths = np.full(48, 300)
    packing = start_assignment(lengths, SMALL, num_micro_batches=3, price=PRICE)
    by_tokens = pack_samples(lengths, SMALL, num_micro_batches=3)
    np.testing.assert_array_equal(packing.sample, by_tokens.sample)


def test_data_parallel_groups_share_the_long_samples():
    lengths = lognormal(64, seed=0)
    price = dataclasses.replace(PRICE, data_parallel=2)
    packing = start_assignment(lengths, SMALL, num_micro_batches=8, price=price)
    seconds = waits(packing, lengths)[0].reshape(2, -1).sum(1)
    assert seconds.max() <= 1.2 * seconds.mean()
    assert seconds.sum() < waits(pack_samples(lengths, SMALL, num_micro_batches=8), lengths)[0].sum()


def test_pack_by_level_returns_none_where_the_memory_is_too_small():
    assert (
        pack_by_level(np.array([4, 4, 4]), SMALL, num_micro_batches=1, tokens_per_rank=3, samples_per_rank=2)
        is None
    )


@settings(deadline=None, max_examples=20)
@given(lengths=st.lists(st.integers(1, 30), min_size=2, max_size=6), data=st.data())
def test_least_waits_is_below_every_packing(lengths, data):
    one_node = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    lengths, most = np.array(lengths), data.draw(st.integers(max(lengths), sum(lengths)))
    bound = least_waits(lengths, one_node, num_micro_batches=2, tokens_per_rank=most)
    for bins in itertools.product(range(4), repeat=len(lengths)):
        if np.bincount(bins, lengths, 4).max() <= most:
            assert bound <= np.bincount(bins, lengths**2, 4).reshape(2, 2).max(1).sum() + 1e-6


def test_least_waits_refuses_samples_beyond_the_memory():
    with pytest.raises(ValueError, match="tokens_per_rank=8 must be at least the longest sample, 9"):
        least_waits(np.array([3, 9]), SMALL, num_micro_batches=1, tokens_per_rank=8)


def test_a_free_exchange_splits_a_long_sample_evenly():
    lengths = np.array([64] + [4] * 30)
    split = split_waits(lengths, SMALL, num_micro_batches=1, exchange=0.0)
    assert split == 64**2 / 2  # over both ranks of its node, and the short samples are on the other node
    assert split_waits(lengths, SMALL, num_micro_batches=1, exchange=100.0) == 64**2  # not worth it
    assert split_waits(lengths, SMALL, num_micro_batches=1, exchange=8.0) == 64**2 / 2 + 8 * 64 / 2


def test_split_exchange_is_the_length_at_which_it_takes_as_long_as_attention():
    cost_model = CostModel(
        cluster=CLUSTERS["h100"], model=MODELS["qwen3-235b-a22b"], scale=3.0, recompute=True
    )
    cluster, passes, kv_bytes = cost_model.cluster, 4, 2 * cost_model.model.cache_width
    topology = Topology(num_nodes=2, ranks_per_node=8, num_experts=128, replica_slots=0)
    length = split_exchange(cost_model, topology)
    exchange = (
        cost_model.scale * passes * kv_bytes * length / (cluster.fast_bandwidth * cluster.network_efficiency)
    )
    assert exchange == pytest.approx(float(cost_model.price(topology).pair) * length**2)
