"""Tests of the layer under every planner's plans and on every mesh: outputs and gradients equal the dense layer's."""

import functools
import itertools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense import assert_close, mixture
from support.layer import run_layer
from support.plans import load_of, planned, random_plan

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import EMPTY, Topology, layer_plans
from relibra_jax.execution import (
    ExpertParallel,
    expert_mesh,
)
from relibra_jax.execution.mesh import why_not_fitted
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.routing.exchange_rules import PATHS
from relibra_jax.routing.sizes import count_capacities

MESHES = {"2x4": (2, 4), "4x2": (4, 2), "1x8": (1, 8), "8x1": (8, 1)}
RANKS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 8, 12, 6, 5, 16, 2
# Largest error relative to the largest value, for outputs and gradients, whose terms are summed in a different order.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2e-2}


def topology_of(mesh, replica_slots, resident_slots=0):
    nodes, local = MESHES[mesh]
    return Topology(
        num_nodes=nodes,
        ranks_per_node=local,
        num_experts=EXPERTS,
        replica_slots=replica_slots,
        resident_slots=resident_slots,
    )


@functools.cache
def routings():
    """Routings ``[M, ranks, tokens, K]``: skewed, all on one expert, few experts from few ranks, and only padding."""
    rng = np.random.default_rng(0)
    shape = (RANKS, TOKENS, TOP_K)
    popular = rng.permutation(1 / np.arange(1, EXPERTS + 1) ** 1.2)
    noise = rng.gumbel(size=(*shape[:2], EXPERTS))
    skewed = np.argsort(-(np.log(popular) + noise), -1)[..., :TOP_K]
    skewed[rng.random(shape[:2]) < 0.2] = EMPTY
    few = np.stack([rng.integers(0, 3, shape[:2]), rng.integers(8, 10, shape[:2])], -1)
    few[[0, 3, 7]] = EMPTY
    return np.stack([skewed, np.full(shape, 5), few, np.full(shape, EMPTY)]).astype(np.int32)


@functools.cache
def weights():
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(RANKS, TOKENS, WIDTH)),
        "gate": rng.random((RANKS, TOKENS, TOP_K)),
        "router": rng.normal(size=(WIDTH, EXPERTS)),
        "experts": rng.normal(size=(EXPERTS, 3, WIDTH, HIDDEN)) * 0.4,
    }


COTANGENT = np.random.default_rng(2).normal(size=(RANKS, TOKENS, WIDTH))


def gates_of(values, ids):
    """Return the gates of the replayed ids from live logits, times a factor whose gradient is tested too."""
    chance = jax.nn.softmax(values["x"] @ values["router"])
    chosen = jnp.take_along_axis(chance, jnp.maximum(ids, 0), -1)
    return values["gate"] * chosen


@jax.jit
def dense(values, ids):
    """Output and gradients of the dense layer."""

    def loss(values):
        out = mixture(values["x"], ids, gates_of(values, ids), values["experts"])
        return (out * jnp.asarray(COTANGENT, out.dtype)).sum(), out

    grads, out = jax.grad(loss, has_aux=True)(values)
    return {"output": out} | grads


@functools.cache
def run(
    mesh,
    replica_slots,
    path,
    across_nodes,
    exchange="padded",
    fetch="padded",
    resident_slots=0,
    striped=False,
    pieces=1,
    late_replicas=False,
):
    """Return the output and gradients of the layer, compiled once; a second trace is an error."""
    topology = topology_of(mesh, replica_slots, resident_slots)
    parallel = ExpertParallel(
        mesh=expert_mesh(topology),
        topology=topology,
        path=path,
        exchange=exchange,
        fetch=fetch,
        across_nodes=across_nodes,
        striped=striped,
        pieces=pieces,
        late_replicas=late_replicas,
        check_rows=striped or pieces > 1,
    )

    def loss(values, ids, plan):
        experts = values["experts"][home_layout(plan.home, topology)]
        gates = gates_of(values, ids)
        gates = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
        out = run_layer(values["x"], ids, gates, experts, plan, parallel)
        return (out * jnp.asarray(COTANGENT, out.dtype)).sum(), out

    def step(values, ids, plan):
        grads, out = jax.grad(loss, has_aux=True)(values, ids, plan)
        return {"output": out} | grads

    chex.clear_trace_counter()
    return jax.jit(chex.assert_max_traces(step, n=1), out_shardings=jax.NamedSharding(parallel.mesh, jax.P()))


