"""Acceptance: the balance that ReLibra's planner must reach on recorded routing, with its default settings."""

import functools

import jax
import numpy as np
import pytest

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.replay import assigned_load, sample_load
from relibra_jax.contract.replay_files import load_replay
from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts


@pytest.fixture(scope="module")
def batch(shared):
    """Return the counts of 256 recorded samples in random order."""
    replay, num_experts = load_replay(shared / "traces" / "gptoss20b_rollouts.npz")
    chosen = np.random.default_rng(0).permutation(352)[:256]
    replay = RoutingReplay(replay.expert_ids[chosen], replay.mask[chosen])
    count = jax.jit(functools.partial(sample_load, num_experts=num_experts))
    return Batch(count(replay), replay.mask.sum(1).astype(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "in_given_order", "one_slot", "assigned", "across"),
    [
        pytest.param(2, 1.024, 1.032, 1.017, 1.004, marks=pytest.mark.long),
        (4, 1.080, 1.090, 1.062, 1.007),
    ],
)
def test_relibra_balances_a_recorded_batch(batch, nodes, in_given_order, one_slot, assigned, across):
    """Plan 32 micro-batches of 8 samples on nodes of 4 ranks."""
    topology = Topology(num_nodes=nodes, ranks_per_node=4, num_experts=32, replica_slots=2)
    narrow = Topology(num_nodes=nodes, ranks_per_node=4, num_experts=32, replica_slots=1)
    planner = relibra()
    state = planner.init(topology, 24, key=jax.random.key(0))
    in_order = assign_in_order(256, topology, num_micro_batches=32)
    load = assigned_load(batch.sample_load, in_order)
    request = PlanRequest(load)
    plan, _ = jax.jit(planner.update)(request, state, topology)
    check_plan(plan, load, topology)
    assert batch_imbalance(rank_load(plan)) <= in_given_order

    placement = Placement.without_residents(plan.home, topology)
    less = jax.jit(replicate_experts)(request, placement, narrow)
    check_plan(less, load, narrow)
    assert batch_imbalance(rank_load(less)) <= one_slot
    far = jax.jit(functools.partial(replicate_experts, across_nodes=True))
    assert batch_imbalance(rank_load(far(request, placement, topology))) <= across

    options = {"stages": 32, "assign": assign_samples, "key": jax.random.key(0)}
    batch_plan, _ = plan_batch(batch, planner, state, topology, **options)
    np.testing.assert_array_equal(batch_plan.load, assigned_load(batch.sample_load, batch_plan.assignment))
    check_plan(batch_plan.plan, batch_plan.load, topology)
    assert batch_imbalance(rank_load(batch_plan.plan)) <= assigned
    rank_tokens = np.append(batch.lengths, 0)[batch_plan.assignment.sample].sum(-1)
    assert rank_tokens.max() <= max(1.05 * rank_tokens.mean(), batch.lengths.max())
