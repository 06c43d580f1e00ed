"""Plans with residents: valid for any topology and load, with and without routes and price."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import load_of, random_ids

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.planner import PlacedRoutes, PlanRequest
from relibra_jax.contract.types import BALANCE, EMPTY, Price, Topology
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.relibra import relibra

PLANNER = relibra(place=functools.partial(place_experts, steps=8))
LAYERS = 2
PRICE = Price(token=1.0, copy=2.0, crossing=3.0, spread=0.5, move=4.0, push=2.0)
PRICES = {
    "balance": BALANCE,
    "hierarchical": PRICE,
    "flat": dataclasses.replace(PRICE, hierarchical=False),
    "dear": dataclasses.replace(PRICE, move=1e12, push=1e12),
    "nothing but crossings": Price(token=0.0, copy=1e-12, crossing=1.0, spread=0.0, move=0.0, push=0.0),
}


@functools.cache
def compiled(topology):
    return jax.jit(functools.partial(PLANNER.update, topology=topology))


def batch_of(rng, topology, micro_batches, top_k):
    """Make a load and all of its routes."""
    ids = random_ids(rng, (micro_batches, LAYERS, topology.num_ranks, 6), topology.num_experts, top_k, 0)
    m, rank, _ = np.indices((micro_batches, topology.num_ranks, 6))
    flat = np.moveaxis(ids, 1, 3).reshape(-1, LAYERS, top_k)
    return load_of(ids, topology), PlacedRoutes(
        flat, m.ravel().astype(np.int32), rank.ravel().astype(np.int32)
    )


def plan_of(topology, load, routes=None, price=BALANCE):
    state = PLANNER.init(topology, LAYERS, key=jax.random.key(0))
    plan, _ = compiled(topology)(PlanRequest(jnp.asarray(load), routes, price=price), state)
    return jax.tree.map(np.asarray, plan)


def check(plan, load, topology):
    check_plan(plan, load, topology)
    nodes, experts = topology.num_nodes, topology.num_experts
    residents = resident_experts(plan, topology)
    for layer, node in np.ndindex(LAYERS, nodes):
        node_residents = residents[layer, node][residents[layer, node] != EMPTY]
        assert len(set(node_residents.tolist())) == node_residents.size, "once in a node"
        assert (plan.home[layer, node_residents] // (experts // nodes) != node).all(), "at home in the node"


@st.composite
def topologies(draw):
    nodes, local, homes, slots, replicas = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(0, 2)),
    )
    return Topology(
        num_nodes=nodes,
        ranks_per_node=local,
        num_experts=nodes * local * homes,
        replica_slots=replicas,
        resident_slots=slots,
    )


@pytest.mark.long  # every example compiles; test_planners and the extreme loads below check such plans, too
@settings(max_examples=5)
@given(
    topology=topologies(),
    micro_batches=st.sampled_from([1, 2, 7]),
    price=st.sampled_from(sorted(PRICES)),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_relibra_plans_with_residents_are_valid(topology, micro_batches, price, seed, data):
    """Plans are valid for top-k from one to all experts; every example compiles."""
    top_k = data.draw(st.integers(1, topology.num_experts))
    load, routes = batch_of(np.random.default_rng(seed), topology, micro_batches, top_k)
    check(plan_of(topology, load), load, topology)
    check(plan_of(topology, load, routes, PRICES[price]), load, topology)


TOPOLOGY = Topology(num_nodes=3, ranks_per_node=2, num_experts=12, replica_slots=1, resident_slots=2)


def extreme(kind, shape, rng):
    load = np.zeros(shape, np.int32)
    if kind == "one hot":
        load[..., 3] = 77
    elif kind == "one token":
        load[0, 0, 1, 0, 5] = 1
    elif kind == "a layer without tokens":
        load[:, 1] = rng.integers(0, 50, load[:, 1].shape)
    elif kind == "near 2**31":
        load[:, :] = (2**31 - 1) // np.prod(shape[2:])
        load[:, 0, 0, 0] = 0
        load[:, 0, 0, 0, 7] = 2**31 - 1 - load[:, 0].sum((1, 2, 3), dtype=np.int64)
    elif kind == "other nodes idle":
        load[:, :, 0] = rng.integers(0, 50, load[:, :, 0].shape)
    return load


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["zero", "one hot", "one token", "a layer without tokens", "near 2**31", "other nodes idle"]
)
def test_relibra_plans_of_extreme_loads_are_valid(kind):
    """Plans are valid for routes that contradict the load and for tokens without a place."""
    rng = np.random.default_rng(0)
    _, routes = batch_of(rng, TOPOLOGY, 2, 3)
    load = extreme(kind, (2, LAYERS, 3, 2, 12), rng)
    nowhere = routes._replace(
        micro_batch=np.full_like(routes.micro_batch, EMPTY), rank=np.full_like(routes.rank, EMPTY)
    )
    for sample in (routes, nowhere):
        check(plan_of(TOPOLOGY, load, sample, PRICE), load, TOPOLOGY)
    check(plan_of(TOPOLOGY, load), load, TOPOLOGY)


@pytest.mark.slow
def test_relibra_makes_no_pushes_that_cost_too_much():
    """Expensive residents are not chosen; free ones fill all slots, as every node has tokens for more experts."""
    load, routes = batch_of(np.random.default_rng(1), TOPOLOGY, 2, 4)
    dear = plan_of(TOPOLOGY, load, routes, PRICES["dear"])
    assert (resident_experts(dear, TOPOLOGY) == EMPTY).all()
    assert (dear.home // 4 == np.arange(12) // 4).all(), "no expert goes to another node"
    free = plan_of(TOPOLOGY, load, routes, PRICES["nothing but crossings"])
    assert (resident_experts(free, TOPOLOGY) != EMPTY).all()


@pytest.mark.slow
def test_relibra_plans_alike_without_residents_and_without_their_slots():
    """If every push and move is too expensive, the plan equals that without resident slots."""
    load, routes = batch_of(np.random.default_rng(2), TOPOLOGY, 2, 4)
    price = dataclasses.replace(PRICE, push=1e12, move=1e12)
    narrow = dataclasses.replace(TOPOLOGY, resident_slots=0)
    wide, without = plan_of(TOPOLOGY, load, routes, price), plan_of(narrow, load, routes, price)
    columns = (TOPOLOGY.home_slots, TOPOLOGY.home_slots + 1)
    wide = wide._replace(
        slot_expert=np.delete(wide.slot_expert, columns, -1), quota=np.delete(wide.quota, columns, -1)
    )
    chex.assert_trees_all_equal(wide, without)


@pytest.mark.slow
def test_relibra_gives_the_same_plan_under_vmap():
    batches = [batch_of(np.random.default_rng(seed), TOPOLOGY, 2, 3) for seed in range(2)]
    state = PLANNER.init(TOPOLOGY, LAYERS, key=jax.random.key(0))

    @jax.jit
    @jax.vmap
    def together(load, routes):
        return PLANNER.update(PlanRequest(load, routes, price=PRICE), state, TOPOLOGY)[0]

    result = together(*jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *batches))
    for index, (load, routes) in enumerate(batches):
        plan = jax.tree.map(lambda leaf, index=index: np.asarray(leaf[index]), result)
        chex.assert_trees_all_equal(plan, plan_of(TOPOLOGY, load, routes, PRICE))


@pytest.mark.slow
def test_relibra_ignores_double_precision():
    load, routes = batch_of(np.random.default_rng(0), TOPOLOGY, 2, 3)
    with jax.enable_x64(True):
        state = PLANNER.init(TOPOLOGY, LAYERS, key=jax.random.key(0))
        update = jax.jit(functools.partial(PLANNER.update, topology=TOPOLOGY))
        plan, _ = update(PlanRequest(jnp.asarray(load), routes, price=PRICE), state)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, plan), plan_of(TOPOLOGY, load, routes, PRICE))
