"""The cost of residents: transfers between nodes once per update, and the memory of their slots."""

import dataclasses

import numpy as np
import pytest
from support.costs import MODEL, NEEDED

from relibra_jax.contract.types import EMPTY, Assignment, BatchPlan, Plan, Topology, layer_plans
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.cost.copies import fetch_time
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.memory import check_rank_memory, rank_memory
from relibra_jax.cost.models import MODELS

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


def cost_of(topology=TOPOLOGY, **changes):
    model = dataclasses.replace(MODEL, num_experts=6)
    return dataclasses.replace(NEEDED, **{"path": "flat", "model": model} | changes).price(topology)


def seconds_of(plan, topology=TOPOLOGY, **changes):
    layers, ranks = plan.home.shape[0], (topology.num_nodes, topology.ranks_per_node)
    load = np.zeros((1, layers, *ranks, topology.num_experts), np.int32)
    nobody = Assignment(np.full((1, *ranks, 1), EMPTY))
    return batch_time(BatchPlan(nobody, load, plan), np.ones(1, int), topology, cost_of(topology, **changes))


ACROSS = 3 * 4 * 5 * (2 + 4) / 100 / 0.5
"""One expert's weights there and its gradients back, over the slow network."""
INSIDE = ACROSS / 10


@pytest.mark.parametrize(
    ("where", "exports", "pairs"),
    [
        ({}, 0, 0),
        ({0: {2: [0]}}, 1, 1),
        ({0: {2: [0], 3: [0]}}, 1, 1),  # once to a node, then inside it
        ({0: {2: [0], 4: [0]}}, 1, 1),  # to two nodes, whose lanes are equal
        ({0: {2: [0], 4: [1]}}, 1, 1),  # two homes of one node, each to another node
        ({0: {2: [0], 3: [1]}}, 1, 2),  # two homes of one node, both to the same node
        ({0: {2: [0, 5]}}, 1, 1),  # one rank takes two, from two nodes
        ({0: {2: [0]}, 1: {5: [0]}}, 2, 1),  # two layers of one home, to two nodes
        ({0: {2: [0]}, 1: {2: [0]}}, 2, 2),
        ({0: {1: [0]}}, 1, 0),  # inside a node nothing crosses
    ],
)
def test_batch_time_pushes_residents_in_three_hops(where, exports, pairs):
    """Each hop sends equal lanes: of exports inside the home's node, of what a node needs from another one between
    nodes, where each rank carries its part, and of all resident slots inside the target's node."""
    time = seconds_of(resident_plan(where, layers=2))
    slots, nodes, local = 2 * 2, 3, 2
    inside = (exports + slots) * (1 - 1 / local) * INSIDE if exports else 0
    assert float(time.push) == pytest.approx(inside + pairs * (nodes - 1) / local * ACROSS)
    assert float(time.total) == pytest.approx(float(time.push + time.rest + time.gather)), "nothing hides it"


def test_batch_time_pushes_residents_once_in_every_update():
    plan = resident_plan({0: {2: [0]}})
    once = float(seconds_of(plan).push)
    assert once > 0
    for updates, recompute in ((0, True), (1, True), (4, False)):
        push = seconds_of(plan, updates=updates, recompute=recompute).push
        assert float(push) == pytest.approx(updates * once)


def test_fetch_time_takes_a_replica_from_the_resident_next_to_it():
    plan = resident_plan({0: {2: [0]}})
    plan.slot_expert[0, 0, 1, 1, 3] = 0
    one = 3 * (3 * 4 * 5 * 2) / 1000 / 0.5
    near = fetch_time(layer_plans(plan, None), TOPOLOGY, cost_of())
    np.testing.assert_allclose(np.ravel(near), [0, 0, one, one, 0, 0])
    far = resident_plan({})
    far.slot_expert[0, 0, 1, 1, 3] = 0
    away = fetch_time(layer_plans(far, None), TOPOLOGY, cost_of())
    np.testing.assert_allclose(np.ravel(away), [10 * one, 0, 0, 10 * one, 0, 0], rtol=1e-6)


def test_rank_memory_of_resident_slots_is_that_of_their_layers():
    """A slot holds weights of 2 bytes and accumulators of 4, in all layers."""
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


def test_rank_memory_equals_a_count_by_hand():
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


def test_check_rank_memory_refuses_residents_that_do_not_fit():
    """Qwen3-235B on 32 H100, sharded over five copies: one resident slot fits, three do not; they do on H200."""
    model = MODELS["qwen3-235b-a22b"]
    topology = Topology(num_nodes=4, ranks_per_node=8, num_experts=128, replica_slots=2, resident_slots=1)
    check_rank_memory(topology, model, cluster=CLUSTERS["h100"], shards=5)
    more = dataclasses.replace(topology, resident_slots=3)
    with pytest.raises(
        ValueError, match=r"^resident_slots=3: a rank needs 83\.\d GB \(homes 36\.9, .*\) and has 80\.0 GB$"
    ):
        check_rank_memory(more, model, cluster=CLUSTERS["h100"], shards=5)
    check_rank_memory(more, model, cluster=CLUSTERS["h200"], shards=5)


def test_rank_memory_rejects_what_cannot_exist():
    with pytest.raises(ValueError, match="shards=0 must be an integer of at least 1"):
        rank_memory(TOPOLOGY, MODEL, shards=0)
    with pytest.raises(ValueError, match="num_experts=6, fewer than the model's 128"):
        rank_memory(TOPOLOGY, MODELS["qwen3-30b-a3b"])
