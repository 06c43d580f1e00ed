"""The cost of residents: transfers between nodes once per update, and the memory of their slots."""

import dataclasses

import numpy as np
import pytest
from support.costs import CLUSTER, KNOWN, MODEL

from relibra_jax.cost.batch_time import batch_time
from relibra_jax.cost.copies import push_time
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.memory import check_rank_memory, rank_memory
from relibra_jax.cost.models import MODELS
from relibra_jax.types import EMPTY, BatchPlan, Plan, Topology, layer_plans

TOPOLOGY = Topology(num_nodes=3, ranks_per_node=2, num_experts=6, replica_slots=1, resident_slots=2)


def resident_plan(where, layers=1):
    """Return a plan with the home of expert e on rank e, and residents by ``where``: ``{layer: {rank: [experts]}}``."""
    slot_expert = np.full((1, layers, 6, 4), EMPTY, np.int32)
    slot_expert[..., 0] = np.arange(6)
    for layer, ranks in where.items():
        for rank, experts in ranks.items():
            slot_expert[0, layer, rank, 1 : 1 + len(experts)] = experts
    home = np.tile(np.arange(6, dtype=np.int32), (layers, 1))
    slot_expert = slot_expert.reshape(1, layers, 3, 2, 4)
    return Plan(slot_expert, home, np.zeros_like(slot_expert))


def seconds_of(plan, topology=TOPOLOGY, **more):
    layers = plan.home.shape[0]
    load = np.zeros((1, layers, topology.num_nodes, topology.ranks_per_node, topology.num_experts), np.int32)
    setting = KNOWN | {"model": dataclasses.replace(MODEL, num_experts=6)} | more
    return batch_time(BatchPlan(None, load, plan), topology, **setting)


ACROSS = (
    3 * 4 * 5 * (2 + 4) / 100 / 0.5
)  # one expert's weights there and its gradients back, over the slow network


@pytest.mark.parametrize(
    ("where", "halves"),
    [
        ({}, 0),
        ({0: {2: [0]}}, 1),  # each rank of the home's node carries half of it
        ({0: {2: [0], 3: [0]}}, 1),  # once to a node, then inside it
        ({0: {2: [0], 4: [0]}}, 2),  # to two nodes
        ({0: {2: [0], 4: [1]}}, 2),  # two homes of one node share its links
        ({0: {2: [0], 0: [4]}}, 1),  # two nodes do not
        ({0: {2: [0, 5]}}, 2),  # one rank takes two
        ({0: {2: [0]}, 1: {5: [0]}}, 2),  # layers follow one another on the links of the home's node
        ({0: {2: [0]}, 1: {0: [2]}}, 1),  # what is sent and what is received do not add up
    ],
)
def test_residents_cross_once_to_a_node(where, halves):
    time = seconds_of(resident_plan(where, layers=2))
    assert float(time.push) == pytest.approx(halves * ACROSS / 2)
    assert float(time.total) == pytest.approx(float(time.push)), "nothing hides it"


def test_residents_spread_inside_the_node():
    """On a fast network that is slower than the slow one, what ranks send to their neighbours counts: half of each
    expert that they own, and half of what each neighbour takes."""
    cluster = dataclasses.replace(CLUSTER, fast_bandwidth=10.0)
    for where, halves in (
        ({2: [0]}, 1),
        ({2: [0], 3: [0]}, 1),  # rank 2 takes one half and sends the other on
        ({2: [0, 1], 3: [0]}, 2),
        ({1: [0]}, 2),  # there and back again between two neighbours
        ({1: [0], 2: [0, 1]}, 2),
    ):
        time = seconds_of(resident_plan({0: where}), cluster=cluster)
        assert float(time.push) == pytest.approx(halves * 10 * ACROSS / 2), where


def test_every_update_pushes_residents_once():
    plan = resident_plan({0: {2: [0]}})
    for updates, recompute in ((0, True), (1, True), (4, False)):
        push = seconds_of(plan, updates=updates, recompute=recompute).push
        assert float(push) == pytest.approx(updates * ACROSS / 2)


def test_a_replica_comes_from_the_resident_next_to_it():
    plan = resident_plan({0: {2: [0]}})
    plan.slot_expert[0, 0, 1, 1, 3] = 0
    near = push_time(layer_plans(plan, None), TOPOLOGY, cluster=CLUSTER, model=MODEL)
    assert float(near.max()) == pytest.approx(3 * 4 * 5 * 2 / 1000 / 0.5)
    assert np.flatnonzero(near).tolist() == [2, 3]
    far = resident_plan({})
    far.slot_expert[0, 0, 1, 1, 3] = 0
    assert float(
        push_time(layer_plans(far, None), TOPOLOGY, cluster=CLUSTER, model=MODEL).max()
    ) == pytest.approx(3 * 4 * 5 * 2 / 100 / 0.5)


def test_resident_slots_take_the_memory_of_their_layers():
    """Weights of 2 bytes and accumulators of 4, in all layers."""
    for name, gigabytes in (("gpt-oss-20b", 3.58), ("qwen3-235b-a22b", 10.65)):
        model = MODELS[name]
        topology = Topology(
            num_nodes=2, ranks_per_node=8, num_experts=model.num_experts, replica_slots=2, resident_slots=1
        )
        memory = rank_memory(topology, model)
        assert memory.residents / 1e9 == pytest.approx(gigabytes, abs=0.006), name
        twice = dataclasses.replace(topology, resident_slots=2)
        assert rank_memory(twice, model).residents == 2 * memory.residents
        assert rank_memory(twice, model, shards=4).residents == 2 * memory.residents, "residents are whole"


def test_memory_by_hand():
    topology = Topology(num_nodes=1, ranks_per_node=4, num_experts=8, replica_slots=1)
    model = dataclasses.replace(MODEL, moe_layers=3, shared_width=2)
    expert, dense = 3 * 4 * 5, 50 + 3 * 4 * 2
    assert rank_memory(topology, model, shards=2) == (
        2 * 3 * expert * (2 + (4 + 8 + 4) / 2),
        0,
        3 * expert * 2,
        3 * dense * (2 + 16 / 8),
    )
    assert rank_memory(topology, model).homes == 2 * 3 * expert * 18


def test_residents_that_do_not_fit_are_refused():
    """Qwen3-235B on 32 H100, sharded over five copies: one resident slot fits, two do not; they do on H200."""
    model = MODELS["qwen3-235b-a22b"]
    topology = Topology(num_nodes=4, ranks_per_node=8, num_experts=128, replica_slots=2, resident_slots=1)
    check_rank_memory(topology, model, cluster=CLUSTERS["h100"], shards=5)
    more = dataclasses.replace(topology, resident_slots=3)
    with pytest.raises(
        ValueError, match=r"^resident_slots=3: a rank needs 83\.\d GB \(homes 36\.9, .*\) and has 80\.0 GB$"
    ):
        check_rank_memory(more, model, cluster=CLUSTERS["h100"], shards=5)
    check_rank_memory(more, model, cluster=CLUSTERS["h200"], shards=5)


def test_memory_of_nothing_that_exists():
    with pytest.raises(ValueError, match="shards=0 must be an integer of at least 1"):
        rank_memory(TOPOLOGY, MODEL, shards=0)
    with pytest.raises(ValueError, match="num_experts=6, fewer than the model's 128"):
        rank_memory(TOPOLOGY, MODELS["qwen3-30b-a3b"])
