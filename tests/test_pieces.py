"""Pieces of tokens: their plans add up to the plan, their buffers suffice, and their price is that of a schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.costs import CLUSTER, MODEL
from support.plans import planned, random_plan, random_routing

from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import BALANCE, BatchPlan, LayerPlan, Topology, layer_plans
from relibra_jax.cost.batch_time import balanced_time, batch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.step_time import RankTime, exposed_exchange, hop_times, layer_time
from relibra_jax.cost.traffic import Sent, count_sent
from relibra_jax.execution import ExpertParallel, expert_mesh
from relibra_jax.nnx.balancer_state import count_sizes
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.routing.pieces import split_plan
from relibra_jax.routing.sizes import LAYER_SIXTEENTHS, check_capacities
from relibra_jax.routing.split import refit_quota, split_quota
from relibra_jax.routing.striping import striped_load
from relibra_jax.routing.visits import node_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=2)
LENGTHS = np.array([17, 9, 30, 1, 12, 22, 5, 8])


@pytest.fixture(scope="module")
def replay():
    drawn = random_routing(np.random.default_rng(0), samples=8, tokens=30, layers=2, experts=8, top_k=3)
    return drawn._replace(mask=np.arange(30) < LENGTHS[:, None])


def plan_of(replay, striped):
    assignment = assign_in_order(8, TOPOLOGY, num_micro_batches=2)
    load = striped_load(replay, assignment, TOPOLOGY) if striped else None
    load = np.asarray(expert_load(replay, assignment, num_experts=8) if load is None else load)
    return BatchPlan(assignment, load, planned("eplb", TOPOLOGY, load))


@pytest.mark.parametrize("striped", [False, True])
def test_pieces_are_every_nth_token_and_add_up_to_the_plan(replay, striped):
    batch_plan = plan_of(replay, striped)
    pieces = split_plan(replay, batch_plan, TOPOLOGY, pieces=3, striped=striped)
    for number, (part, _) in enumerate(pieces):
        position = np.arange(30) // (2 if striped else 1)
        np.testing.assert_array_equal(part.mask, replay.mask & (position % 3 == number))
    loads, quotas = (
        np.stack([np.asarray(leaf) for leaf in leaves])
        for leaves in zip(*((plan.load, plan.plan.quota) for _, plan in pieces), strict=True)
    )
    np.testing.assert_array_equal(loads.sum(0), batch_plan.load)
    np.testing.assert_array_equal(quotas.sum(0), batch_plan.plan.quota)
    assert (quotas >= 0).all()
    for _, plan in pieces:
        slots = np.where(
            np.asarray(plan.plan.slot_expert)[..., None] == np.arange(8), plan.plan.quota[..., None], 0
        )
        np.testing.assert_array_equal(slots.sum((2, 3, 4)), np.asarray(plan.load).sum((2, 3)))
    assert split_plan(replay, batch_plan, TOPOLOGY, pieces=1, striped=striped) == ((replay, batch_plan),)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([5, 4_000, 300_000]))
def test_split_quota_gives_every_slot_its_share_of_each_piece(seed, most):
    """The first piece has exactly the floor of the shares that end at each slot, also where products exceed 32 bits."""
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, most, (2, 1, 1, 2, 2, 8)) * (rng.random((2, 1, 1, 2, 2, 8)) < 0.7)
    total = loads.sum(0).astype(np.int32)
    plan = layer_plans(random_plan(rng, total, TOPOLOGY), total).layer(0).layer(0)
    first, second = split_quota(plan, jnp.asarray(loads[:, 0, 0], jnp.int32), TOPOLOGY)
    quota, expert = np.asarray(plan.quota).ravel().astype(object), np.asarray(plan.slot_expert).ravel()
    for each in range(8):
        slots = np.flatnonzero(expert == each)
        ends = np.cumsum(quota[slots]) * int(loads[0, ..., each].sum()) // max(int(quota[slots].sum()), 1)
        np.testing.assert_array_equal(np.asarray(first.quota).ravel()[slots], np.diff([0, *ends]))
    np.testing.assert_array_equal(np.asarray(first.quota) + second.quota, plan.quota)
    assert (np.asarray(second.quota) >= 0).all()


def test_buffers_of_pieces_are_sized_for_the_fullest(replay):
    """The counts of crossing tokens add up, and here no buffer is larger than that of the whole."""
    batch_plan = plan_of(replay, striped=True)
    mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[:4])
    whole, halves = (
        count_sizes(
            BatchRoutes(replay),
            [batch_plan],
            {},
            ExpertParallel(mesh=mesh, topology=TOPOLOGY, striped=True, pieces=pieces),
            top_k=3,
            lengths=LENGTHS,
        )
        for pieces in (1, 2)
    )
    parts = split_plan(replay, batch_plan, TOPOLOGY, pieces=2, striped=True)
    visits = [np.asarray(node_visits(part, plan, TOPOLOGY, striped=True)) for part, plan in parts]
    np.testing.assert_array_equal(halves.visits[0], sum(visits))
    (large,), (small,) = whole.capacities.values(), halves.capacities.values()
    check_capacities(large, small)
    assert small.rows < 0.75 * large.rows


def test_pieces_are_priced_by_what_is_beside_experts(replay):
    """Pieces hide a part of the exchange, also of the balanced run. A fitted exchange chooses once for both ways."""
    batch_plan = plan_of(replay, striped=False)
    visits = node_visits(replay, batch_plan, TOPOLOGY)

    def seconds(exchange, pieces):
        model = dataclasses.replace(MODEL, num_experts=8)
        cost = CostModel(cluster=CLUSTER, model=model, path="hierarchical", exchange=exchange, pieces=pieces)
        price = cost.price(TOPOLOGY)
        plan = batch_time(batch_plan, LENGTHS, TOPOLOGY, price, visits=visits)
        return plan, balanced_time(batch_plan.load, LENGTHS, TOPOLOGY, price)

    for (one, half), even in zip(
        zip(seconds("padded", 1), seconds("padded", 2), strict=True), (False, True), strict=True
    ):
        hidden = float(one.exchange - half.exchange)
        assert 0 < hidden < float(one.exchange), even
        for part in ("attention", "gather", "exposed", "push", "rest"):
            assert getattr(one, part) == getattr(half, part)
        assert one.compute <= half.compute, "each piece fills tiles of its own"
    for pieces, expected in ((1, 16.0), (2, 4.0)):
        kinds = {"exchange": "fitted", "hierarchical": True, "pieces": pieces, "choice": 8.0}
        price, nothing = dataclasses.replace(BALANCE, **kinds), jnp.zeros((1, 1, 2, 2))
        hops = hop_times(Sent(*(nothing,) * 3), TOPOLOGY, price)
        times = RankTime(*(nothing,) * 9)._replace(between=hops[0], inside=hops[1])
        assert float(layer_time(times, price).exchange[0, 0]) == expected


def test_pieces_with_a_fitted_exchange_send_one_part_of_all_lanes(replay):
    """The part suffices for the longest lane of each hop, and no smaller one does."""
    batch_plan = plan_of(replay, striped=True)
    visits = node_visits(replay, batch_plan, TOPOLOGY, striped=True)
    price = dataclasses.replace(BALANCE, hierarchical=True, spare_room=False, scale=100.0)
    prices = (dataclasses.replace(price, exchange=kind, pieces=2) for kind in ("fitted", "padded"))
    sent, most = (count_sent(batch_plan.layer_plans(), TOPOLOGY, each, visits=visits) for each in prices)
    parts = [np.asarray(own / whole).round(6) for own, whole in zip(sent[:2], most[:2], strict=True)]
    np.testing.assert_array_equal(*parts)
    assert set(parts[0].ravel()) <= {part / 16 for part in LAYER_SIXTEENTHS}
    assert parts[0].max() == 1


def test_exposed_exchange_of_a_schedule_that_was_drawn_by_hand():
    """Between nodes 8, inside 4, experts 10, in two pieces of 2 + 1 + 5 + 1 + 2.

    Crossing 0-2 and 2-4, spreading 2-3 and 8-9, experts 3-8 and 9-14. A fitted exchange goes back inside 9-10 and
    14-15, and between nodes 10-12 and 15-17; a padded one inside 14-15 and 15-16, and between nodes 15-17 and 17-19.
    """
    for kind, end in (("fitted", 17), ("padded", 19)):
        price = dataclasses.replace(BALANCE, exchange=kind, pieces=2)
        assert float(exposed_exchange(*map(jnp.array, (8.0, 4.0, 10.0)), price)) == end - 10


def test_refit_quota_is_exact_where_products_exceed_32_bits():
    """A float's share of a million copies is off by some; results must be equal on all devices."""
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    slots, quota = np.array([[[0, 1], [1, 0]]]), np.array([[[700_001, 3], [5, 1_300_003]]])
    plan = LayerPlan(slots, np.array([0, 2]), quota, None)
    load = np.array([[[900_007, 4], [800_009, 9]]], np.int32)
    fitted = np.asarray(refit_quota(plan, load, topology).quota)
    assert fitted[0, 0, 0] == 1_700_016 * 700_001 // 2_000_004
    assert fitted.sum() == load.sum()


def test_settings_name_a_wrong_number_of_pieces():
    mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="pieces=0 must be an integer of at least 1"):
        ExpertParallel(mesh=mesh, topology=TOPOLOGY, pieces=0)
    with pytest.raises(ValueError, match="pieces=0 must be"):
        CostModel(cluster=CLUSTER, model=MODEL, pieces=0)
