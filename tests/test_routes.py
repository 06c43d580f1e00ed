"""Sampled tokens: spread over the batch, in proportion to samples, and with their places under an assignment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import random_routing

from relibra_jax.contract.types import EMPTY, Assignment, RoutingReplay, Topology
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.routes import MOST_TOKENS, Routes, place_routes, sample_routes, spread


def numbered(lengths, tokens):
    """Make a replay in which the expert of the n-th real token of the batch is n."""
    mask = np.zeros((len(lengths), tokens), bool)
    for row, length in zip(mask, lengths, strict=True):
        row[:length] = True
    ids = np.full(mask.shape, 2**30)
    ids[mask] = np.arange(mask.sum())
    return RoutingReplay(ids[..., None, None].astype(np.int32), mask)


def check_intervals(token, total, count):
    first = np.arange(count + 1) * total // count
    assert (first[:-1] <= token).all()
    assert (token < np.maximum(first[1:], first[:-1] + 1)).all()


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 6), min_size=5, max_size=5), count=st.sampled_from([1, 4, 13]))
def test_sample_routes_takes_a_token_of_every_interval(lengths, count):
    """Sampled token q is in the q-th of equal intervals of the batch's tokens, also with gaps and empty samples."""
    replay = numbered(lengths, 6)
    routes = sample_routes(replay, count=count)
    total = sum(lengths)
    if total == 0:
        assert (np.asarray(routes.sample) == EMPTY).all()
        return
    token = np.ravel(routes.expert_ids)
    check_intervals(token, total, count)
    owner = np.repeat(np.arange(5), lengths)
    assert np.asarray(routes.sample).tolist() == owner[token].tolist()


def test_sample_routes_stays_even_however_many_tokens_are_taken():
    count, total = 46_000, 50_000
    routes = sample_routes(numbered([total - 7, 7], total), count=count)
    check_intervals(np.ravel(routes.expert_ids), total, count)


@pytest.mark.parametrize(
    ("total", "count"), [(2**31 - 1, MOST_TOKENS), (2**31 - 1, 1), (46_339, MOST_TOKENS)]
)
def test_spread_numbers_fit_int32(total, count):
    """Under jit numbers are int32, on the host int64."""
    on_host = spread(np.asarray(total, np.int64), count)
    np.testing.assert_array_equal(spread(jnp.int32(total), count), on_host)
    check_intervals(on_host, total, count)


@pytest.mark.parametrize("period", [2, 3, 4, 8])
def test_sample_routes_sees_all_of_routing_that_repeats(period):
    """Tokens at even distances would be of some phases alone; here every phase has its share, up to 10%."""
    routes = sample_routes(numbered([4096, 4096], 4096), count=1024)
    phase = np.bincount(np.ravel(routes.expert_ids) % period, minlength=period)
    np.testing.assert_allclose(phase, 1024 / period, rtol=0.1)


@pytest.mark.parametrize("count", [0, -1, True, 46_341])
def test_sample_routes_rejects_numbers_of_tokens_outside_its_limits(count):
    """Counts above the limit are rejected, because distances would not fit int32."""
    with pytest.raises(
        ValueError, match=f"count={count} must be an integer of at least 1 and at most 46340$"
    ):
        sample_routes(numbered([2], 3), count=count)


def test_sample_routes_takes_masks_with_holes():
    """Padding on the left or between tokens is never sampled."""
    mask = np.array([[False, True, True, False], [True, False, False, True]])
    ids = np.arange(8).reshape(2, 4, 1, 1).astype(np.uint8)
    routes = sample_routes(RoutingReplay(ids, mask), count=4)
    assert np.ravel(routes.expert_ids).tolist() == [1, 2, 4, 7]
    assert np.asarray(routes.sample).tolist() == [0, 0, 1, 1]


def find(assignment, sample, local):
    """Return the micro-batch and flat rank of a sample."""
    for m, n, g, b in np.ndindex(assignment.sample.shape):
        if assignment.sample[m, n, g, b] == sample:
            return m, n * local + g
    return EMPTY, EMPTY


@settings(max_examples=40)
@given(
    kept=st.lists(st.integers(0, 19), unique=True, max_size=12),
    asked=st.lists(st.integers(EMPTY, 19), min_size=8, max_size=8),
    seed=st.integers(0, 99),
)
def test_place_routes_puts_tokens_where_their_sample_lies(kept, asked, seed):
    """An assignment may hold only some samples; tokens of the others have no place."""
    room = np.full(12, EMPTY)
    room[np.random.default_rng(seed).permutation(12)[: len(kept)]] = kept
    assignment = Assignment(room.reshape(2, 3, 1, 2))
    placed = place_routes(Routes(np.zeros((8, 1, 1), np.uint8), np.array(asked)), assignment)
    expected = [(EMPTY, EMPTY) if sample == EMPTY else find(assignment, sample, 1) for sample in asked]
    assert list(zip(placed.micro_batch.tolist(), placed.rank.tolist(), strict=True)) == expected


def test_sample_routes_and_place_routes_work_under_jit():
    """Sampling and placing give the same result under jit."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    rng = np.random.default_rng(0)
    replay = random_routing(rng, samples=9, tokens=7, layers=2, experts=8, top_k=2)
    assignment = assign_in_order(9, topology, num_micro_batches=2)

    def place(replay, assignment):
        return place_routes(sample_routes(replay, count=20), assignment)

    for result, expected in zip(jax.jit(place)(replay, assignment), place(replay, assignment), strict=True):
        np.testing.assert_array_equal(result, expected)
