"""The cost model equals arithmetic done by hand, and has the properties that any such model must have."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.costs import CLUSTER, MODEL, NEEDED
from support.plans import planned, random_plan, random_routing

from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import (
    EMPTY,
    Assignment,
    BatchPlan,
    Plan,
    Price,
    RoutingReplay,
    Topology,
    layer_plans,
)
from relibra_jax.cost.batch_time import BatchTime, balanced_time, batch_time
from relibra_jax.cost.copies import fetch_time, reorder_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.cost.step_time import attention_time, layer_time, rank_time
from relibra_jax.cost.traffic import count_sent, count_traffic
from relibra_jax.execution.migration import move_tables
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.metrics import cross_node_load
from relibra_jax.routing.sizes import count_capacities, grow_capacities, with_spare_room
from relibra_jax.routing.split import pair_load, source_quota
from relibra_jax.routing.visits import node_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
FLAT = dataclasses.replace(NEEDED, path="flat")
LENGTHS = np.array([10, 10])
"""The tokens of a sample on rank (0, 0) and of one on rank (1, 1), which have two experts each."""
VISITS = np.array([[[[10, 0], [0, 0], [0, 0], [10, 10]]]])
"""The nodes that these tokens visit."""
# Seconds of a row of 4 bfloat16 numbers on each network, in the four exchanges of an update.
ACROSS, INSIDE = 4 * 8 / 100 / 0.5, 4 * 8 / 1000 / 0.5


def price(cost_model=FLAT, topology=TOPOLOGY, **changes):
    """Return the price of a cost model with some changes."""
    return dataclasses.replace(cost_model, **changes).price(topology)


def padded(**changes):
    return price(**{"exchange": "padded", "spare_room": False} | changes)


@pytest.fixture
def batch_plan():
    """Return a batch with expert e in home slot e, and a replica of expert 0 on rank (0, 1).

    Rank (0, 0) has 20 copies for expert 0; rank (1, 1) has 10 for expert 0 and 10 for expert 4.
    """
    slot_expert = np.array([[[[[0, 1, EMPTY], [2, 3, 0]], [[4, 5, EMPTY], [6, 7, EMPTY]]]]], np.int32)
    quota = np.array([[[[[17, 0, 0], [0, 0, 13]], [[10, 0, 0], [0, 0, 0]]]]], np.int32)
    load = np.zeros((1, 1, 2, 2, 8), np.int32)
    load[0, 0, 0, 0, 0], load[0, 0, 1, 1, 0], load[0, 0, 1, 1, 4] = 20, 10, 10
    assignment = Assignment(np.array([[[[0], [EMPTY]], [[EMPTY], [1]]]], np.int32))
    return BatchPlan(assignment, load, Plan(slot_expert, np.arange(8, dtype=np.int32)[None], quota))


def test_batch_time_of_a_layer_equals_a_count_by_hand(batch_plan):
    time = batch_time(batch_plan, LENGTHS, TOPOLOGY, price())
    attention = 3 * (10 * 2 * 50 + 10**2 * 10) / 5e5
    assert float(time.attention) == pytest.approx(attention)
    assert float(time.compute) == pytest.approx(3 * 32 * (2 * 3 * 4 * 5) / 5e5), "17 rows fill two tiles"
    # Rank (0, 0) keeps 17 and sends 3 to its neighbour; rank (1, 1) sends 10 to node 0, and 10 to its neighbour.
    assert float(time.exchange) == pytest.approx(max(10 * ACROSS, 10 * INSIDE))
    fetch = 3 * (3 * 4 * 5 * 2) / 1000 / 0.5
    assert float(time.exposed) == pytest.approx(fetch - attention)
    assert float(time.total) == pytest.approx(float(sum(time.parts().values())))
    assert set(time._fields) - set(time.parts()) == {"hideable"}


def test_batch_time_adds_the_hops_of_hierarchical_dispatch(batch_plan):
    """Ten tokens cross from rank (1, 1) to rank (0, 1), which computes them; ten copies go to the rank next to it."""
    time = batch_time(batch_plan, LENGTHS, TOPOLOGY, price(path="hierarchical"), visits=VISITS)
    assert float(time.exchange) == pytest.approx(10 * ACROSS + 10 * INSIDE)


@pytest.mark.parametrize(
    ("path", "striped", "meetings"),
    [("flat", False, 1), ("hierarchical", False, 2), ("hierarchical", True, 3)],
)
def test_batch_time_has_the_wait_of_ranks_at_every_exchange(batch_plan, path, striped, meetings):
    """Ranks meet in dispatch and combine, forward and backward; to fetch replicas, and to return gradients.

    The balanced run deals no tokens. Without replicas nothing is fetched.
    """
    visits = VISITS if path == "hierarchical" else None
    clusters = CLUSTER, dataclasses.replace(CLUSTER, wait_seconds=1.0)
    prices = [price(path=path, striped=striped, cluster=cluster) for cluster in clusters]
    quick, slow = (batch_time(batch_plan, LENGTHS, TOPOLOGY, each, visits=visits) for each in prices)
    assert float(slow.exchange - quick.exchange) == pytest.approx(4 * meetings, rel=1e-5)
    assert float(slow.exposed - quick.exposed) == pytest.approx(2, rel=1e-5)
    slot_expert = batch_plan.plan.slot_expert.copy()
    slot_expert[..., TOPOLOGY.held_slots :] = EMPTY
    bare = batch_plan._replace(plan=batch_plan.plan._replace(slot_expert=slot_expert))
    assert float(batch_time(bare, LENGTHS, TOPOLOGY, prices[1], visits=visits).exposed) == 0
    quick, slow = (balanced_time(batch_plan.load, LENGTHS, TOPOLOGY, each).exchange for each in prices)
    assert float(slow - quick) == pytest.approx(4 * (meetings - striped), rel=1e-5)


def test_attention_time_is_that_of_every_sample():
    """Samples attend to themselves alone, so two short ones cost half of a long one; rows have one length."""
    cost = Price(token=2.0, pair=0.5, copy=0.0, crossing=0.0, spread=0.0, move=0.0, push=0.0)
    assignment = Assignment(np.array([[[[0, 1]], [[2, EMPTY]]], [[[3, EMPTY]], [[EMPTY, EMPTY]]]]))
    seconds, positions = attention_time(assignment, np.array([4, 4, 8, 6]), cost)
    assert float(positions) == 8, "of the fullest rank of any micro-batch"
    np.testing.assert_allclose(seconds[..., 0], [[16 + 16, 16 + 32], [16 + 18, 16]])


def test_attention_time_of_padded_sequences_is_that_of_their_positions():
    """Both sequences of a rank are as long as T, or as the longest sample, with one sample in them or none."""
    cost = Price(
        token=2.0, pair=0.5, copy=0.0, crossing=0.0, spread=0.0, move=0.0, push=0.0, sequences="padded"
    )
    assignment = Assignment(np.array([[[[0, 1]], [[EMPTY, EMPTY]]]]))
    for given, length in ((None, 5), (16.0, 16)):
        seconds, positions = attention_time(assignment, np.array([3, 5]), cost, sequence_length=given)
        assert float(positions) == 2 * length
        np.testing.assert_allclose(seconds[..., 0], np.full((1, 2), 2 * (2 * length + length**2 / 2)))


def test_count_sent_is_equal_lanes_if_padded_and_what_is_needed_if_ragged(batch_plan):
    """The longest of three lanes has 10 rows, which round up to 16; the fullest rank computes 17, which makes 24."""
    sent = count_sent(batch_plan.layer_plans(), TOPOLOGY, padded())
    assert (np.asarray(sent.between) == 2 * 16).all(), "two ranks in the other node"
    assert (np.asarray(sent.inside) == 16).all()
    # Four lanes, half of 24 slots, and the rows of each rank that leave it or are computed there.
    np.testing.assert_array_equal(sent.gathered[0, 0], 64 + 12 + np.array([[17 + 3, 13], [10, 20]]))
    needed = count_sent(batch_plan.layer_plans(), TOPOLOGY, price(spare_room=False))
    np.testing.assert_array_equal(needed.between[0, 0], [[0, 10], [0, 10]])
    np.testing.assert_array_equal(needed.inside[0, 0], [[3, 3], [10, 10]])
    np.testing.assert_array_equal(needed.gathered[0, 0], 12 + np.array([[20, 0], [0, 20]]))
    time = batch_time(batch_plan, LENGTHS, TOPOLOGY, padded())
    assert float(time.exchange) == pytest.approx(32 * ACROSS)
    assert float(time.gather) == pytest.approx((64 + 12 + 20) * 4 * 8 / 2000 / 0.5)


def test_count_sent_has_lanes_of_the_longest_layer_and_micro_batch():
    """One step runs all layers and micro-batches with the same buffers, so every lane has the length of the longest."""
    batch_plan = a_batch("any")[1]
    for cost in (padded(), padded(spare_room=True)):
        sent = count_sent(batch_plan.layer_plans(), TOPOLOGY, cost)
        alone = [
            count_sent(
                jax.tree.map(
                    lambda leaf, at=(m, row): leaf[at[0] : at[0] + 1, at[1] : at[1] + 1],
                    batch_plan.layer_plans(),
                ),
                TOPOLOGY,
                cost,
            )
            for m in range(2)
            for row in range(2)
        ]
        for name in ("between", "inside"):
            rows, parts = getattr(sent, name), [getattr(each, name) for each in alone]
            assert len(np.unique(rows)) == 1
            assert rows.max() == max(float(part.max()) for part in parts)


@pytest.mark.parametrize("spare_room", [False, True])
@pytest.mark.parametrize("path", ["flat", "hierarchical"])
@pytest.mark.parametrize("plans", ["eplb", "any across nodes"])
def test_count_sent_has_the_buffers_of_the_exchanges(plans, path, spare_room):
    """Lanes and buffers are as long as a step makes them from the sizes that it counts.

    A gather writes every buffer: of each hop the one that is sent, in both directions, and half of those that are only
    filled by dispatch. It reads the rows that leave a rank and those that are there after the hop.
    """
    replay, batch_plan = a_batch(plans)
    visits = node_visits(replay, batch_plan, TOPOLOGY) if path == "hierarchical" else None
    cost = padded(path=path, spare_room=spare_room)
    sent = count_sent(batch_plan.layer_plans(), TOPOLOGY, cost, visits=visits)
    sizes = count_capacities(batch_plan.layer_plans(), TOPOLOGY, visits=visits)
    if spare_room:
        sizes = grow_capacities(None, sizes, round_up=with_spare_room)
    hops = [(4, sizes.flat)] if path == "flat" else [(2, sizes.node), (2, sizes.local)]
    arrived = 0 if path == "flat" else sizes.node.receive
    buffers = sum(ranks * hop.pair for ranks, hop in hops) + arrived + sizes.rows / 2
    for place in np.ndindex(2, 2):
        plan = jax.tree.map(lambda leaf, place=place: leaf[place], batch_plan.layer_plans())
        pairs = np.asarray(pair_load(plan, TOPOLOGY))
        moves = [pairs]
        if visits is not None:
            # Ranks are numbered by node: a token of rank r goes to the rank of its own local index in each node.
            crossing = np.zeros((4, 4))
            for rank, node in np.ndindex(4, 2):
                crossing[rank, 2 * node + rank % 2] = visits[(*place, rank, node)]
            spread = np.zeros((4, 4))
            for rank, target in np.ndindex(4, 4):
                spread[2 * (target // 2) + rank % 2, target] += pairs[rank, target]
            moves = [crossing, spread]
        read = sum(each.sum(1) + each.sum(0) - each.diagonal() for each in moves)
        np.testing.assert_allclose(sent.gathered[place].ravel(), buffers + read)
    lanes = [hop.pair for _, hop in hops]
    expected = (2 * lanes[0], lanes[0]) if path == "flat" else (lanes[0], lanes[1])
    assert (np.asarray(sent.between) == expected[0]).all()
    assert (np.asarray(sent.inside) == expected[1]).all()


def test_fetch_time_is_that_of_replicas_as_they_are_sent(batch_plan):
    """A padded fetch sends the exports of the rank with the most, an even number, and R experts to every rank."""
    one = 3 * (3 * 4 * 5 * 2) / 1000 / 0.5
    plans = batch_plan.layer_plans()
    ragged, even = (fetch_time(plans, TOPOLOGY, price(fetch=kind)) for kind in ("ragged", "padded"))
    np.testing.assert_allclose(ragged[0, 0], [[one, one], [0, 0]])
    np.testing.assert_allclose(even[0, 0], np.full((2, 2), (2 + 1) * one / 2), rtol=1e-6)
    away = jax.tree.map(np.copy, batch_plan.plan)
    away.slot_expert[0, 0, 0, 1, 2], away.slot_expert[0, 0, 1, 1, 2] = EMPTY, 0
    ragged, even = (
        fetch_time(layer_plans(away, None), TOPOLOGY, price(fetch=kind)) for kind in ("ragged", "padded")
    )
    np.testing.assert_allclose(ragged[0, 0], [[10 * one, 0], [0, 10 * one]], rtol=1e-6)
    np.testing.assert_allclose(even[0, 0], np.full((2, 2), 10 * (2 + 1) * one / 2), rtol=1e-6)


def test_batch_time_hides_the_transfer_of_replicas_behind_attention(batch_plan):
    assert float(batch_time(batch_plan, 1000 * LENGTHS, TOPOLOGY, price()).exposed) == 0


def test_batch_time_hides_late_replicas_behind_home_experts(batch_plan):
    """Two of three experts are beside attention; the third is beside the homes of each rank, whose replicas follow.

    Rank (0, 1) has no rows at home and 13 for its replica, which fill one tile.
    """
    cost = price(fetch="padded", late_replicas=True)
    early, late = (batch_time(batch_plan, LENGTHS, TOPOLOGY, each) for each in (price(fetch="padded"), cost))
    fetch = 3 * (3 * 4 * 5 * 2) / 1000 / 0.5 * 3 / 2
    arrival = fetch / 3 + 3 * 16 * (2 * 3 * 4 * 5) / 5e5
    expected = fetch * 2 / 3 - float(late.attention) + arrival - float(late.compute)
    assert float(late.exposed) == pytest.approx(expected)
    gathered = 2 * 4 * MODEL.width / 1000
    rows = (7 * 17 + 0) / 4, (5 * (17 + 13) + 2 * 13) / 4
    extra = float(late.gather - early.gather)
    assert 0 < extra <= gathered * 4 * max(rows)
    homes_alone = jax.tree.map(np.copy, batch_plan.plan)
    homes_alone.slot_expert[0, 0, 0, 1, 2] = EMPTY
    none = batch_plan._replace(
        plan=homes_alone._replace(quota=np.where(np.arange(3) == 2, 0, homes_alone.quota))
    )
    assert float(batch_time(none, LENGTHS, TOPOLOGY, cost).exposed) == 0


@pytest.mark.parametrize("cost", [price(), padded(spare_room=True)], ids=["needed", "padded"])
def test_batch_time_with_scale_reads_a_small_trace_as_a_large_one(batch_plan, cost):
    """A token that stands for 16 costs what 16 samples of the same length cost."""
    cost_model = FLAT if cost.exchange == "needed" else dataclasses.replace(FLAT, exchange="padded")
    sample = np.repeat(batch_plan.assignment.sample, 16, axis=-1)
    big = BatchPlan(
        Assignment(sample), 16 * batch_plan.load, batch_plan.plan._replace(quota=16 * batch_plan.plan.quota)
    )
    expected = batch_time(big, LENGTHS, TOPOLOGY, price(cost_model))
    time = batch_time(batch_plan, LENGTHS, TOPOLOGY, price(cost_model, scale=16.0))
    for name, part in time._asdict().items():
        np.testing.assert_allclose(part, getattr(expected, name), rtol=1e-6, err_msg=name)


def test_reorder_time_is_the_same_inside_a_node_as_between_nodes():
    """Every expert goes in pieces over all ranks, there and back, and ranks send as many as the one with the most."""
    topology = dataclasses.replace(TOPOLOGY, num_experts=16)
    before = np.arange(16)[None]
    one = 2 * (3 * 4 * 5) * 12 * (1 - 1 / 2) / 100 / 0.5
    cost = price(topology=topology)

    def seconds(*swaps):
        now = before.copy()
        for a, b in swaps:
            now[0, [a, b]] = now[0, [b, a]]
        return float(reorder_time(now, before, topology, cost)) / one

    assert seconds() == 0
    assert seconds((0, 1)) == 0, "slots of one rank"
    assert seconds((0, 4)) == pytest.approx(1), "ranks of one node"
    assert seconds((0, 8)) == pytest.approx(1), "two nodes"
    assert seconds((0, 4), (1, 8)) == pytest.approx(2)
    assert seconds((0, 4), (1, 8), (2, 12)) == pytest.approx(4), "three round up to a power of two"
    assert float(reorder_time(before[:, ::-1], before, topology, cost)) / one == pytest.approx(4)


def test_reorder_time_counts_the_moves_of_the_migration():
    """As many experts are priced as `migrate_experts` sends from every rank."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=24, replica_slots=0)
    cost = Price(token=0.0, copy=0.0, crossing=0.0, spread=0.0, move=1.0, push=0.0)
    rng = np.random.default_rng(0)
    for moved in range(0, 25, 3):
        home = np.stack([rng.permutation(24) for _ in range(3)])
        previous = home.copy()
        for row in previous:
            row[:moved] = rng.permutation(row[:moved])
        sent = [
            move_tables(old, new, topology).leave.shape[1] for old, new in zip(previous, home, strict=True)
        ]
        assert float(reorder_time(home, previous, topology, cost)) == sum(sent)


