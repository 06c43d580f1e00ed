"""Counting takes the memory of one sample, however many there are, and plans are exact where totals pass int32."""

import tracemalloc

import jax
import numpy as np
import pytest
from support.plans import random_routing

from relibra_jax import (
    EMPTY,
    Batch,
    RoutingReplay,
    Stage,
    Topology,
    check_plan,
    count_batch,
    eplb,
    node_visits,
    plan_batch,
    sample_counts,
    sample_load,
    static,
)
from relibra_jax.contract.replay import check_replay, expert_load
from relibra_jax.contract.types import BatchPlan, Price
from relibra_jax.cost.batch_time import balanced_time
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.routes import sample_routes
from relibra_jax.routing.striping import striped_load
from relibra_jax.routing.visits import most_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
TOKENS, LAYERS, TOP_K, EXPERTS = 1024, 6, 4, 384
MODEL = {"num_experts": EXPERTS, "top_k": TOP_K, "num_layers": LAYERS}
SAMPLE_BYTES = TOKENS * LAYERS * TOP_K * 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Write routes of 32 samples, uint16, to a file, and map it into memory."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, EXPERTS // TOP_K, (32, TOKENS, LAYERS, 1), np.uint16)
    path = tmp_path_factory.mktemp("routes") / "ids"
    (first + np.arange(TOP_K, dtype=np.uint16) * (EXPERTS // TOP_K)).tofile(path)
    return np.memmap(path, np.uint16, "r", shape=(32, TOKENS, LAYERS, TOP_K))


READERS = {
    "sample_load": lambda replay: sample_load(replay, num_experts=EXPERTS),
    "check_replay": lambda replay: check_replay(replay, num_experts=EXPERTS),
    "sample_routes": lambda replay: sample_routes(replay, count=64),
    "sample_counts": lambda replay: sample_counts(
        replay.expert_ids, layout="maxtext", mask=replay.mask, every=501, **MODEL
    ),
}


def peak_of(read, ids):
    """Return the most bytes that Python and NumPy held besides the routes, the mask and the result."""
    replay = RoutingReplay(ids, np.ones(ids.shape[:2], bool))
    tracemalloc.start()
    result = read(replay)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return most - kept


@pytest.mark.parametrize("name", READERS)
def test_reading_takes_the_memory_of_one_sample_and_widens_one_layer(recorded, name):
    """Ids of all samples in int32 would take 64 times a sample's bytes, and those of one sample in int64 4 times."""
    read = READERS[name]
    read(RoutingReplay(recorded[:2], np.ones((2, TOKENS), bool)))
    few, many = peak_of(read, recorded[:8]), peak_of(read, recorded)
    assert many < few + SAMPLE_BYTES // 4
    assert many < 5 * SAMPLE_BYTES


@pytest.fixture(scope="module")
def replay():
    drawn = random_routing(np.random.default_rng(1), samples=12, tokens=20, layers=2, experts=8, top_k=3)
    return drawn._replace(mask=np.arange(20) < np.random.default_rng(2).integers(0, 21, (12, 1)))


def plan_of(replay, *, striped, planner=static):
    assignment = assign_in_order(12, TOPOLOGY, num_micro_batches=3)
    load = expert_load(replay, assignment, num_experts=8)
    if striped:
        load = striped_load(replay, assignment, TOPOLOGY)
    entry = planner()
    state = entry.init(TOPOLOGY, 2, key=jax.random.key(0))
    batch_plan, _ = plan_batch(
        Batch(sample_load(replay, num_experts=8), replay.mask.sum(1)),
        entry,
        state,
        TOPOLOGY,
        stages=[Stage(3, start=assignment)],
    )
    return BatchPlan(assignment, load, batch_plan[0].plan)


def test_counts_under_jit_are_those_of_the_host(replay):
    for striped in (False, True):
        batch_plan = plan_of(replay, striped=striped)
        visits = jax.jit(node_visits, static_argnames=("topology", "striped"))
        np.testing.assert_array_equal(
            visits(replay, batch_plan, TOPOLOGY, striped=striped),
            node_visits(replay, batch_plan, TOPOLOGY, striped=striped),
        )
    counted = jax.jit(lambda replay: count_batch(replay, TOPOLOGY)._replace(sequence_length=None))(replay)
    for actual, desired in zip(
        jax.tree.leaves(counted), jax.tree.leaves(count_batch(replay, TOPOLOGY)), strict=False
    ):
        np.testing.assert_array_equal(actual, desired)
    striped = jax.jit(striped_load, static_argnames="topology")
    assignment = assign_in_order(12, TOPOLOGY, num_micro_batches=3)
    np.testing.assert_array_equal(
        striped(replay, assignment, TOPOLOGY), striped_load(replay, assignment, TOPOLOGY)
    )


@pytest.mark.parametrize("planner", [static, eplb])
def test_most_visits_bound_visits_from_above_and_are_close(replay, planner):
    batch_plan = plan_of(replay, striped=False, planner=planner)
    visits = np.asarray(node_visits(replay, batch_plan, TOPOLOGY))
    most = most_visits(replay.mask.sum(1), batch_plan, TOPOLOGY)
    assert (most >= visits).all()
    tokens = np.where(
        batch_plan.assignment.sample == EMPTY, 0, replay.mask.sum(1)[batch_plan.assignment.sample]
    )
    assert (most <= tokens.sum(-1).reshape(3, 1, 4, 1)).all()
    assert most.sum() < 1.2 * visits.sum()


PRICE = Price(token=1e-9, copy=1e-9, crossing=1e-9, spread=1e-10, move=1e-3, push=1e-3, pair=1e-15)


def test_plans_are_exact_where_the_copies_of_a_layer_pass_int32_over_the_stages():
    """As at 8,192 samples of 16k tokens and top-8 with a recompute: 2**31 copies of a layer in two stages."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=16, replica_slots=1)
    rng = np.random.default_rng(0)
    samples, layers, top_k, tokens = 16, 3, 8, 2**27 // 16
    share = rng.dirichlet(np.full(16, 2.0), (samples, layers))
    load = np.minimum(np.floor(share * tokens * top_k), tokens).astype(np.int64)
    load[..., 0] += tokens * top_k - load.sum(-1)
    load[:, :, 0], lengths = np.maximum(load[:, :, 0], 0), np.full(samples, tokens)
    counts = Batch(load, lengths)
    planner = eplb()
    state = planner.init(topology, layers, key=jax.random.key(0))
    stages = [Stage(2), Stage(4)]
    plans, _ = plan_batch(counts, planner, state, topology, stages=stages, cost=PRICE)
    total = sum(np.asarray(plan.load).sum((0, 2, 3, 4), dtype=np.int64) for plan in plans)
    np.testing.assert_array_equal(total, 2 * load.sum((0, 2)))
    assert total.min() >= 2**31
    for plan in plans:
        check_plan(plan.plan, plan.load, topology)
    time = balanced_time(plans[0].load, lengths, topology, PRICE)
    squares = 1e-15 * float(tokens) ** 2 * samples * layers / topology.num_ranks
    attention = 1e-9 * float(tokens) * samples * layers / topology.num_ranks + squares
    np.testing.assert_allclose(float(time.attention), attention, rtol=1e-5)
    np.testing.assert_allclose(float(time.compute), 1e-9 * load.sum() / topology.num_ranks, rtol=1e-5)
