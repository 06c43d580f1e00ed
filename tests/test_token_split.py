"""The slots that serve token copies: exact quotas, nearest first, and crossings counted token by token."""

import functools

import jax
import numpy as np
import pytest
from support.plans import random_plan, random_routing

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import EMPTY, BatchPlan, LayerPlan, Topology
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.baselines.eplb import eplb
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.metrics import cross_node_load
from relibra_jax.routing.slots import copy_slots
from relibra_jax.routing.split import pair_load, source_quota
from relibra_jax.routing.visits import node_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=2, resident_slots=1)
"""A topology with resident slots, which planners leave empty and random plans fill."""


@pytest.fixture(scope="module")
def replay():
    rng = np.random.default_rng(0)
    return random_routing(rng, samples=12, tokens=9, layers=2, experts=8, top_k=3)


@pytest.fixture(scope="module", params=["intra-node", "across nodes", "static", "any", "any across nodes"])
def batch(request, replay):
    """Make a batch of two micro-batches, with plans that split tokens differently."""
    across = "across nodes" in request.param
    assignment = assign_in_order(12, TOPOLOGY, num_micro_batches=2)
    load = expert_load(replay, assignment, num_experts=8)
    if request.param.startswith("any"):
        plan = random_plan(np.random.default_rng(1), load, TOPOLOGY, across_nodes=across)
    else:
        planner = static() if request.param == "static" else eplb(across_nodes=across)
        plan, _ = jax.jit(planner.update)(
            PlanRequest(load), planner.init(TOPOLOGY, 2, key=jax.random.key(0)), TOPOLOGY
        )
    check_plan(plan, load, TOPOLOGY, across_nodes=across)
    residents = resident_experts(plan, TOPOLOGY)
    assert (np.asarray(residents) != EMPTY).any() == request.param.startswith("any")
    return BatchPlan(assignment, load, plan)


@functools.cache
def split():
    return jax.jit(jax.vmap(jax.vmap(functools.partial(source_quota, topology=TOPOLOGY))))


def sent_by(batch):
    """Return the tokens of each rank in each slot, ``[M, L, P, N, G, S]``."""
    return np.asarray(split()(batch.layer_plans()))


def test_source_quota_sends_every_copy_once(batch):
    sent, plan = sent_by(batch), batch.plan
    assert (sent >= 0).all()
    np.testing.assert_array_equal(sent.sum(2), plan.quota)
    load = np.asarray(batch.load).reshape(2, 2, 4, 8)
    for expert in range(8):
        served = (sent * (np.asarray(plan.slot_expert) == expert)[:, :, None]).sum((3, 4, 5))
        np.testing.assert_array_equal(served, load[..., expert])


def test_pair_load_is_the_sum_over_slots(batch):
    count = jax.jit(jax.vmap(jax.vmap(functools.partial(pair_load, topology=TOPOLOGY))))
    expected = sent_by(batch).sum(-1).reshape(2, 2, 4, 4)
    np.testing.assert_array_equal(count(batch.layer_plans()), expected)