def test_batch_time_has_the_same_head_and_update_for_all_plans():
    """The rest is counted by hand, and depends on the lengths of sequences, not on homes or replicas."""
    model = dataclasses.replace(MODEL, moe_layers=2, vocabulary=30)
    replay, some = a_batch("any")
    other = some._replace(plan=planned("static", TOPOLOGY, some.load))
    lengths = replay.mask.sum(1)
    positions = np.append(lengths, 0)[np.asarray(some.assignment.sample)].sum(-1).max()
    for updates in (1, 3):
        cost = price(model=model, updates=updates)
        times = [batch_time(each, lengths, TOPOLOGY, cost) for each in (some, other)]
        assert float(times[0].rest) == float(times[1].rest)
        head = 2 * positions * 3 * 2 * 4 * 30 / 5e5  # two micro-batches
        reduced = 2 * 4 * (50 + 2 * 4 * 30 / 2) * ((1 - 1 / 2) / 1000 + (1 - 1 / 2) / 2 / 100) / 0.5
        stepped = (2 * 12 + 4 + 2) * (2 * 60 + 50 / 4) / 2000 / 0.5
        assert float(times[0].rest) == pytest.approx(head + 2 * updates * (reduced + stepped))
    sharded = price(model=model, shards=4)
    assert cost.update / 3 - sharded.update == pytest.approx(stepped * 3 / 4)


