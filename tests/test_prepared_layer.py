"""Tests of prepared layers: tables computed once per batch, automatic choice of paths, and counted rows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.costs import NEEDED
from support.dense import assert_close, mixture
from support.plans import load_of, random_plan
from test_moe import (
    COTANGENT,
    EXPERTS,
    RANKS,
    TOKENS,
    TOP_K,
    expected,
    gates_of,
    plans,
    routings,
    topology_of,
    weights,
)

from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import (
    EMPTY,
    Assignment,
    BatchPlan,
    LayerPlan,
    Plan,
    RoutingReplay,
    Topology,
    layer_plans,
)
from relibra_jax.cost.traffic import count_sent
from relibra_jax.execution import (
    ExpertParallel,
    expert_mesh,
    fetch_replicas,
    moe_layer,
    prepare_layer,
    prepare_layers,
    push_residents,
)
from relibra_jax.execution.dispatch import Dispatch, NodeDispatch
from relibra_jax.execution.parallel import _print_once
from relibra_jax.routing.exchange_rules import PATHS
from relibra_jax.routing.sizes import count_capacities
from relibra_jax.routing.visits import node_visits

TOPOLOGY = topology_of("2x4", 2, 1)
GRID = (2, 4)
VALUES = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights())
GATES = [gates_of(VALUES, ids).astype(jnp.float32) for ids in routings()]


prepare = jax.jit(prepare_layer, static_argnames="parallel")
push = jax.jit(push_residents, static_argnames="parallel")


@functools.cache
def parallel_of(path="auto", **options):
    return ExpertParallel(mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY, path=path, **options)


@functools.cache
def a_batch():
    """Return all routings as micro-batches of one layer, a random plan with residents, and the residents' weights."""
    load = load_of(routings()[:, None], TOPOLOGY)
    plan = random_plan(np.random.default_rng(3), load, TOPOLOGY)
    experts = VALUES["experts"][home_layout(plan.home[0], TOPOLOGY)]
    residents = push([experts], plan, parallel=parallel_of())
    return plan, load, experts, residents


@functools.partial(jax.jit, static_argnames="parallel")
def run_prepared(experts, layer, ids, gates, parallel):
    layer_experts, x = fetch_replicas(experts, layer, VALUES["x"], parallel)
    return moe_layer(x, ids, gates, layer_experts, layer, parallel)


HIERARCHICAL = [pytest.param(path, marks=[pytest.mark.long] * (path == "flat")) for path in PATHS]
"""Both paths, of which flat is the simpler one."""


@pytest.mark.parametrize("path", PATHS)
def test_fitted_exchange_sends_the_lanes_of_the_price(path):
    """Every layer and micro-batch sends as much of each lane as `count_sent` counts, which is not always the same."""
    plan, load, _, _ = a_batch()
    ids = routings().reshape(-1, TOKENS, 1, TOP_K)
    assignment = Assignment(np.arange(len(ids)).reshape(len(load), *GRID, 1))
    replay = RoutingReplay(ids, ids[..., 0, 0] != EMPTY)
    visits = node_visits(replay, BatchPlan(assignment, load, plan), TOPOLOGY)
    sizes = count_capacities(layer_plans(plan, load), TOPOLOGY, visits=visits)
    parallel = parallel_of(path, exchange="fitted", capacities=sizes)
    (dispatch,) = prepare_layers(
        routings()[..., None, :], layer_plans(plan, load), parallel
    ).token_tables.dispatch
    hops, _ = parallel.token_exchanges(TOKENS, TOP_K)
    steps = [dispatch] if path == "flat" else [dispatch, dispatch.inside]
    sent = [
        np.array(hop.lengths)[np.asarray(each.hop.lanes.length)]
        for hop, each in zip(hops, steps, strict=True)
    ]
    cost = dataclasses.replace(NEEDED, path=path, exchange="fitted", spare_room=False)
    visits = visits if path == "hierarchical" else None
    expected_sent = count_sent(layer_plans(plan, load), TOPOLOGY, cost.price(TOPOLOGY), visits=visits)
    nodes, local = GRID
    between, inside = (local, local - 1) if path == "flat" else (nodes - 1, local - 1)
    np.testing.assert_array_equal(between * sent[0], expected_sent.between)
    np.testing.assert_array_equal(inside * sent[-1], expected_sent.inside)
    assert len(np.unique(sent[0])) > 2


