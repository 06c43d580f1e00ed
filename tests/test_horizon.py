"""For how many batches homes serve: as many as their savings last, and no more than the homes before them did."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import request_of

from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import Price, RoutingReplay, Topology
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.horizon import UNSEEN, History, batches_served
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.relibra import relibra

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=1)
PRICE = Price(token=0.0, copy=1.0, crossing=0.0, spread=0.0, move=10.0, push=0.0, hierarchical=False)
CONTIGUOUS, SPREAD = jnp.array([[0, 1, 2, 3]]), jnp.array([[0, 2, 3, 1]])
FRONT, BACK = ([[[9, 7, 1, 1]]], [[[1, 1, 7, 9]]])
"""Loads that are uneven over contiguous homes, and even if the two busy experts are apart."""
MOST = 5


def batch(load):
    return request_of(np.array(load), TOPOLOGY, price=PRICE)


def history_of(*loads, homes):
    """Return the history after some batches, with the homes of each."""
    history, before = History.of_no_batches(CONTIGUOUS, TOPOLOGY), CONTIGUOUS
    for load, home in zip(loads, homes, strict=True):
        history, before = history.after(before, batch(load), TOPOLOGY), home
    return history


def served(home, before, history, load=FRONT):
    return float(batches_served(home, before, history, batch(load), TOPOLOGY, most=MOST)[0])


def test_before_any_other_batch_a_share_of_the_saving_lasts():
    assert served(SPREAD, CONTIGUOUS, history_of(homes=[])) == 1 + (MOST - 1) * UNSEEN


def test_homes_serve_long_if_they_suit_the_batches_before():
    history = history_of(FRONT, FRONT, homes=[CONTIGUOUS, CONTIGUOUS])
    assert served(SPREAD, CONTIGUOUS, history) == MOST


@pytest.mark.parametrize("home", [CONTIGUOUS, jnp.array([[1, 0, 2, 3]])])
def test_homes_that_save_nothing_serve_one_batch(home):
    assert served(home, CONTIGUOUS, history_of(FRONT, homes=[CONTIGUOUS])) == 1


def test_homes_that_suit_this_batch_alone_serve_one_batch():
    """Experts 0 and 1 are busy now; 0 and 2 were, which the new homes would have had on one node."""
    before, home = jnp.array([[0, 1, 2, 3]]), jnp.array([[0, 2, 1, 3]])
    history = history_of([[[9, 1, 7, 1]]], homes=[before])
    assert served(home, before, history) == 1


def test_homes_last_no_longer_than_those_before_them():
    """If every batch moves two of four experts, homes last for two batches."""
    homes = [CONTIGUOUS, *[SPREAD, CONTIGUOUS] * 6]
    history = history_of(*[FRONT] * len(homes), homes=homes)
    assert served(SPREAD, CONTIGUOUS, history) == pytest.approx(2, rel=0.01)


def test_first_batch_does_not_count_as_a_habit():
    history = history_of(FRONT, homes=[SPREAD])
    assert float(history.moved_so_far(SPREAD, TOPOLOGY)[0]) == 0


def test_history_is_the_mean_of_batches():
    history = history_of(FRONT, homes=[CONTIGUOUS])
    np.testing.assert_allclose(history.load[0].sum(0), np.array(FRONT[0][0]) / 18, rtol=1e-6)
    again = history.after(CONTIGUOUS, batch(BACK), TOPOLOGY)
    assert 0.5 < float(again.load[0, :, :2].sum()) < float(history.load[0, :, :2].sum())
    assert float(again.load.sum()) == pytest.approx(1)


def test_planner_moves_for_several_batches_if_loads_stay():
    """A move that does not pay in one batch is made if it pays in several, unless the planner plans for one."""
    ids = np.array([0] * 9 + [1] * 7 + [2, 3], np.uint8).reshape(1, 18, 1, 1)
    replay = RoutingReplay(np.repeat(ids, 4, 0), np.ones((4, 18), bool))
    counts = Batch(sample_load(replay, num_experts=4), replay.mask.sum(1))
    price, moved = dataclasses.replace(PRICE, move=40.0), {}
    topology = dataclasses.replace(TOPOLOGY, replica_slots=0)
    for batches in (1, 8):
        planner = relibra(batches=batches)
        state = planner.init(topology, 1, key=jax.random.key(0))
        plan, _ = plan_batch(counts, planner, state, topology, stages=1, cost=price)
        moved[batches] = int((np.asarray(plan.plan.home) != np.arange(4)).sum())
    assert moved[1] == 0
    assert moved[8] > 0


def test_relibra_refuses_less_than_one_batch():
    with pytest.raises(ValueError, match="batches"):
        relibra(batches=0)