@functools.cache
def a_batch(kind):
    rng = np.random.default_rng(0)
    replay = random_routing(rng, samples=12, tokens=9, layers=2, experts=8, top_k=3, skew=0)
    assignment = assign_in_order(12, TOPOLOGY, num_micro_batches=2)
    load = expert_load(replay, assignment, num_experts=8)
    if kind == "eplb":
        plan = planned("eplb", TOPOLOGY, load)
    else:
        plan = random_plan(rng, load, TOPOLOGY, across_nodes="across" in kind)
    return replay, BatchPlan(assignment, load, plan)


@pytest.fixture(scope="module", params=["eplb", "any", "any across nodes"])
def batch(request):
    return a_batch(request.param)


def sent_by(batch_plan):
    """Return the token copies from rank to rank, ``[M, L, N, G, N, G]``."""
    split = jax.vmap(jax.vmap(functools.partial(source_quota, topology=TOPOLOGY)))
    return np.asarray(jax.jit(split)(batch_plan.layer_plans())).sum(-1).reshape(2, 2, 2, 2, 2, 2)


def test_node_visits_never_exceed_the_copies_to_another_node(batch):
    replay, batch_plan = batch
    tokens = node_visits(replay, batch_plan, TOPOLOGY).reshape(2, 2, 2, 2, 2)
    copies = sent_by(batch_plan).sum(-1)
    assert (tokens <= copies).all()
    assert tokens.sum() < copies.sum()