@pytest.mark.slow
@pytest.mark.parametrize("path", HIERARCHICAL)
def test_prepare_layers_equals_preparing_inside_the_step(path):
    """Slices of tables that were prepared for all micro-batches give the right outputs and rows of every slot."""
    plan, load, experts, residents = a_batch()
    parallel = parallel_of(path, check_rows=True)
    layers = prepare_layers(routings()[..., None, :], layer_plans(plan, load), parallel)
    for number, ids in enumerate(routings()):
        layer = layers.layer(number).layer(0)._replace(residents=residents.layer(0))
        actual = run_prepared(experts, layer, ids, GATES[number], parallel)
        assert_close(actual.output, expected()[number]["output"], 2e-6)
        np.testing.assert_array_equal(actual.slot_rows, plan.quota[number, 0])


def test_prepared_layer_leaves_nothing_to_sort_or_search():
    """The layer has no sorts, loops or scatters of indices, except in the grouped MLP's implementation."""
    plan, load, experts, residents = a_batch()
    parallel = parallel_of("hierarchical", implementation="reference")
    of_layer = layer_plans(plan, load).layer(0).layer(0)
    layer = prepare(routings()[0], of_layer, parallel=parallel)._replace(residents=residents.layer(0))
    run = functools.partial(run_prepared, parallel=parallel)
    prepared, inside = (
        primitives(jax.make_jaxpr(function)(*arguments).jaxpr)
        for function, arguments in (
            (functools.partial(prepare_layer, parallel=parallel), (routings()[0], of_layer)),
            (run, (experts, layer, routings()[0], GATES[0])),
        )
    )
    for name in ("sort", "while", "scatter"):
        assert name in prepared
        assert name not in inside, name


def primitives(jaxpr):
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= primitives(inner)
    return names


def test_prepared_layer_is_nan_for_other_ids():
    """Wrong ids give NaN on the rank that has them, and do not affect the tokens of other ranks."""
    plan, load, experts, residents = a_batch()
    parallel = parallel_of("flat")
    layer = prepare(routings()[0], layer_plans(plan, load).layer(0).layer(0), parallel=parallel)
    layer = layer._replace(residents=residents.layer(0))
    ids = np.array(routings()[0])
    ids[6] = ids[6, ::-1]
    out = np.asarray(run_prepared(experts, layer, ids, GATES[0], parallel).output)
    assert np.isnan(out[6]).all()
    assert np.isfinite(np.delete(out, 6, 0)).all()


@pytest.mark.parametrize(("path", "choices"), [("flat", 2), ("hierarchical", 4)])
def test_fitted_exchange_chooses_a_length_once_at_each_hop(path, choices):
    """Rows and gates go together: a GPU waits for the host at each choice."""
    plan, load, experts, residents = a_batch()
    parallel = parallel_of(path, exchange="fitted")
    layer = prepare(routings()[0], layer_plans(plan, load).layer(0).layer(0), parallel=parallel)
    layer = layer._replace(residents=residents.layer(0))
    program = str(
        jax.make_jaxpr(run_prepared, static_argnums=4)(experts, layer, routings()[0], GATES[0], parallel)
    )
    assert len(re.findall(r"= cond\[", program)) == choices


