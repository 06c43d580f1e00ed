"""The price of what data-parallel groups exchange: bytes by hand, and groups of fewer nodes beside one group."""

import dataclasses

import pytest

from relibra_jax.contract.types import Topology
from relibra_jax.cost import CLUSTERS, MODELS, CostModel, group_exchange_time, rank_memory
from relibra_jax.evaluation import Batching, Costs, make_setting
from relibra_jax.evaluation.advice import Advice, price
from relibra_jax.evaluation.group_sizes import (
    group_setting,
    groups_without_samples,
    price_groups,
    smaller_groups,
    strategies_of,
)
from relibra_jax.evaluation.strategies import strategies
from relibra_jax.traces.read import read_trace

MODEL = MODELS["qwen3-30b-a3b"]
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=8, num_experts=128, replica_slots=0)
ONE_BYTE = dataclasses.replace(CLUSTERS["h100"], slow_bandwidth=1.0, network_efficiency=1.0)
"""A cluster on which a second between nodes is a byte."""
EXPERTS = 8 * MODEL.expert_params
DENSE = MODEL.dense_params + 2 * MODEL.width * MODEL.vocabulary / MODEL.moe_layers


def sent(micro_batches=8, *, gather_once=False, topology=TOPOLOGY, **changes):
    cost_model = CostModel(cluster=ONE_BYTE, model=MODEL, **changes)
    return group_exchange_time(cost_model, topology, micro_batches=micro_batches, gather_once=gather_once)


@pytest.mark.parametrize(
    ("changes", "expert_bytes"),
    [
        ({}, 0),
        ({"shards": 4}, 8 * 3 * 2 * 3 / 4),
        ({"shards": 4, "recompute": True}, 8 * 4 * 2 * 3 / 4),
        ({"shards": 4, "gather_once": True}, (2 + 4) * 3 / 4),
        ({"shards": 4, "gather_once": True, "updates": 2, "recompute": True}, (2 * (2 + 4) + 2) * 3 / 4),
        ({"shards": 4, "compute_bytes": 4}, 8 * 3 * 4 * 3 / 4),
        ({"data_parallel": 4}, 2 * 4 * 3 / 4),
        ({"data_parallel": 4, "shards": 2, "gather_once": True}, (2 + 4) / 2 + 2 * 4 / 2 / 2),
    ],
)
def test_groups_send_the_bytes_of_experts_that_each_way_takes(changes, expert_bytes):
    groups = max(changes.get("shards", 1), changes.get("data_parallel", 1))
    # Float32 sums of dense gradients go on from the 2 nodes of a group to those of all groups, divided over 16 ranks.
    dense = changes.get("updates", 1) * 2 * 4 * DENSE / 16 * (1 - 1 / groups)
    assert sent(**changes) == pytest.approx(expert_bytes * EXPERTS + dense)


def test_a_gather_once_sends_what_one_micro_batch_does_and_takes_whole_totals():
    assert sent(1, shards=4) == sent(1, shards=4, gather_once=True) == sent(9, shards=4, gather_once=True)
    part, whole = (rank_memory(TOPOLOGY, MODEL, shards=4, gather_once=once) for once in (False, True))
    assert whole.homes - part.homes == pytest.approx(MODEL.moe_layers * EXPERTS * 4 * 3 / 4)
    assert whole[1:] == part[1:]
    assert rank_memory(TOPOLOGY, MODEL, gather_once=True) == rank_memory(TOPOLOGY, MODEL)


@pytest.mark.parametrize(
    ("changes", "expert_bytes"),
    [
        ({"shards": 4, "recompute": True}, 8 * 4 * 2 * 3 / 4),
        ({"shards": 4, "recompute": True, "gather_once": True}, (2 + 4) * 3 / 4),
        ({"data_parallel": 4}, 2 * 4 * 3 / 4),
    ],
)
def test_residents_are_exchanged_with_their_experts_and_once_for_update_and_recompute(changes, expert_bytes):
    topology = dataclasses.replace(TOPOLOGY, resident_slots=3)
    residents = sent(topology=topology, **changes) - sent(**changes)
    assert residents == pytest.approx(expert_bytes * 3 * MODEL.expert_params)