def test_count_traffic_is_less_for_eplb_if_a_token_is_sent_once():
    """This is not true of all plans, because another rank of the node may receive the copies, but of this one."""
    replay, batch_plan = a_batch("eplb")
    visits = node_visits(replay, batch_plan, TOPOLOGY)
    flat, once = (count_traffic(batch_plan.layer_plans(), TOPOLOGY, visits=v) for v in (None, visits))
    busiest_flat, busiest_once = (np.maximum(each.slow_sent, each.slow_received) for each in (flat, once))
    assert (busiest_once <= busiest_flat).all()
    assert busiest_once.sum() < busiest_flat.sum()


def test_count_traffic_of_flat_dispatch_is_that_of_the_routes(batch):
    """Flat traffic, which is counted without routes, equals a count rank by rank."""
    _, batch_plan = batch
    sent = sent_by(batch_plan)
    slow, fast = np.zeros((2, 2, 2, 2, 2), int), np.zeros((2, 2, 2, 2, 2), int)
    for n, g, n2, g2 in np.ndindex(2, 2, 2, 2):
        if (n, g) != (n2, g2):
            kind = slow if n != n2 else fast
            kind[0, :, :, n, g] += sent[:, :, n, g, n2, g2]
            kind[1, :, :, n2, g2] += sent[:, :, n, g, n2, g2]
    traffic = count_traffic(batch_plan.layer_plans(), TOPOLOGY)
    np.testing.assert_array_equal((traffic.slow_sent, traffic.slow_received), slow)
    np.testing.assert_array_equal((traffic.fast_sent, traffic.fast_received), fast)


