"""The homes among which layers choose after the search, and that the choice is by layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.contract.planner import Placement
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import Price, RoutingReplay, Topology
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.portfolio import exchange_pairs, list_trials, pack_near
from relibra_jax.planning.relibra import relibra

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=16, replica_slots=1)


@pytest.mark.parametrize("seed", range(3))
def test_exchanged_homes_are_more_even_and_take_one_expert_from_a_rank_at_most(seed):
    rng = np.random.default_rng(seed)
    load = jnp.asarray(rng.lognormal(0, 1, (3, 16)).astype(np.float32))
    before = np.stack([rng.permutation(16) for _ in range(3)]).astype(np.int32)
    home = np.asarray(exchange_pairs(load, jnp.asarray(before), TOPOLOGY))
    np.testing.assert_array_equal(np.sort(home, 1), np.tile(np.arange(16), (3, 1)))
    for new, old, loads in zip(home, before, load, strict=True):
        leaves = new // 4 != old // 4
        assert leaves.sum() > 0
        assert np.bincount(old[leaves] // 4, minlength=4).max() == 1
        totals = [np.bincount(slots // 4, loads, 4) for slots in (new, old)]
        assert totals[0].max() < totals[1].max()


@pytest.mark.parametrize("seed", range(3))
def test_packed_homes_are_even_and_near(seed):
    rng = np.random.default_rng(seed)
    load = jnp.asarray(rng.lognormal(0, 1, (3, 16)).astype(np.float32))
    before = jnp.asarray(np.stack([rng.permutation(16) for _ in range(3)]).astype(np.int32))
    home = np.asarray(pack_near(load, before, TOPOLOGY))
    np.testing.assert_array_equal(np.sort(home, 1), np.tile(np.arange(16), (3, 1)))

    def fullest(home):
        return max(np.where(home // 8 == node, load, 0).sum(1).max() for node in (0, 1))

    assert fullest(home) <= fullest(np.asarray(before))
    same_rank = home // 4 == np.asarray(before) // 4
    np.testing.assert_array_equal(home[same_rank], np.asarray(before)[same_rank])


def test_even_loads_move_nothing():
    before = jnp.asarray(np.random.default_rng(0).permutation(16)[None].astype(np.int32))
    np.testing.assert_array_equal(pack_near(jnp.ones((1, 16)), before, TOPOLOGY), before)
    np.testing.assert_array_equal(exchange_pairs(jnp.ones((1, 16)), before, TOPOLOGY), before)


@pytest.mark.parametrize("assigned", [False, True])
def test_every_group_of_trials_begins_and_ends_once(assigned):
    trials = list_trials(assigned=assigned)
    begins, ends = (
        np.array([bool(leaf) for leaf in leaves]) for leaves in zip(*(t[3:] for t in trials), strict=True)
    )
    assert begins[0]
    assert ends[-1]
    np.testing.assert_array_equal(begins[1:], ends[:-1])
    assert any(bool(trial.first_assignment) for trial in trials) == assigned


def test_each_layer_chooses_its_own_homes():
    """The search ruins layer 0 and mends layer 1: the plan keeps the old homes of the one, and moves the other."""
    topology = dataclasses.replace(TOPOLOGY, replica_slots=0)
    even, uneven = [0, 4, 8, 12, 1, 5, 9, 13], [0, 1, 2, 3, 0, 1, 2, 3]  # a rank has four experts in a row
    ids = np.stack([np.array([even, uneven]).T] * 4).astype(np.uint8)[
        ..., None
    ]  # [sample, token, layer, expert]
    replay = RoutingReplay(ids, np.ones((4, 8), bool))
    apart = np.arange(16).reshape(4, 4).T.ravel()

    def search(request, previous_home, topology, *, key):
        return Placement.without_residents(jnp.asarray(np.stack([apart, apart])), topology)

    planner = relibra(place=search)
    price = Price(token=0.0, copy=1.0, crossing=0.0, spread=0.0, move=0.1, push=0.0, hierarchical=False)
    counts = Batch(sample_load(replay, num_experts=16), replay.mask.sum(1))
    state = planner.init(topology, 2, key=jax.random.key(0))
    batch_plan, after = plan_batch(counts, planner, state, topology, stages=1, cost=price)
    home = np.asarray(batch_plan.plan.home)
    np.testing.assert_array_equal(home[0], np.arange(16))
    assert (home[1] != np.arange(16)).any()
    np.testing.assert_array_equal(after.home, home)