@pytest.mark.slow
@pytest.mark.parametrize("path", HIERARCHICAL)
def test_check_rows_counts_rows_in_other_slots(path):
    """If two copies of different experts swap places on the way, group sizes stay equal but check_rows detects it."""
    plan, load, experts, residents = a_batch()
    layer_plan = layer_plans(plan, load).layer(0).layer(0)
    for check_rows in (False, True):
        parallel = parallel_of(path, check_rows=check_rows)
        layer = prepare(routings()[0], layer_plan, parallel=parallel)._replace(residents=residents.layer(0))
        (dispatch,) = layer.token_tables.dispatch
        flat = dispatch.inside if isinstance(dispatch, NodeDispatch) else dispatch
        arrival = np.array(flat.hop.arrival)
        sizes, rank = np.asarray(flat.group_sizes), (0, 0)
        first, second = (int(sizes[rank][:slot].sum()) for slot in np.flatnonzero(sizes[rank])[:2])
        arrival[rank][[first, second]] = arrival[rank][[second, first]]
        flat = flat._replace(hop=flat.hop._replace(arrival=jnp.asarray(arrival)))
        dispatch = dispatch._replace(inside=flat) if isinstance(dispatch, NodeDispatch) else flat
        wrong = layer._replace(token_tables=layer.token_tables._replace(dispatch=(dispatch,)))
        actual = run_prepared(experts, wrong, routings()[0], GATES[0], parallel)
        assert np.isnan(actual.output).any() == check_rows
        as_planned = (np.asarray(actual.slot_rows) == plan.quota[0, 0]).all()
        assert as_planned == (not check_rows)


def test_expert_parallel_path_follows_from_nodes_and_counts():
    plan, load, *_ = a_batch()
    of_layer, parallel = layer_plans(plan, load), parallel_of()
    assert parallel.is_hierarchical(TOP_K)
    assert not parallel.is_hierarchical(1)
    layer = prepare(routings()[0], of_layer.layer(0).layer(0), parallel=parallel)
    assert isinstance(layer.token_tables.dispatch[0], NodeDispatch)
    uncounted = dataclasses.replace(parallel, capacities=count_capacities(of_layer, TOPOLOGY))
    assert not uncounted.is_hierarchical(TOP_K)
    one_node = topology_of("1x8", 0)
    alone = ExpertParallel(mesh=expert_mesh(one_node), topology=one_node)
    assert alone.is_hierarchical(TOP_K)
    assert not alone.is_hierarchical(1)
    alone = dataclasses.replace(alone, exchange="emulated")
    assert not alone.is_hierarchical(TOP_K)
    home = LayerPlan(home_layout(jnp.arange(EXPERTS), one_node), jnp.arange(EXPERTS), None, None)
    home = home._replace(quota=jnp.zeros_like(home.slot_expert))
    shapes = jax.eval_shape(functools.partial(prepare_layer, parallel=alone), routings()[0], home)
    assert isinstance(shapes.token_tables.dispatch[0], Dispatch)


def test_expert_parallel_prints_its_choices_once(capsys):
    _print_once.cache_clear()
    plan, load, *_ = a_batch()
    for _ in range(2):
        jax.eval_shape(
            functools.partial(prepare_layer, parallel=parallel_of()),
            routings()[0],
            layer_plans(plan, load).layer(0).layer(0),
        )
    line = "relibra_jax, 2 x 4 ranks on cpu: tokens hierarchical, padded; replicas padded\n"
    assert capsys.readouterr().err == line