def test_count_traffic_of_hierarchical_dispatch_is_that_of_the_routes(batch):
    """A token crosses to the rank with its local index, which sends its copies to the ranks of the node."""
    replay, batch_plan = batch
    visits, sent = node_visits(replay, batch_plan, TOPOLOGY), sent_by(batch_plan)
    slow, fast = np.zeros((2, 2, 2, 2, 2), int), np.zeros((2, 2, 2, 2, 2), int)
    for n, g, n2, g2 in np.ndindex(2, 2, 2, 2):
        if g != g2:
            fast[0, :, :, n2, g] += sent[:, :, n, g, n2, g2]
            fast[1, :, :, n2, g2] += sent[:, :, n, g, n2, g2]
        if n != n2 and g == g2:
            tokens = visits.reshape(2, 2, 2, 2, 2)[:, :, n, g, n2]
            slow[0, :, :, n, g] += tokens
            slow[1, :, :, n2, g] += tokens
    traffic = count_traffic(batch_plan.layer_plans(), TOPOLOGY, visits=visits)
    np.testing.assert_array_equal((traffic.slow_sent, traffic.slow_received), slow)
    np.testing.assert_array_equal((traffic.fast_sent, traffic.fast_received), fast)


def test_count_traffic_agrees_with_cross_node_load(batch):
    """All that leaves a node is sent by one rank and received by another."""
    _, batch_plan = batch
    traffic = count_traffic(batch_plan.layer_plans(), TOPOLOGY)
    crossing = cross_node_load(batch_plan.layer_plans())
    np.testing.assert_array_equal(traffic.slow_sent.sum((2, 3)), crossing)
    np.testing.assert_array_equal(traffic.slow_received.sum((2, 3)), crossing)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["flat", "hierarchical"])
def test_balanced_time_has_the_traffic_of_uniform_routing(path):
    """The balanced time equals a count on tokens that draw their experts uniformly, on both paths."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=16, replica_slots=0)
    model = dataclasses.replace(MODEL, num_experts=16, top_k=3)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4, 4000, 1, 16)), axis=-1)[..., :3].astype(np.uint8)
    replay = RoutingReplay(ids, np.ones((4, 4000), bool))
    assignment = assign_in_order(4, topology, num_micro_batches=1)
    load = expert_load(replay, assignment, num_experts=16)
    batch_plan = BatchPlan(assignment, load, planned("static", topology, load))
    visits = node_visits(replay, batch_plan, topology) if path == "hierarchical" else None
    cost, lengths = price(topology=topology, model=model, path=path), np.full(4, 4000)
    exchange = batch_time(batch_plan, lengths, topology, cost, visits=visits).exchange
    for local in (None, visits):
        bound = balanced_time(load, lengths, topology, cost, visits=local).exchange
        np.testing.assert_allclose(exchange, bound, rtol=0.03)


def test_balanced_time_counts_the_locality_of_the_samples(batch_plan):
    """Of four ranks' ten crossings, each rank has a quarter; uniform routing of 20 tokens has more."""
    cost = price(path="hierarchical")
    local, uniform = (
        balanced_time(batch_plan.load, LENGTHS, TOPOLOGY, cost, visits=visits) for visits in (VISITS, None)
    )
    near = 10 * (1 - 1 / 2) * INSIDE
    assert float(local.exchange) == pytest.approx(10 / 4 * ACROSS + near)
    stays = (4 / 8) * (3 / 7)  # neither of two experts is in the other node
    assert float(uniform.exchange) == pytest.approx(20 / 4 * (1 - stays) * ACROSS + near)
    for part in ("attention", "compute", "rest"):
        assert getattr(local, part) == getattr(uniform, part)
    assert float(local.attention) == pytest.approx(3 * (5 * 2 * 50 + 50 * 10) / 5e5)
    assert float(local.compute) == pytest.approx(3 * 10 * 120 / 5e5), "half of what the busiest rank fills"


def test_balanced_time_with_padded_sequences_has_their_positions(batch_plan):
    cost = price(sequences="padded")
    time = balanced_time(batch_plan.load, LENGTHS, TOPOLOGY, cost, sequence_length=16.0, num_sequences=1)
    assert float(time.attention) == pytest.approx(3 * (16 * 2 * 50 + 16**2 * 10) / 5e5)
    same = batch_time(batch_plan, LENGTHS, TOPOLOGY, cost, sequence_length=16.0)
    assert float(same.attention) == pytest.approx(float(time.attention))
    with pytest.raises(ValueError, match="num_sequences must be given if sequences are padded"):
        balanced_time(batch_plan.load, LENGTHS, TOPOLOGY, cost)


