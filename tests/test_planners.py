"""What every planner owes its caller: planners x loads x topologies, under jit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relibra_jax.plan import check_plan, rank_load
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.types import Topology

MICRO_BATCHES, LAYERS = 3, 2

TOPOLOGIES = {
    "2x4": Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2),
    "one node of 3": Topology(num_nodes=1, ranks_per_node=3, num_experts=12, replica_slots=1),
    "one home, no room": Topology(num_nodes=4, ranks_per_node=2, num_experts=8, replica_slots=0),
    "more room than experts": Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=3),
    "a single rank": Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=1),
}


def zipf(rng, shape):
    return rng.zipf(1.5, shape).clip(0, 4000)


def one_hot(rng, shape):
    return np.where(np.arange(shape[-1]) == shape[-1] // 2, 4096, 0) * np.ones(shape, int)


def uniform(rng, shape):
    return np.full(shape, 64)


def zero(rng, shape):
    return np.zeros(shape, int)


def huge(rng, shape):
    """A layer's total just below 2**31."""
    load = rng.random(shape) ** 8
    return np.floor(load / load.sum((2, 3, 4), keepdims=True) * (2**31 - 1e6)).astype(np.int64)


def shifting(rng, shape):
    """Another expert is hot in each micro-batch."""
    load = rng.integers(0, 30, shape)
    for micro_batch in range(shape[0]):
        load[micro_batch, ..., (5 * micro_batch) % shape[-1]] += 900
    return load


LOADS = {make.__name__: make for make in (zipf, one_hot, uniform, zero, huge, shifting)}


def make_load(kind, topology):
    shape = (MICRO_BATCHES, LAYERS, topology.num_nodes, topology.ranks_per_node, topology.num_experts)
    return jnp.asarray(LOADS[kind](np.random.default_rng(0), shape), jnp.int32)


@pytest.fixture(scope="module", params=PLANNERS, ids=str)
def row(request):
    return PLANNERS[request.param]


@pytest.fixture(scope="module", params=TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def topology(request):
    return request.param


@pytest.fixture(scope="module")
def run(row, topology):
    """The planner's update, compiled once for all loads: a second trace is an error."""
    chex.clear_trace_counter()
    update = jax.jit(chex.assert_max_traces(row.planner.update, n=1))

    def plan(load, state=None):
        if state is None:
            state = row.planner.init(topology, LAYERS, key=jax.random.key(0))
        return update(load, state, topology)

    return plan


@pytest.mark.parametrize("kind", LOADS)
def test_plan_is_valid(run, row, topology, kind):
    load = make_load(kind, topology)
    plan, state = run(load)
    check_plan(plan, load, topology, intra_node=row.intra_node)
    again, _ = run(make_load("shifting", topology), state)
    check_plan(again, make_load("shifting", topology), topology, intra_node=row.intra_node)


@pytest.mark.parametrize("kind", ["zipf", "shifting"])
def test_same_input_gives_the_same_plan(run, topology, kind):
    load = make_load(kind, topology)
    chex.assert_trees_all_equal(run(load), run(load))


@pytest.mark.parametrize("kind", ["zipf", "one_hot", "uniform", "zero", "shifting"])
@pytest.mark.parametrize("row", [name for name in PLANNERS if PLANNERS[name].foresight], indirect=True)
def test_foresight_is_never_worse_than_static(run, row, topology, kind):
    load = make_load(kind, topology)
    static = PLANNERS["static"].planner
    plan, _ = run(load)
    still, _ = static.update(load, static.init(topology, LAYERS, key=jax.random.key(0)), topology)
    assert batch_imbalance(rank_load(plan)) <= batch_imbalance(rank_load(still)) + 1e-6


def test_homes_use_every_slot_once(run, topology):
    plan, _ = run(make_load("zipf", topology))
    np.testing.assert_array_equal(np.sort(plan.home, axis=-1)[0], np.arange(topology.num_experts))


@pytest.mark.parametrize("topology", [TOPOLOGIES["2x4"]], ids=["2x4"], scope="module")
def test_works_under_vmap_and_scan(run, row, topology):
    """Batches in a scan, data-parallel groups in a vmap: the same plans as one at a time."""
    kinds = (("zipf", "uniform"), ("shifting", "zipf"))
    loads = jnp.stack([jnp.stack([make_load(kind, topology) for kind in groups]) for groups in kinds])
    start = row.planner.init(topology, LAYERS, key=jax.random.key(0))

    @jax.jit
    def all_batches(loads, start):
        def step(states, loads):
            plans, states = jax.vmap(lambda load, state: row.planner.update(load, state, topology))(
                loads, states
            )
            return states, plans

        states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), start)
        return jax.lax.scan(step, states, loads)[1]

    plans = all_batches(loads, start)
    for group in range(2):
        state = start
        for batch in range(2):
            load = loads[batch, group]
            alone, state = run(load, state)
            plan = jax.tree.map(lambda leaf, place=(batch, group): leaf[place], plans)
            check_plan(plan, load, topology, intra_node=row.intra_node)
            # Sums in another order may round a split differently by a token.
            expected = batch_imbalance(rank_load(alone))
            np.testing.assert_allclose(batch_imbalance(rank_load(plan)), expected, rtol=1e-3)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("topology", [TOPOLOGIES["2x4"]], ids=["2x4"], scope="module")
def test_any_load_gets_a_valid_plan(run, row, topology, data):
    """Adversarial loads: arbitrary counts for a few experts, nothing or anything for the rest."""
    shape = (MICRO_BATCHES, LAYERS, topology.num_nodes, topology.ranks_per_node, topology.num_experts)
    load = np.zeros(shape, np.int32)
    count = st.one_of(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 2**31 // (3 * 64)))
    index = st.tuples(*(st.integers(0, size - 1) for size in shape))
    for place, value in data.draw(st.lists(st.tuples(index, count), max_size=40)):
        load[place] = value
    plan, _ = run(jnp.asarray(load))
    check_plan(plan, load, topology, intra_node=row.intra_node)
