"""Placements on expert devices, the rows that are sent to them, and micro-batches drawn from a trace."""

import itertools
import math

import jax
import numpy as np
import pytest

from experiments.deploy.placements import (
    contiguous_placement,
    even_placement,
    group_copies,
    merge_rows,
    plan_placement,
)
from experiments.deploy.simulated_step import draw_micro_batches
from relibra_jax.contract.types import RoutingReplay


def test_plan_placement_divides_an_expert_over_its_replicas():
    load = np.array([[900, 30, 20, 10, 10, 10, 10, 10], [0, 0, 0, 0, 0, 0, 0, 5], [0] * 8])
    placed = plan_placement(load, 4, replica_slots=1, key=jax.random.key(0))
    assert placed.slots == 3
    np.testing.assert_allclose(placed.share.sum(-1), 1.0, rtol=1e-6)
    assert ((placed.share > 0).sum(1) <= 3).all(), "no group computes more experts than it holds"
    np.testing.assert_allclose(group_copies(load, placed.share).sum(-1), load.sum(-1))
    assert placed.hottest[0] == pytest.approx(0.25)
    assert plan_placement(load, 4, key=jax.random.key(0)).hottest[0] > 0.9


def test_merge_rows_sends_a_token_once_to_a_group():
    subsets = np.array(list(itertools.combinations(range(8), 3)))
    even = even_placement(4, 8, top_k=3)
    rows = np.mean([len(set(each // 2)) for each in subsets])
    assert 3 * even.sent[0] == pytest.approx(rows)
    assert 4 * 3 * even.hottest[0] * even.received[0] == pytest.approx(rows)
    routes = np.argsort(np.random.default_rng(3).random((400, 2, 8)) * np.arange(1, 9), -1)[..., :3]
    load = np.array([np.bincount(routes[:, layer].ravel(), minlength=8) for layer in range(2)])
    merged = merge_rows(contiguous_placement(load, 4), routes)
    for layer in range(2):
        rows_to = np.array([[group in each // 2 for group in range(4)] for each in routes[:, layer]]).sum(0)
        assert merged.sent[layer] == pytest.approx(rows_to.sum() / 1200)
        assert merged.hottest[layer] * merged.received[layer] == pytest.approx(rows_to.max() / 1200)
    alone = merge_rows(contiguous_placement(load, 8), routes)
    np.testing.assert_allclose([alone.sent, alone.received], 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match=r"routes: expected shape \(400, 2, 3\), found \(400, 1, 3\)"):
        merge_rows(contiguous_placement(load, 4), routes[:, :1])


def test_merge_rows_of_experts_with_replicas():
    share = np.array([[[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]]], np.float32)
    placement = contiguous_placement(np.ones((1, 4), np.int32), 2)._replace(share=share)
    # Expert 1 is computed with expert 0 with probability 1/4, and with expert 2 with probability 3/4.
    merged = merge_rows(placement, np.array([[[0, 1]], [[2, 1]]]))
    assert merged.sent[0] == pytest.approx((2 - 0.25 + 2 - 0.75) / 4)


REPLAY = RoutingReplay(
    np.argsort(np.random.default_rng(2).random((6, 9, 2, 8)) * np.arange(1, 9), -1)[..., :2].astype(np.uint8),
    np.arange(9) < np.array([9, 1, 4, 9, 2, 7])[:, None],
)
DRAW = {"num_experts": 8, "sequences": 500, "micro_batches": 2, "layers": 3}


def test_draw_micro_batches_draws_recorded_tokens():
    load = draw_micro_batches(REPLAY, **DRAW, seed=0)
    assert load.shape == (3, 2, 8)
    assert (load.sum(-1) == 1000).all()
    np.testing.assert_array_equal(load[2], load[0])  # the two layers of the trace are repeated
    np.testing.assert_array_equal(load, draw_micro_batches(REPLAY, **DRAW, seed=0))
    assert (load != draw_micro_batches(REPLAY, **DRAW, seed=1)).any()
    real = REPLAY.expert_ids[REPLAY.mask]
    for layer in range(2):
        recorded = np.bincount(real[:, layer].ravel(), minlength=8) / len(real)
        np.testing.assert_allclose(load[layer].mean(0) / 500, recorded, atol=5 * math.sqrt(0.25 / 1000))


def test_placements_and_draws_report_bad_input():
    load = np.ones((2, 8), np.int32)
    with pytest.raises(ValueError, match="num_experts=8 must divide evenly over 3 groups of expert devices"):
        contiguous_placement(load, 3)
    with pytest.raises(ValueError, match="replica_slots=9 must be an integer of at least 0 and at most 8"):
        plan_placement(load, 2, replica_slots=9, key=jax.random.key(0))
    with pytest.raises(ValueError, match="the replay has no tokens to draw from"):
        draw_micro_batches(REPLAY._replace(mask=np.zeros_like(REPLAY.mask)), **DRAW, seed=0)