def test_batch_time_overlap_saves_the_smaller_of_exchange_and_compute():
    """Layer by layer: the time is less by the smaller of the two in each, and a balanced run is priced alike."""
    replay, batch_plan = a_batch("any")
    lengths = replay.mask.sum(1)
    cost = dataclasses.replace(price(), tile=0.0, copy=2 * ACROSS)
    attention, _ = attention_time(batch_plan.assignment, lengths, cost)
    layers = layer_time(rank_time(batch_plan.layer_plans(), attention, TOPOLOGY, cost), cost)
    smaller = np.minimum(layers.exchange, layers.compute)
    assert (smaller == layers.exchange).any()
    time = batch_time(batch_plan, lengths, TOPOLOGY, cost)
    assert float(time.total - time.overlapped) == pytest.approx(float(smaller.sum()), rel=1e-4)
    balanced = balanced_time(batch_plan.load, lengths, TOPOLOGY, cost)
    assert float(balanced.overlapped) == pytest.approx(
        float(balanced.total - np.minimum(balanced.exchange, balanced.compute)), rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_balanced_time_is_a_bound_at_real_sizes(name):
    model = MODELS[name]
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=model.num_experts, replica_slots=2)
    rng = np.random.default_rng(0)
    share = rng.zipf(1.5, (2, 1, 1, 1, model.num_experts)).clip(0, 50).astype(float)
    copies = 4096 * model.top_k * share / share.sum(-1, keepdims=True)
    load = jnp.asarray(np.broadcast_to(copies, (2, 1, 2, 4, model.num_experts)), jnp.int32)
    cost = CostModel(cluster=CLUSTERS["h100"], model=model, path="flat").price(topology)
    assignment, lengths = assign_in_order(16, topology, num_micro_batches=2), np.full(16, 4096)
    bound = balanced_time(load, lengths, topology, cost)
    for name in ("static", "eplb"):
        time = batch_time(BatchPlan(assignment, load, planned(name, topology, load)), lengths, topology, cost)
        for part in ("attention", "compute", "exchange", "gather", "total"):
            assert (getattr(time, part) >= getattr(bound, part) * 0.999).all(), part


def test_models_have_sizes_that_add_up():
    """Active and total weights agree with the models' names, without embeddings."""
    for name, total, active in (
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("glm-4.5-106b-a12b", 106e9, 12e9),
        ("deepseek-v3", 671e9, 37e9),
        ("gpt-oss-20b", 20.9e9, 3.6e9),
        ("gpt-oss-120b", 116.8e9, 5.1e9),
    ):
        model = MODELS[name]
        every = model.moe_layers * (model.dense_params + model.num_experts * model.expert_params)
        used = model.moe_layers * (model.dense_params + model.top_k * model.expert_params)
        assert 0.93 * total < every < 1.01 * total, name
        assert 0.65 * active < used < 1.02 * active, name


def test_rank_time_of_a_shared_link_is_that_of_the_whole_node(batch_plan):
    """Rank (1, 1) sends 10 rows and its neighbour none; on a link that two ranks share, each has the time of 5."""
    attention, _ = attention_time(batch_plan.assignment, LENGTHS, price())
    shared = price(cluster=dataclasses.replace(CLUSTER, shared_link=True))
    sent = rank_time(batch_plan.layer_plans(), attention, TOPOLOGY, shared).between
    np.testing.assert_allclose(sent[0, 0], np.full((2, 2), 5 * ACROSS))
    own = rank_time(batch_plan.layer_plans(), attention, TOPOLOGY, price()).between
    assert float(own.max()) == pytest.approx(10 * ACROSS)


@pytest.mark.parametrize(
    ("stage", "compute", "exchange"),
    [
        ({"updates": 1, "recompute": False}, 3, 4),
        ({"updates": 5, "recompute": False}, 3, 4),
        ({"updates": 1, "recompute": True}, 4, 6),
        ({"updates": 0, "recompute": True}, 1, 2),
    ],
)
def test_batch_time_multiplies_by_the_passes_of_a_stage(batch_plan, stage, compute, exchange):
    """Forward passes multiply attention, experts and replicas; exchanges multiply rows and buffers."""
    forward = batch_time(batch_plan, LENGTHS, TOPOLOGY, FLAT.price(TOPOLOGY, updates=0, recompute=True))
    time = batch_time(batch_plan, LENGTHS, TOPOLOGY, FLAT.price(TOPOLOGY, **stage))
    times = {"attention": compute, "compute": compute, "exposed": compute, "exchange": exchange / 2}
    for part, factor in (times | {"gather": exchange / 2}).items():
        np.testing.assert_allclose(getattr(time, part), factor * getattr(forward, part), rtol=1e-6)
    assert float(time.exposed) > 0
    assert float(time.total) == pytest.approx(float(sum(time.parts().values())))


def whole_batch():
    """Return a batch of two micro-batches of two layers, its lengths, its node visits, and the previous homes."""
    replay, batch_plan = a_batch("any")
    home = np.stack([np.random.default_rng(1).permutation(8) for _ in range(2)])
    return {
        "batch_plan": batch_plan,
        "lengths": replay.mask.sum(1),
        "visits": node_visits(replay, batch_plan, TOPOLOGY),
        "previous_home": home,
    }


ONCE = dataclasses.replace(NEEDED, path="hierarchical")


