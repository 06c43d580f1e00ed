"""Striped layers: the ranks of a node deal their tokens, which keeps every count exact and levels lanes."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.costs import CLUSTER, MODEL
from support.plans import planned, random_routing

from relibra_jax import plan_batch, static
from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import BALANCE, EMPTY, Assignment, BatchPlan, RoutingReplay, Topology
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.traffic import count_sent
from relibra_jax.nnx import ExpertParallel, expert_mesh
from relibra_jax.nnx.balancer_state import count_sizes
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.nnx.modelled_times import model_stage
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.batch import count_batch
from relibra_jax.planning.plan_batch import Stage
from relibra_jax.planning.plan_price import price_unloaded
from relibra_jax.routing.sequence_packing import lay_out_sequences
from relibra_jax.routing.striping import split_evenly, stripe_tokens, striped_load, with_striped_load
from relibra_jax.routing.visits import node_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=2)
SAMPLES, TOKENS = 12, 9


@pytest.fixture(scope="module")
def replay():
    return random_routing(
        np.random.default_rng(0), samples=SAMPLES, tokens=TOKENS, layers=2, experts=8, top_k=3
    )


@pytest.fixture(scope="module")
def assignment():
    return assign_in_order(SAMPLES, TOPOLOGY, num_micro_batches=2)


def test_striped_load_counts_each_token_on_the_rank_that_its_position_chooses(replay, assignment):
    expected = np.zeros((2, 2, 2, 2, 8), int)
    for micro_batch, node, holder, place in np.ndindex(assignment.sample.shape):
        sample = assignment.sample[micro_batch, node, holder, place]
        for token, layer in np.ndindex(TOKENS, 2) if sample != EMPTY else ():
            if replay.mask[sample, token]:
                expected[micro_batch, layer, node, token % 2][replay.expert_ids[sample, token, layer]] += 1
    load = striped_load(replay, assignment, TOPOLOGY)
    np.testing.assert_array_equal(load, expected)
    held = expert_load(replay, assignment, num_experts=8)
    np.testing.assert_array_equal(load.sum(3), np.asarray(held).sum(3))


@given(st.lists(st.integers(0, 1 << 20), min_size=24, max_size=24))
def test_split_evenly_keeps_the_load_of_nodes_to_within_one_copy(counts):
    load = np.array(counts, np.int32).reshape(1, 1, 2, 1, 12)
    split = np.asarray(split_evenly(load, 4))
    np.testing.assert_array_equal(split.sum(3), load.sum(3))
    assert (split.max(3) - split.min(3)).max() <= 1


def test_node_visits_of_striped_layers_are_those_of_dealt_tokens(replay, assignment):
    """If ranks held the tokens that they are dealt, layers that are not striped would make the same visits."""
    load = np.asarray(striped_load(replay, assignment, TOPOLOGY))
    batch_plan = BatchPlan(assignment, load, planned("laer", TOPOLOGY, load))
    visits = np.asarray(node_visits(replay, batch_plan, TOPOLOGY, striped=True))
    for micro_batch, sample in enumerate(assignment.sample):
        held = (sample != EMPTY)[..., None] & replay.mask[sample]
        ids, mask = (
            np.asarray(stripe_tokens(each.reshape(4, -1, *each.shape[3:]), TOPOLOGY, padding=0))
            for each in (replay.expert_ids[sample], held)
        )
        dealt = RoutingReplay(ids, mask)
        plan = batch_plan.plan._replace(
            slot_expert=batch_plan.plan.slot_expert[[micro_batch]], quota=batch_plan.plan.quota[[micro_batch]]
        )
        one = BatchPlan(Assignment(np.arange(4).reshape(1, 2, 2, 1)), load[[micro_batch]], plan)
        np.testing.assert_array_equal(visits[[micro_batch]], node_visits(dealt, one, TOPOLOGY))


def test_buffers_of_striped_layers_are_sized_for_dealt_tokens(replay, assignment):
    load = np.asarray(striped_load(replay, assignment, TOPOLOGY))
    batch_plan = BatchPlan(assignment, load, planned("eplb", TOPOLOGY, load))
    mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[:4])
    held, dealt = (
        count_sizes(
            BatchRoutes(replay),
            [batch_plan],
            {},
            ExpertParallel(mesh=mesh, topology=TOPOLOGY, striped=striped),
            top_k=3,
            lengths=replay.mask.sum(1),
        ).visits[0]
        for striped in (False, True)
    )
    np.testing.assert_array_equal(dealt, node_visits(replay, batch_plan, TOPOLOGY, striped=True))
    assert (held != dealt).any()


def test_striping_levels_the_lanes_of_ranks_whose_samples_use_different_experts():
    """Every rank's tokens prefer two experts of its own; striped, all lanes are as long as the mean."""
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
    rng = np.random.default_rng(0)
    favourite = np.repeat(rng.permutation(16).reshape(8, 2), 64, axis=0).reshape(8, 64, 1, 2)
    replay = RoutingReplay(
        np.where(rng.random((8, 64, 1, 1)) < 0.8, favourite, (favourite + 5) % 16), np.ones((8, 64), bool)
    )
    assignment = assign_in_order(8, topology, num_micro_batches=1)
    load = expert_load(replay, assignment, num_experts=16)
    held = BatchPlan(assignment, load, planned("static", topology, load))
    lanes = []
    price = dataclasses.replace(BALANCE, hierarchical=True, exchange="fitted", spare_room=False, scale=100.0)
    for batch_plan, striped in ((held, False), (with_striped_load(held, replay, topology), True)):
        visits = node_visits(replay, batch_plan, topology, striped=striped)
        sent = count_sent(batch_plan.layer_plans(), topology, price, visits=visits)
        lanes.append((float(np.max(sent.between)), float(np.max(sent.inside))))
    (between, inside), (striped_between, striped_inside) = lanes
    assert striped_between < 0.8 * between
    assert striped_inside < 0.6 * inside