@functools.cache
def plans(mesh, replica_slots, name, resident_slots=0, striped=False):
    """Return the layer plans ``[M, 1]`` of all routings as micro-batches of one batch, from a planner or random."""
    topology = topology_of(mesh, replica_slots, resident_slots)
    ids = routings()
    if striped:  # token i of a rank is dispatched by local rank i mod G of its node
        holder, token = np.ogrid[:RANKS, :TOKENS]
        local = topology.ranks_per_node
        rank = holder // local * local + token % local
        ids = np.stack([np.where((rank == each)[..., None], ids, EMPTY) for each in range(RANKS)], 1)
    load = load_of(ids.reshape(len(ids), 1, RANKS, -1, TOP_K), topology)
    if name in PLANNERS:
        plan = planned(name, topology, load)
    else:
        rng = np.random.default_rng(replica_slots)
        plan = random_plan(rng, load, topology, across_nodes=name == "random, across nodes")
    return jax.tree.map(np.asarray, layer_plans(plan, load))


@functools.cache
def expected():
    with jax.enable_x64(True):
        return [dense(jax.tree.map(jnp.asarray, weights()), ids) for ids in routings()]


def check(step, plan, ids, desired, tolerance=TOLERANCE["float64"]):
    with jax.enable_x64(True):
        assert_close(step(jax.tree.map(jnp.asarray, weights()), ids, plan), desired, tolerance)


def check_all(step, batch_plans):
    """Run all routings under their layer plans."""
    for micro_batch, ids in enumerate(routings()):
        check(step, batch_plans.layer(micro_batch).layer(0), ids, expected()[micro_batch])


FAST = ("relibra", "random")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in FAST)) for name in [*PLANNERS, "random"]],
)
@pytest.mark.parametrize("path", PATHS)
def test_moe_layer_equals_the_dense_reference_for_every_planner(path, name):
    across = name in PLANNERS and PLANNERS[name].across_nodes
    check_all(run("2x4", 2, path, across), plans("2x4", 2, name))


HIERARCHICAL = [pytest.param(path, marks=[pytest.mark.long] * (path == "flat")) for path in PATHS]
"""Both paths, of which flat is the simpler one."""

SOME = [("flat", 2, 0), ("hierarchical", 1, 2)]
EVERY = [
    pytest.param(path, *slots, marks=() if (path, *slots) in SOME else pytest.mark.long)
    for path, *slots in itertools.product(PATHS, range(3), range(3))
]
"""The tested paths, replica slots and resident slots."""


@pytest.mark.slow
@pytest.mark.parametrize(("path", "replica_slots", "resident_slots"), EVERY)
@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh == "2x4" else pytest.mark.long) for mesh in MESHES]
)
def test_moe_layer_equals_the_dense_reference_for_meshes_and_slots(mesh, replica_slots, resident_slots, path):
    """Any plan with replicas on any node works, and any plan whose replicas stay on nodes with their expert."""
    step = run(mesh, replica_slots, path, True, resident_slots=resident_slots)
    for name in ("random, across nodes", "random"):
        check_all(step, plans(mesh, replica_slots, name, resident_slots))


@pytest.mark.long  # the fitted exchange, below, has replicas of residents, too
@pytest.mark.parametrize("path", PATHS)
def test_moe_layer_computes_replicas_of_residents(path):
    """A replica is fetched from the resident on its node, and its gradient is added to the resident's."""
    check_all(run("2x4", 2, path, False, resident_slots=2), plans("2x4", 2, "random", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["4x2", *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("1x8", "8x1"))]
)
def test_moe_layer_fetches_replicas_inside_their_node(mesh):
    check_all(run(mesh, 2, "flat", False), plans(mesh, 2, "random"))


@pytest.mark.slow
@pytest.mark.parametrize("path", HIERARCHICAL)
def test_moe_layer_runs_the_emulated_ragged_exchange_and_fetch(path):
    step = run("2x4", 2, path, False, "emulated", "emulated", resident_slots=1)
    check_all(step, plans("2x4", 2, "random", 1))