def test_fetch_replicas_rejects_residents_without_slots():
    plan, load, experts, residents = a_batch()
    parallel = parallel_of("flat")
    layer = prepare(routings()[0], layer_plans(plan, load).layer(0).layer(0), parallel=parallel)
    with pytest.raises(
        ValueError, match=r"resident_slots=1, but the layer has no weights of residents: set PreparedLayer\."
    ):
        fetch_replicas(experts, layer, VALUES["x"], parallel)
    one = residents.layer(0)
    twice = one._replace(weights=jnp.concatenate([one.weights] * 2, axis=2))
    with pytest.raises(
        ValueError, match=r"residents: expected shape \(2, 4, 1, 3, 6, 5\), found \(2, 4, 2, 3"
    ):
        fetch_replicas(experts, layer._replace(residents=twice), VALUES["x"], parallel)
    without = topology_of("2x4", 2)
    elsewhere = ExpertParallel(mesh=expert_mesh(without), topology=without)
    with pytest.raises(
        ValueError, match=r"residents of shape \(2, 4, 1, .*, but the topology has resident_slots=0"
    ):
        fetch_replicas(experts, layer._replace(residents=residents.layer(0)), VALUES["x"], elsewhere)
    with pytest.raises(ValueError, match=r"plan.slot_expert: expected shape \(2, 4, 4\), found \(2, 4, 5\)"):
        prepare_layer(routings()[0], layer_plans(plan, load).layer(0).layer(0), elsewhere)


def test_prepare_layers_serves_plans_with_empty_resident_slots():
    """Planners without residents leave resident slots empty: their weights are zero and no token goes there."""
    topology = topology_of("2x4", 2, 1)
    of_batch = plans("2x4", 2, "eplb", 1)
    parallel = dataclasses.replace(parallel_of("flat"), across_nodes=True)
    resident = of_batch.slot_expert[..., topology.home_slots : topology.held_slots]
    assert (resident == EMPTY).all()
    layer_plan = of_batch.layer(0).layer(0)
    experts = VALUES["experts"][home_layout(layer_plan.home, topology)]
    whole = Plan(of_batch.slot_expert, of_batch.home[0], of_batch.quota)
    layer = prepare(routings()[0], layer_plan, parallel=parallel)
    layer = layer._replace(residents=push([experts], whole, parallel=parallel).layer(0))
    assert not np.asarray(layer.residents.weights).any()
    actual = run_prepared(experts, layer, routings()[0], GATES[0], parallel)
    assert_close(actual.output, expected()[0]["output"], 2e-6)
    assert actual.slot_rows.sum() == (routings()[0] != EMPTY).sum() <= RANKS * TOKENS * TOP_K


def test_dispatch_works_with_full_lanes():
    """An empty slot may share its start in the buffer with another lane.

    Eight copies go to rank 1, whose last slot is empty, and five stay. The lane has eight rows, and the kept rows begin
    where that empty slot would begin.
    """
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    ids = np.full((2, 13, 1), EMPTY, np.int32)
    ids[0, :, 0] = [0] * 5 + [1] * 8
    load = load_of(ids[None, None], topology)
    slots = np.array([[[[[0, EMPTY], [1, EMPTY]]]]], np.int32)
    quota = np.array([[[[[5, 0], [8, 0]]]]], np.int32)
    of_batch = layer_plans(Plan(slots, np.array([[0, 1]], np.int32), quota), load)
    sizes = count_capacities(of_batch, topology)
    assert (sizes.flat.pair, sizes.flat.own) == (8, 8)
    mesh = expert_mesh(topology, devices=jax.devices()[:2])
    parallel = ExpertParallel(mesh=mesh, topology=topology, capacities=sizes, check_rows=True)
    x, gates = jnp.asarray(COTANGENT[:2, :1].repeat(13, 1), jnp.float32), jnp.ones(ids.shape, jnp.float32)
    experts = VALUES["experts"][:2].reshape(1, 2, 1, *VALUES["experts"].shape[1:])

    @jax.jit
    def run(plan):
        layer = prepare_layer(ids, plan, parallel)
        layer_experts, rows = fetch_replicas(experts, layer, x, parallel)
        return moe_layer(rows, ids, gates, layer_experts, layer, parallel)

    actual = run(of_batch.layer(0).layer(0))
    np.testing.assert_array_equal(actual.slot_rows, quota[0, 0])
    desired = mixture(x, ids, gates, VALUES["experts"][:2])
    np.testing.assert_allclose(actual.output, desired, atol=1e-5)