def test_prices_are_those_of_layers_by_default_which_are_not_striped():
    cost = CostModel(cluster=CLUSTER, model=dataclasses.replace(MODEL, top_k=8))
    assert not cost.price(TOPOLOGY).striped
    assert dataclasses.replace(cost, striped=True).price(TOPOLOGY).striped


def test_estimates_of_striped_times_are_exact_where_the_tokens_of_a_sample_are_alike():
    """The search and the modelled times estimate loads and visits of dealt tokens from counts of samples."""
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
    favourite = np.random.default_rng(0).permutation(16).reshape(8, 1, 1, 2)
    replay = RoutingReplay(np.broadcast_to(favourite, (8, 64, 1, 2)), np.ones((8, 64), bool))
    model = dataclasses.replace(MODEL, num_experts=16)
    cluster = dataclasses.replace(CLUSTER, memory_bandwidth=1e15)  # buffers are rounded up
    price = CostModel(cluster=cluster, model=model, exchange="needed", striped=True).price(topology)
    batch, planner = count_batch(replay, topology), static()
    state = planner.init(topology, 1, key=jax.random.key(0))
    options = {"stages": 1, "cost": price, "key": jax.random.key(0)}
    counted, _ = plan_batch(batch, planner, state, topology, **options)
    exact, _ = plan_batch(replay, planner, state, topology, **options)
    np.testing.assert_array_equal(counted.load, striped_load(replay, counted.assignment, topology))
    np.testing.assert_array_equal(counted.load, exact.load)
    visits = node_visits(replay, exact, topology, striped=True)
    lengths = {"lengths": batch.lengths, "sequence_length": batch.sequence_length}
    seconds = float(batch_time(exact, topology=topology, cost=price, visits=visits, **lengths).total)
    assert float(price_unloaded((exact,), batch, topology, (price,))) == pytest.approx(seconds, rel=1e-3)
    times = model_stage(exact, batch, Stage(1), price, topology, previous_home=exact.plan.home, moves=False)
    assert float(times.plan.total) == pytest.approx(seconds, rel=1e-3)
    assert float(times.staying.total) == pytest.approx(seconds, rel=1e-3)


def test_aligned_sequences_begin_samples_at_multiples():
    assignment = Assignment(np.array([[[[0, 1, 2], [3, EMPTY, EMPTY]]]]))
    layout = lay_out_sequences(assignment, np.array([5, 3, 2, 11]), align=4)
    assert layout.sample.shape[-1] % 4 == 0
    places = np.argwhere((layout.sample != EMPTY) & (layout.position == 0))
    assert len(places) == 4
    assert not (places[:, -1] % 4).any()
    assert (layout.sample != EMPTY).sum() == 21