def test_batch_time_of_stages_adds_up():
    """The times of a recompute alone and of an update alone, with the same plan, add up to that of both in one call."""
    batch = whole_batch()

    def run(previous_home, **passes):
        cost = ONCE.price(TOPOLOGY, **passes)
        return batch_time(**batch | {"previous_home": previous_home}, topology=TOPOLOGY, cost=cost)

    home = batch["previous_home"]
    both = run(home, updates=2, recompute=True)
    stages = run(None, updates=0, recompute=True), run(home, updates=2, recompute=False)
    for part, expected in both._asdict().items():
        if part != "hideable":  # the smaller of two sums
            np.testing.assert_allclose(sum(getattr(stage, part) for stage in stages), expected, rtol=1e-5)
    assert float(both.reorder) > 0


def test_batch_time_waits_for_the_slowest_copy():
    """The parts of the time are those of the copy with the longest total; the dense rest is counted once a copy."""
    replay, batch_plan = a_batch("any")
    lengths, cost = replay.mask.sum(1), dataclasses.replace(price(), token=0.0, gather=0.0)
    copies = [
        batch_time(
            jax.tree.map(lambda leaf, at=m: leaf[at : at + 1] if leaf.ndim > 2 else leaf, batch_plan),
            lengths,
            TOPOLOGY,
            cost,
        )
        for m in range(2)
    ]
    totals = [float(copy.total) for copy in copies]
    assert min(totals) < max(totals)
    actual = batch_time(batch_plan, lengths, TOPOLOGY, dataclasses.replace(cost, data_parallel=2))
    np.testing.assert_allclose(actual, copies[int(np.argmax(totals))], rtol=1e-6)
    alone = batch_time(batch_plan, lengths, TOPOLOGY, cost)
    assert float(alone.total) == pytest.approx(sum(totals) - float(alone.rest))


def test_batch_time_is_the_same_under_jit_and_vmap_and_compiles_once(monkeypatch):
    """Stacked batches have the times of each alone, and other batches and prices do not compile again."""
    batch = whole_batch()
    other = batch | {"batch_plan": a_batch("any across nodes")[1]}
    cost = price(ONCE)

    def planes(batch):
        return batch["batch_plan"], batch["lengths"], batch["visits"], batch["previous_home"]

    def call(batch_plan, lengths, visits, previous_home, cost=cost):
        return batch_time(batch_plan, lengths, TOPOLOGY, cost, visits=visits, previous_home=previous_home)

    before = [call(*planes(one)) for one in (batch, other)]
    with monkeypatch.context() as context:
        context.setattr(
            sys.modules["relibra_jax.cost.batch_time"], "rank_time", None
        )  # a trace would call it
        alone = [call(*planes(one)) for one in (other, batch)][::-1]
        call(*planes(batch), cost=price(ONCE, scale=2.0))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), planes(batch), planes(other))
    together = jax.jit(jax.vmap(call))(*stacked)
    for number in range(2):
        one = jax.tree.map(lambda leaf, at=number: leaf[at], together)
        np.testing.assert_allclose(one, alone[number], rtol=1e-5)
        np.testing.assert_array_equal(before[number], alone[number])
    assert isinstance(together, BatchTime)
    assert float(together.total[0]) != float(together.total[1])


@pytest.mark.parametrize(
    "cost_model", [FLAT, ONCE, CostModel(cluster=CLUSTER, model=MODEL)], ids=["flat", "once", "auto"]
)
def test_batch_time_never_falls_with_more_work_or_slower_networks(cost_model):
    batch = whole_batch() | {"topology": TOPOLOGY}
    if cost_model.path == "flat":
        batch["visits"] = None
    base = batch_time(**batch, cost=price(cost_model))
    for change in (
        {"scale": 3.0},
        {"stretch": 2.0},
        {"updates": 3},
        {"recompute": True},
        {"cluster": dataclasses.replace(CLUSTER, slow_bandwidth=50.0)},
        {"cluster": dataclasses.replace(CLUSTER, fast_bandwidth=10.0)},
        {"cluster": dataclasses.replace(CLUSTER, matmul_flops=5e5)},
        {"cluster": dataclasses.replace(CLUSTER, memory_bandwidth=20.0)},
    ):
        time = batch_time(**batch, cost=price(cost_model, **change))
        # Longer attention hides more.
        for part in set(BatchTime._fields) - {"exposed"}:
            assert getattr(time, part) >= getattr(base, part), (change, part)
        assert float(time.total) >= float(base.total) * (1 - 1e-6), change


def test_price_is_what_a_unit_takes():
    """Each phase has one busiest rank, whose work is counted by hand."""
    topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    model = dataclasses.replace(MODEL, num_experts=2, top_k=1)
    one_tile = dataclasses.replace(CLUSTER, tile=1)
    load = np.array([[[[[3, 7]], [[0, 0]]]]], np.int32)  # rank 0 has 10 tokens and sends 7 to the other node
    plan = Plan(*(np.array(leaf, np.int32) for leaf in ([[[[[0]], [[1]]]]], [[0, 1]], [[[[[3]], [[7]]]]])))
    batch_plan = BatchPlan(Assignment(np.array([[[[0]], [[EMPTY]]]])), load, plan)
    visits = np.array([[[[3, 7], [0, 0]]]])
    for stage in ({}, {"recompute": True}, {"updates": 0, "recompute": True}):
        for path, crossed in (("flat", None), ("hierarchical", visits)):
            units = price(topology=topology, model=model, cluster=one_tile, path=path, scale=2.0, **stage)
            time = batch_time(batch_plan, np.array([10]), topology, units, visits=crossed)
            attention = 10 * units.token + 100 * units.pair
            np.testing.assert_allclose(time[:3], (attention, 7 * units.copy, 7 * units.crossing), rtol=1e-6)
            assert units.hierarchical == (crossed is not None)
            assert units.spread == pytest.approx(units.crossing / 10), "the fast network is ten times as fast"
    for updates in (1, 3):
        units = price(updates=updates, scale=2.0)
        assert units.push == pytest.approx(updates * 3 * 4 * 5 * (2 + 4) / 100 / 0.5)
        assert units.push_inside == pytest.approx(units.push / 10)
        assert units.move == pytest.approx(price().move), "experts do not grow with the trace"
    assert price(stretch=3.0).pair == pytest.approx(3 * price().pair)