def test_source_quota_uses_the_own_rank_then_the_own_node_first(batch):
    """A copy leaves its rank only if the rank's quota is used up, and its node only if the node's quota is."""
    sent, plan = sent_by(batch), batch.plan
    load = np.asarray(batch.load).reshape(2, 2, 4, 8)
    holds = np.asarray(plan.slot_expert)[:, :, None] == np.arange(8).reshape(8, 1, 1, 1)[None, None]
    quota = (holds * np.asarray(plan.quota)[:, :, None]).sum(-1).reshape(2, 2, 8, 4)
    for rank in range(4):
        own = sent[:, :, rank, rank // 2, rank % 2][:, :, None] * holds[:, :, :, rank // 2, rank % 2]
        np.testing.assert_array_equal(own.sum(-1), np.minimum(load[:, :, rank], quota[..., rank]))
    crossing = sum(sent[:, :, rank, 1 - rank // 2].sum((2, 3)) for rank in range(4))
    np.testing.assert_array_equal(crossing, cross_node_load(batch.layer_plans()))


def test_source_quota_sends_away_as_much_from_every_rank():
    """All ranks send the same number of copies to the other node if all experts are alike.

    Each of eight experts has a copy in the other node, which computes half of that node's tokens. The other half
    crosses.
    """
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=8, replica_slots=1)
    home = np.arange(8, dtype=np.int32).reshape(2, 4, 1)
    copies = np.roll(home[::-1], 1, axis=1)
    plan = LayerPlan(
        slot_expert=np.concatenate([home, copies], -1),
        home=np.arange(8),
        quota=np.broadcast_to(np.array([96, 32], np.int32), (2, 4, 2)),
        load=np.full((2, 4, 8), 16, np.int32),
    )
    sent = np.asarray(source_quota(plan, topology)).reshape(2, 4, 2, 8).sum(-1)
    np.testing.assert_array_equal([sent[0, :, 1], sent[1, :, 0]], np.full((2, 4), 32))


def test_source_quota_gives_every_slot_as_many_copies_of_each_rank():
    """Two copies of one expert divide the tokens of ranks without a copy as their quotas do: 1 to 3."""
    topology = Topology(num_nodes=1, ranks_per_node=4, num_experts=4, replica_slots=1)
    plan = LayerPlan(
        slot_expert=np.array([[[0, EMPTY], [1, EMPTY], [2, EMPTY], [3, 0]]]),
        home=np.arange(0, 8, 2),
        quota=np.array([[[100, 0], [0, 0], [0, 0], [0, 300]]]),
        load=np.array([[[0, 0, 0, 0], [200, 0, 0, 0], [200, 0, 0, 0], [0, 0, 0, 0]]]),
    )
    sent = np.asarray(source_quota(plan, topology))[:, 0]
    np.testing.assert_array_equal(sent[[1, 2], 0, 0], [50, 50])
    np.testing.assert_array_equal(sent[[1, 2], 3, 1], [150, 150])


def test_source_quota_divides_the_copies_of_a_node_over_all_slots_of_its_node():
    """Two copies of one expert are in the first node and serve both: each takes half of the copies of either node."""
    topology = Topology(num_nodes=2, ranks_per_node=3, num_experts=6, replica_slots=1)
    slot_expert = np.arange(6).reshape(2, 3, 1)
    slot_expert = np.concatenate([slot_expert, np.full_like(slot_expert, EMPTY)], -1)
    slot_expert[0, 1, 1] = 0
    quota, load = np.zeros((2, 3, 2), int), np.zeros((2, 3, 6), int)
    quota[0, 0, 0] = quota[0, 1, 1] = 100
    load[0, 2, 0], load[1, 2, 0] = 80, 120
    sent = np.asarray(source_quota(LayerPlan(slot_expert, np.arange(0, 12, 2), quota, load), topology))
    np.testing.assert_array_equal(sent[2, 0, [0, 1], [0, 1]], [40, 40])
    np.testing.assert_array_equal(sent[5, 0, [0, 1], [0, 1]], [60, 60])


def test_node_visits_are_those_of_the_copies_slots(replay, batch):
    """Find the slots of the copies of each rank's tokens with `copy_slots`."""
    sent = sent_by(batch)
    expected = np.zeros((2, 2, 4, 2), int)
    serve = jax.jit(functools.partial(copy_slots, topology=TOPOLOGY))
    for m, layer, rank in np.ndindex(2, 2, 4):
        samples = batch.assignment.sample[m, rank // 2, rank % 2]
        samples = samples[samples != EMPTY]
        ids = np.where(
            replay.mask[samples][..., None], replay.expert_ids[samples, :, layer].astype(int), EMPTY
        )
        slots = np.asarray(batch.plan.slot_expert)[m, layer]
        served = np.asarray(serve(ids.reshape(-1, 3), slots, sent[m, layer, rank], node=rank // 2))
        for token in served:
            for node in set((token[token != EMPTY] // (2 * TOPOLOGY.slots)).tolist()):
                expected[m, layer, rank, node] += 1
    np.testing.assert_array_equal(node_visits(replay, batch, TOPOLOGY), expected)


def test_node_visits_of_a_further_batch_compile_nothing(replay, batch, caplog):
    """Visits are counted for every batch between plan and step, so counting must not compile again."""
    node_visits(replay, batch, TOPOLOGY)
    with jax.log_compiles():
        node_visits(replay, batch, TOPOLOGY)
    assert "Compiling" not in caplog.text


def test_source_quota_of_one_layer_is_the_same_with_and_without_jit(batch):
    """Counting one layer, compiled or not, gives the same as counting all layers."""
    layer = batch.micro_batch(1).layer(0)
    for result in (source_quota(layer, TOPOLOGY), jax.jit(source_quota)(layer, TOPOLOGY)):
        assert result.shape == (4, 2, 2, TOPOLOGY.slots)
        np.testing.assert_array_equal(result, sent_by(batch)[1, 0])