@pytest.mark.slow
@pytest.mark.parametrize("across_nodes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_moe_layer_computes_homes_before_late_replicas(across_nodes):
    """Experts do not divide into the pieces of 4 ranks, and some routings give replicas no rows."""
    step = run("2x4", 2, "hierarchical", across_nodes, resident_slots=1, late_replicas=True)
    for name in ("relibra", "random, across nodes" if across_nodes else "random"):
        check_all(step, plans("2x4", 2, name, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "path"),
    [
        ("2x4", "hierarchical"),
        ("1x8", "hierarchical"),
        pytest.param("2x4", "flat", marks=pytest.mark.long),
    ],
)
def test_moe_layer_runs_the_fitted_exchange(mesh, path):
    """Some routings have no rows to send, and some fill a lane. On 1x8, a token goes to a rank once."""
    check_all(run(mesh, 2, path, False, "fitted", resident_slots=1), plans(mesh, 2, "random", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "path", "exchange"),
    [
        pytest.param("2x4", "hierarchical", "padded", marks=pytest.mark.long),  # also in pieces, below
        pytest.param("2x4", "hierarchical", "fitted", marks=pytest.mark.long),
        pytest.param("1x8", "flat", "emulated", marks=pytest.mark.long),
        pytest.param("1x8", "hierarchical", "padded", marks=pytest.mark.long),
        pytest.param("4x2", "flat", "padded", marks=pytest.mark.long),
        pytest.param("8x1", "hierarchical", "padded", marks=pytest.mark.long),
    ],
)
def test_moe_layer_deals_tokens_to_the_ranks_of_their_node(mesh, path, exchange):
    """On 1x8 the tokens of a sequence do not divide over the ranks."""
    for name in ("random, across nodes", "random"):
        step = run(mesh, 2, path, True, exchange, resident_slots=1, striped=True)
        check_all(step, plans(mesh, 2, name, 1, striped=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "path", "exchange", "striped", "pieces"),
    [
        ("2x4", "hierarchical", "padded", True, 2),
        pytest.param("2x4", "hierarchical", "fitted", True, 2, marks=pytest.mark.long),
        pytest.param("2x4", "flat", "padded", False, 5, marks=pytest.mark.long),
        pytest.param("1x8", "flat", "emulated", True, 2, marks=pytest.mark.long),
        pytest.param("1x8", "hierarchical", "fitted", False, 2, marks=pytest.mark.long),
        pytest.param("4x2", "hierarchical", "fitted", False, 3, marks=pytest.mark.long),
        pytest.param("8x1", "hierarchical", "padded", False, 2, marks=pytest.mark.long),
    ],
)
def test_moe_layer_dispatches_tokens_in_pieces(mesh, path, exchange, striped, pieces):
    """With five pieces, and where eight ranks deal tokens, the tokens of a sequence do not divide evenly."""
    step = run(mesh, 2, path, True, exchange, resident_slots=1, striped=striped, pieces=pieces)
    for name in ("random, across nodes", "random"):
        check_all(step, plans(mesh, 2, name, 1, striped=striped))


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["4x2", "1x8", "8x1"])
@pytest.mark.parametrize("path", PATHS)
def test_moe_layer_runs_the_fitted_exchange_on_every_mesh(mesh, path):
    for name in ("random, across nodes", "random"):
        check_all(run(mesh, 2, path, True, "fitted", resident_slots=2), plans(mesh, 2, name, 2))


def test_fitted_exchange_needs_one_thread_on_cpus_of_several_processes(monkeypatch):
    """Gloo matches collectives by their order, which a collective in a branch does not keep on several threads."""
    devices = [types.SimpleNamespace(platform="cpu", process_index=index) for index in range(2)]
    monkeypatch.setenv("NPROC", "16")
    assert "on CPUs of 2 processes, exchanges may start in another order" in why_not_fitted(devices)
    assert why_not_fitted(devices[:1]) is None
    assert (
        why_not_fitted([types.SimpleNamespace(platform="gpu", process_index=index) for index in range(2)])
        is None
    )
    monkeypatch.setenv("NPROC", "1")
    assert why_not_fitted(devices) is None


