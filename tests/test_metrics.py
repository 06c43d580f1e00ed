"""Metrics, compared with values computed by hand."""

import numpy as np
import pytest
from support.plans import planned

from relibra_jax.contract.types import Topology, layer_plans
from relibra_jax.planning.metrics import (
    batch_imbalance,
    cross_node_load,
    imbalance,
    moved_experts,
)


def test_imbalance_is_the_largest_over_the_mean_of_each_micro_batch():
    rank_load = np.array([[[[30, 10], [20, 20]]], [[[0, 0], [0, 0]]]])
    assert imbalance(rank_load).tolist() == [[1.5], [1.0]]


def test_batch_imbalance_weighs_micro_batches_by_time():
    """With a long balanced micro-batch and a short uneven one, the imbalance is not the mean of 1 and 2."""
    rank_load = np.array([[[[100, 100]]], [[[20, 0]]]])
    assert batch_imbalance(rank_load) == pytest.approx((100 + 20) / (100 + 10))


def test_batch_imbalance_averages_layers():
    rank_load = np.array([[[[30, 10]], [[5, 5]], [[0, 0]]]])
    assert batch_imbalance(rank_load) == pytest.approx((1.5 + 1 + 1) / 3)


def test_cross_node_load_equals_a_count_by_brute_force():
    """With static placement, every token copy whose expert is on another node crosses."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    load = np.random.default_rng(0).integers(0, 50, (3, 2, 2, 2, 8)).astype(np.int32)
    plan = planned("static", topology, load)
    crossing = load[:, :, 0, :, 4:].sum((2, 3)) + load[:, :, 1, :, :4].sum((2, 3))
    np.testing.assert_array_equal(cross_node_load(layer_plans(plan, load)), crossing)


def test_moved_experts_are_counted_by_rank():
    """An expert that changes its slot on the same rank does not move over the network."""
    before, now = np.array([[0, 1, 2, 3]]), np.array([[1, 0, 3, 2]])
    assert moved_experts(now, before, home_slots=2).tolist() == [0]
    assert moved_experts(now, before, home_slots=1).tolist() == [4]