def test_cost_model_auto_is_what_runs_on_gpus():
    """Exchanges are fitted, and replicas padded; the path is that of the rule of layers."""
    auto = CostModel(cluster=CLUSTER, model=MODEL)

    def chosen(nodes, local, **changes):
        topology = Topology(num_nodes=nodes, ranks_per_node=local, num_experts=48, replica_slots=0)
        run = dataclasses.replace(auto, **changes).on(topology)
        return run.path, run.exchange, run.fetch, run.sequences

    assert chosen(2, 8) == ("hierarchical", "fitted", "padded", "packed")
    assert chosen(1, 8) == chosen(2, 8)
    assert chosen(1, 8, exchange="ragged")[0] == chosen(1, 1)[0] == "flat"
    assert chosen(1, 8, path="flat") == chosen(2, 4, path="flat") == ("flat", "fitted", "padded", "packed")
    one_expert = dataclasses.replace(MODEL, top_k=1)
    assert chosen(2, 4, model=one_expert, sequences="padded")[::3] == ("flat", "padded")
    assert chosen(2, 4, exchange="padded", fetch="ragged")[1:3] == ("padded", "ragged")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data_parallel": 3}, "2 micro-batches must divide evenly over data_parallel=3"),
        ({"visits": None}, "cost has hierarchical=True, which needs visits of nodes"),
        ({"path": "flat"}, "cost has hierarchical=False, which needs no visits"),
        (
            {"visits": np.zeros((2, 2, 3, 2), int)},
            r"visits: expected shape \(2, 2, 4, 2\), found \(2, 2, 3, 2\)",
        ),
        (
            {"visits": None, "path": "flat", "previous_home": np.zeros((1, 8), int)},
            r"previous_home: expected shape \(2, 8\), found \(1, 8\)",
        ),
        (
            {"topology": dataclasses.replace(TOPOLOGY, num_nodes=1)},
            r"load: expected shape \(2, 2, 1, 2, 8\), found \(2, 2, 2, 2, 8\)",
        ),
    ],
)
def test_batch_time_rejects_bad_input(wrong, message):
    batch = whole_batch() | {"topology": TOPOLOGY} | wrong
    names = {field.name for field in dataclasses.fields(CostModel)}
    cost = price(ONCE, **{name: batch.pop(name) for name in names & set(batch)})
    with pytest.raises(ValueError, match=message):
        batch_time(**batch, cost=cost)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 0.0}, "scale=0.0 must be positive and finite"),
        ({"stretch": float("nan")}, "stretch=nan must be positive and finite"),
        ({"updates": -1}, "updates=-1 must be an integer of at least 0"),
        ({"updates": 0}, "updates=0 and recompute=False leave no pass to run"),
        ({"data_parallel": 0}, "data_parallel=0 must be an integer of at least 1"),
        ({"shards": 0}, "shards=0 must be an integer of at least 1"),
        ({"path": "ring"}, "path='ring' must be one of auto, flat, hierarchical"),
        ({"exchange": "even"}, "exchange='even' must be one of auto, padded, ragged"),
        ({"sequences": "long"}, "sequences='long' must be one of auto, packed, padded"),
        (
            {"cluster": dataclasses.replace(CLUSTER, slow_bandwidth=0.0)},
            "cluster.slow_bandwidth=0.0 must be positive",
        ),
        ({"model": dataclasses.replace(MODEL, top_k=0)}, "model.top_k=0 must be an integer of at least 1"),
    ],
)
def test_cost_model_rejects_bad_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(NEEDED, **wrong)


def test_price_is_for_the_experts_of_the_model():
    """A topology may pad the model with experts that no token is routed to, but not leave some out."""
    with pytest.raises(
        ValueError, match="cost: the model has num_experts=8, but the topology has num_experts=4"
    ):
        NEEDED.price(dataclasses.replace(TOPOLOGY, num_experts=4))
    assert NEEDED.price(dataclasses.replace(TOPOLOGY, num_experts=12)).copy == price().copy


@pytest.mark.parametrize(
    ("recompute", "updates", "share"), [(False, 1, 7 / 8), (True, 1, 5 / 6), (True, 0, 3 / 4)]
)
def test_price_of_a_float8_dispatch_is_less_only_for_the_rows_that_travel_forward(recompute, updates, share):
    """One of two exchanges of a forward pass is a dispatch; a backward pass has two that stay in bfloat16."""
    model = CostModel(cluster=CLUSTER, model=MODEL)
    usual = model.price(TOPOLOGY, updates=updates, recompute=recompute)
    float8 = dataclasses.replace(model, dispatch_bytes=1).price(
        TOPOLOGY, updates=updates, recompute=recompute
    )
    assert float8.crossing == pytest.approx(usual.crossing * share)
    assert float8.spread == pytest.approx(usual.spread * share)
    assert dataclasses.replace(float8, crossing=usual.crossing, spread=usual.spread) == usual