def test_a_recompute_alone_only_gathers_and_a_number_of_micro_batches_is_checked():
    cost_model = dataclasses.replace(
        CostModel(cluster=ONE_BYTE, model=MODEL, shards=2, recompute=True), updates=0
    )
    for once, times in ((False, 5), (True, 1)):
        seconds = group_exchange_time(cost_model, TOPOLOGY, micro_batches=5, gather_once=once)
        assert seconds == pytest.approx(times * 2 / 2 * EXPERTS)
    with pytest.raises(ValueError, match="micro_batches=0 must be an integer of at least 1"):
        group_exchange_time(cost_model, TOPOLOGY, micro_batches=0, gather_once=True)


def test_groups_of_one_node_have_the_samples_of_one_group_and_share_its_state():
    trace, batching, costs = read_trace("recorded"), Batching(micro_batches=2), Costs(shards=3)
    topology = Topology(num_nodes=4, ranks_per_node=2, num_experts=16, replica_slots=0)
    whole = make_setting(trace, topology, batching=batching, cost=costs)
    assert smaller_groups(whole) == [2, 1]
    pair = group_setting(trace, topology, batching, costs, whole=whole, nodes=2)
    assert (pair.topology.num_nodes, pair.batches.num_micro_batches) == (2, 4)
    assert (pair.cost_model.data_parallel, pair.cost_model.shards) == (2, 6)
    assert pair.cost_model.scale == pytest.approx(whole.cost_model.scale), "a rank has as many tokens"
    samples = min(len(replay.mask) for replay in whole.batches.replays)
    full = dataclasses.replace(whole, batches=whole.batches._replace(num_micro_batches=samples // 2))
    assert smaller_groups(full) == [2], "four groups would have micro-batches without a sample"
    assert (groups_without_samples(full), groups_without_samples(whole)) == ([1], [])


def test_strategies_are_priced_with_the_exchange_of_their_own_residents():
    trace, batching, costs = read_trace("recorded"), Batching(micro_batches=2), Costs()
    topology = Topology(num_nodes=4, ranks_per_node=2, num_experts=16, replica_slots=0)
    whole = make_setting(trace, topology, batching=batching, cost=costs)
    pair = group_setting(trace, topology, batching, costs, whole=whole, nodes=2)
    _, _, one, three = strategies(replica_slots=(), resident_slots=(1, 3))
    slower, faster = (Advice(each, 1.0, 1.0, 0.0, 1e9, 0.0) for each in (three, one))
    for row in price_groups([slower, faster], pair, 1e12):
        assert row.strategy is one
        (alone,) = (
            each for each in price_groups([slower], pair, 1e12) if each.gather_once == row.gather_once
        )
        assert alone.exchange > row.exchange
        assert alone.seconds == 1 + alone.exchange


@pytest.mark.slow
def test_the_fastest_strategy_that_fits_comes_with_either_way_to_gather():
    trace, batching, costs = read_trace("recorded"), Batching(micro_batches=2), Costs()
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
    whole = make_setting(trace, topology, batching=batching, cost=costs)
    node = group_setting(trace, topology, batching, costs, whole=whole, nodes=1)
    tried = strategies(replica_slots=(), resident_slots=(1,))
    assert [each.name for each in strategies_of(tried, 1)] == ["nothing", "reorder"]
    advice = price(strategies_of(tried, 1), node)
    each_time, once = price_groups(advice, node, 1e12)
    assert (each_time.groups, each_time.gather_once, once.gather_once) == (2, False, True)
    for row in (each_time, once):
        assert row.seconds - row.exchange == pytest.approx(min(each.seconds for each in advice))
    assert once.exchange < each_time.exchange
    assert once.memory > each_time.memory
    (none_fits, _) = price_groups(advice, node, 1.0)
    assert none_fits.memory == min(each.memory for each in advice)
    assert [row.groups for row in price_groups(price(tried[:1], whole), whole, 1e12)] == [1]