@pytest.mark.slow
def test_moe_layer_runs_the_ragged_fetch_across_nodes():
    for name in ("laer", "random, across nodes"):
        check_all(run("2x4", 2, "flat", True, "emulated", "emulated"), plans("2x4", 2, name))


@pytest.mark.slow
@pytest.mark.parametrize("path", HIERARCHICAL)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_moe_layer_runs_in_the_dtypes_of_training(dtype, path):
    plan, ids = plans("2x4", 2, "relibra").layer(0).layer(0), routings()[0]
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights())
    with jax.enable_x64(True):
        desired = dense(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), rounded), ids)
    chex.clear_trace_counter()
    actual = run.__wrapped__("2x4", 2, path, False)(rounded, ids, plan)
    assert actual["output"].dtype == dtype
    assert_close(actual, desired, TOLERANCE[dtype])


def test_moe_layer_is_deterministic():
    plan = plans("2x4", 2, "relibra").layer(0).layer(0)
    step = run("2x4", 2, "hierarchical", False)
    with jax.enable_x64(True):
        values = jax.tree.map(jnp.asarray, weights())
        first, second = (step(values, routings()[0], plan) for _ in range(2))
    chex.assert_trees_all_equal(first, second)


@st.composite
def routed_plans(draw):
    """Draw any routing with any valid plan on 2x4."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = draw(st.integers(1, EXPERTS))
    ids = rng.integers(0, experts, (RANKS, TOKENS, TOP_K)).astype(np.int32)
    ids[rng.random(ids.shape[:2]) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = EMPTY
    topology = topology_of("2x4", 2)
    load = load_of(ids[None, None], topology)
    plan = random_plan(rng, load, topology)
    check_plan(plan, load, topology)
    return ids, jax.tree.map(np.asarray, layer_plans(plan, load)).layer(0).layer(0)


@settings(max_examples=25)
@given(routed_plans())
def test_moe_layer_equals_the_dense_reference_for_any_plan(drawn):
    ids, plan = drawn
    with jax.enable_x64(True):
        desired = dense(jax.tree.map(jnp.asarray, weights()), ids)
    for path in PATHS:
        check(run("2x4", 2, path, False), plan, ids, desired)


@pytest.mark.slow
def test_moe_layer_over_data_axes_has_plans_by_group_and_shared_homes():
    """The layer works with axes data and fsdp around one node of two ranks.

    There are four groups, each with its own load and plan, and experts are also sharded over fsdp. All
    copies share their homes, and gradients are summed over all copies.
    """
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=EXPERTS, replica_slots=2)
    mesh, ids = expert_mesh(topology, data=2, fsdp=2), routings()[0]
    load = load_of(ids.reshape(4, 1, 2, TOKENS, TOP_K), topology)  # the copies as micro-batches of one batch
    batch_plans = layer_plans(random_plan(np.random.default_rng(0), load, topology), load)
    parallel = ExpertParallel(
        mesh=mesh, topology=topology, capacities=count_capacities(batch_plans, topology)
    )
    assert parallel.data_axes == ("data", "fsdp")
    assert len(np.unique(batch_plans.quota, axis=0)) == 4
    plan = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[2:]), batch_plans)
    home = plan.home[0, 0]

    @jax.jit
    def step(values, experts):
        def loss(values, experts):
            gates = gates_of(values, ids).astype(jnp.float32)
            out = run_layer(values["x"], ids, gates, experts, plan, parallel)
            return (out * jnp.asarray(COTANGENT, out.dtype)).sum(), out

        return jax.grad(loss, (0, 1), has_aux=True)(values, experts)

    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights())
    spec = jax.P("node", "local", None, None, "fsdp")
    experts = values["experts"][home_layout(home, topology)]
    (grads, by_slot), out = step(values, jax.device_put(experts, jax.NamedSharding(mesh, spec)))
    actual = grads | {"output": out, "experts": by_slot.reshape(EXPERTS, 3, WIDTH, HIDDEN)[home]}
    assert_close(actual, expected()[0], TOLERANCE["float32"])
