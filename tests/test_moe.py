"""The layer under every planner's plans, on every mesh: the mathematics of the dense layer, forward and backward."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense import assert_close, mixture
from support.plans import load_of, planned, random_ids, random_plan

from relibra_jax.capacity import ExchangeSizes, count_capacities, worst_case_capacities
from relibra_jax.execution import (
    ExpertParallel,
    LayerExperts,
    expert_mesh,
    fetch_replicas,
    moe_layer,
    prepare_layer,
    push_residents,
)
from relibra_jax.execution.parallel import PATHS
from relibra_jax.node_visits import node_visits
from relibra_jax.plan import home_layout
from relibra_jax.plan_check import check_plan
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.types import EMPTY, Assignment, BatchPlan, Plan, RoutingReplay, Topology, layer_plans

MESHES = {"2x4": (2, 4), "4x2": (4, 2), "1x8": (1, 8), "8x1": (8, 1)}
RANKS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 8, 12, 6, 5, 16, 2
# Largest error over the largest value: outputs and gradients, whose terms are summed in another order.
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
    """``[M, ranks, tokens, K]``: skewed, all on one expert, few experts from few ranks, and nothing but padding."""
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
    """Gates recomputed from live logits at the replayed ids, times a factor whose gradient is asked for too."""
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


def run_layer(x, ids, gates, experts, plan, parallel):
    """Prepared, fetched and computed in one go; residents are pushed for this layer alone, and theirs are gradients of
    the home experts."""
    layer = prepare_layer(ids, plan, parallel)
    if parallel.topology.resident_slots:
        of_batch = Plan(plan.slot_expert[None, None], plan.home[None], plan.quota[None, None])
        layer = layer._replace(residents=push_residents([experts], of_batch, parallel)[0])
    held, x = fetch_replicas(experts, layer, x, parallel)
    return moe_layer(x, gates, held, layer, parallel)


@functools.cache
def run(mesh, replica_slots, path, across_nodes, exchange="padded", fetch="padded", resident_slots=0):
    """Output and gradients of the layer, compiled once: another trace is an error."""
    topology = topology_of(mesh, replica_slots, resident_slots)
    parallel = ExpertParallel(
        mesh=expert_mesh(topology),
        topology=topology,
        path=path,
        exchange=exchange,
        fetch=fetch,
        across_nodes=across_nodes,
    )

    def loss(values, ids, plan):
        experts = values["experts"][home_layout(plan.home, topology)]
        gates = gates_of(values, ids)
        gates = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
        out = run_layer(values["x"], ids, gates, experts, plan, parallel).output
        return (out * jnp.asarray(COTANGENT, out.dtype)).sum(), out

    def step(values, ids, plan):
        grads, out = jax.grad(loss, has_aux=True)(values, ids, plan)
        return {"output": out} | grads

    chex.clear_trace_counter()
    return jax.jit(chex.assert_max_traces(step, n=1), out_shardings=jax.NamedSharding(parallel.mesh, jax.P()))


@functools.cache
def plans(mesh, replica_slots, name, resident_slots=0):
    """Layer plans ``[M, 1]`` of all routings as micro-batches of one batch: a planner's, or random ones."""
    topology = topology_of(mesh, replica_slots, resident_slots)
    load = load_of(routings()[:, None], topology)
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


def check(step, plan, ids, wanted, tolerance=TOLERANCE["float64"]):
    with jax.enable_x64(True):
        assert_close(step(jax.tree.map(jnp.asarray, weights()), ids, plan), wanted, tolerance)


def check_all(step, of_batch):
    """All routings under their layer plans."""
    for micro_batch, ids in enumerate(routings()):
        check(step, of_batch.layer(micro_batch).layer(0), ids, expected()[micro_batch])


FAST = ("static", "relibra", "relibra_across", "random")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in [*PLANNERS, "random"]],
)
@pytest.mark.parametrize("path", PATHS)
def test_plans_do_not_change_the_mathematics(path, name):
    across = name in PLANNERS and PLANNERS[name].across_nodes
    check_all(run("2x4", 2, path, across), plans("2x4", 2, name))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("replica_slots", [0, 1, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_and_replica_slots_do_not_either(mesh, replica_slots, path):
    """Any plan at all, of replicas on any node; and those that stay in their node."""
    check_all(run(mesh, replica_slots, path, True), plans(mesh, replica_slots, "random, across nodes"))
    check_all(run(mesh, replica_slots, path, True), plans(mesh, replica_slots, "random"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["4x2", "1x8", "8x1"])
def test_replicas_fetched_inside_their_node(mesh):
    check_all(run(mesh, 2, "flat", False), plans(mesh, 2, "random"))


@pytest.mark.parametrize("path", PATHS)
def test_index_logic_of_the_ragged_exchange_and_fetch(path):
    for name in ("relibra", "random"):
        check_all(run("2x4", 2, path, False, "emulated", "emulated"), plans("2x4", 2, name))


def test_ragged_fetch_across_nodes():
    for name in ("relibra_across", "random, across nodes"):
        check_all(run("2x4", 2, "flat", True, "emulated", "emulated"), plans("2x4", 2, name))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_dtypes(dtype, path):
    plan, ids = plans("2x4", 2, "relibra").layer(0).layer(0), routings()[0]
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights())
    with jax.enable_x64(True):
        wanted = dense(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), rounded), ids)
    chex.clear_trace_counter()
    found = run.__wrapped__("2x4", 2, path, False)(rounded, ids, plan)
    assert found["output"].dtype == dtype
    assert_close(found, wanted, TOLERANCE[dtype])


def test_same_input_gives_the_same_bits():
    plan = plans("2x4", 2, "relibra").layer(0).layer(0)
    step = run("2x4", 2, "hierarchical", False)
    with jax.enable_x64(True):
        values = jax.tree.map(jnp.asarray, weights())
        first, second = (step(values, routings()[0], plan) for _ in range(2))
    chex.assert_trees_all_equal(first, second)


@st.composite
def routed_plans(draw):
    """Any routing, and any valid plan of it on 2x4."""
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
def test_any_plan_of_any_routing(drawn):
    ids, plan = drawn
    with jax.enable_x64(True):
        wanted = dense(jax.tree.map(jnp.asarray, weights()), ids)
    for path in PATHS:
        check(run("2x4", 2, path, False), plan, ids, wanted)


def test_larger_meshes_have_layer_plans_a_copy_and_shared_homes():
    """Axes data and fsdp around one node of two ranks: four copies of the group, each with its own load and plan; the
    experts are sharded over fsdp besides. One set of homes, and gradients summed over all copies."""
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=EXPERTS, replica_slots=2)
    mesh, ids = expert_mesh(topology, data=2, fsdp=2), routings()[0]
    load = load_of(ids.reshape(4, 1, 2, TOKENS, TOP_K), topology)  # the copies as micro-batches of one batch
    of_batch = layer_plans(planned("relibra", topology, load), load)
    parallel = ExpertParallel(mesh=mesh, topology=topology, capacities=count_capacities(of_batch, topology))
    assert parallel.data_axes == ("data", "fsdp")
    assert len(np.unique(of_batch.quota, axis=0)) == 4
    plan = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[2:]), of_batch)
    home = plan.home[0, 0]

    @jax.jit
    def step(values, experts):
        def loss(values, experts):
            held, x = fetch_replicas(experts, plan, values["x"], parallel)
            out = moe_layer(x, ids, gates_of(values, ids).astype(jnp.float32), held, plan, parallel)
            return (out * jnp.asarray(COTANGENT, out.dtype)).sum(), out

        return jax.grad(loss, (0, 1), has_aux=True)(values, experts)

    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights())
    spec = jax.P("node", "local", None, None, "fsdp")
    experts = values["experts"][home_layout(home, topology)]
    (grads, by_slot), out = step(values, jax.device_put(experts, jax.NamedSharding(mesh, spec)))
    found = grads | {"output": out, "experts": by_slot.reshape(EXPERTS, 3, WIDTH, HIDDEN)[home]}
    assert_close(found, expected()[0], TOLERANCE["float32"])


@functools.cache
def single(path="flat", **options):
    """The layer alone, in float32 on 2x4 with two replica slots, and its arguments for the first routing."""
    topology = topology_of("2x4", 2)
    options = {"capacities": worst_case_capacities(TOKENS, TOP_K, topology)} | options
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, path=path, **options)
    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights())
    plan = jax.tree.map(jnp.asarray, plans("2x4", 2, "relibra").layer(0).layer(0))
    arguments = {
        "x": values["x"],
        "expert_ids": jnp.asarray(routings()[0]),
        "gates": gates_of(values, routings()[0]),
        "experts": values["experts"][home_layout(plan.home, topology)],
        "plan": plan,
    }
    return arguments, parallel


@functools.partial(jax.jit, static_argnums=1)
def call(arguments, parallel):
    """`fetch_replicas` and `moe_layer` with the named arguments."""
    arguments = dict(arguments)
    weights = arguments.pop("experts")
    experts, x = fetch_replicas(weights, arguments["plan"], arguments.pop("x"), parallel)
    if "replicas" in arguments:
        experts = experts._replace(replicas=arguments.pop("replicas"))
    return moe_layer(x, experts=experts, parallel=parallel, **arguments)


def test_live_routing_runs_under_a_plan_of_other_loads():
    """Another micro-batch's slots and shares, this one's tokens: nothing is dropped."""
    arguments, parallel = single()
    plan = plans("2x4", 2, "relibra").layer(2).layer(0)._replace(load=None)
    out = call(arguments | {"plan": plan}, parallel)
    assert_close(out, expected()[0]["output"], 2e-6)


@pytest.mark.parametrize(
    ("path", "buffer"),
    [("flat", "rows"), ("flat", "flat"), ("hierarchical", "node"), ("hierarchical", "local")],
)
def test_a_step_with_too_small_buffers_returns_nan(path, buffer):
    """Where the host's check was left out: not a result that misses some tokens."""
    arguments, parallel = single(path)
    small = {"rows": 8} if buffer == "rows" else {buffer: ExchangeSizes(pair=4, send=4, receive=4)}
    sizes = dataclasses.replace(parallel.capacities, **small)
    assert_all_nan(call(arguments, dataclasses.replace(parallel, capacities=sizes)), arguments)


@pytest.mark.parametrize("across_nodes", [False, True])
def test_the_tokens_that_cross_are_those_that_were_counted(across_nodes):
    """Room for exactly the most tokens that a rank sends by `node_visits` holds them; one token less does not."""
    options = {"exchange": "emulated", "fetch": "emulated", "across_nodes": across_nodes}
    arguments, parallel = single("hierarchical", **options)
    # With this seed more would cross if copies went in token order.
    rng, topology, top_k = np.random.default_rng(6), parallel.topology, 4
    ids = random_ids(rng, (RANKS, TOKENS), EXPERTS, top_k)
    load = load_of(ids[None, None], topology)
    plan = random_plan(rng, load, topology, across_nodes=across_nodes)
    replay = RoutingReplay(np.maximum(ids, 0)[:, :, None], (ids != EMPTY).any(-1))
    batch_plan = BatchPlan(Assignment(np.arange(RANKS).reshape(1, 2, 4, 1)), load, plan)
    most = int(node_visits(replay, batch_plan, topology).sum(-1).max())
    arguments |= {
        "expert_ids": jnp.asarray(ids),
        "gates": jnp.ones(ids.shape, jnp.float32),
        "experts": jnp.asarray(weights()["experts"], jnp.float32)[home_layout(plan.home[0], topology)],
        "plan": jax.tree.map(jnp.asarray, batch_plan.layer_plans().layer(0).layer(0)),
    }
    for send in (most, most - 1):
        node = ExchangeSizes(pair=TOKENS, send=send, receive=2 * TOKENS)
        sizes = dataclasses.replace(worst_case_capacities(TOKENS, top_k, topology), node=node)
        out = call(arguments, dataclasses.replace(parallel, capacities=sizes))
        assert np.isfinite(out).all() == (send == most)


def assert_all_nan(out, arguments):
    """Wherever there is a token; the ranks' sound padding may be zero."""
    token = np.asarray(arguments["expert_ids"] != EMPTY).any(-1)
    assert np.isnan(np.asarray(out)[token]).all()


def test_a_rank_whose_ids_are_not_those_of_the_plan_returns_nan():
    arguments, parallel = single()
    ids = arguments["expert_ids"].at[6].set(3)
    out = np.asarray(call(arguments | {"expert_ids": ids}, parallel))
    assert np.isnan(out[6]).all()
    assert np.isnan(out).sum() == out[6].size


def test_a_plan_of_another_load_returns_nan():
    """As many token copies, other experts."""
    arguments, parallel = single()
    order = np.roll(np.arange(EXPERTS), 1)
    ids = jnp.where(arguments["expert_ids"] == EMPTY, EMPTY, jnp.asarray(order)[arguments["expert_ids"]])
    plan = arguments["plan"]._replace(load=arguments["plan"].load[..., np.argsort(order)])
    assert_all_nan(call(arguments | {"expert_ids": ids, "plan": plan}, parallel), arguments)


@pytest.mark.parametrize("fetch", ["reduce_scatter", "emulated"])
def test_replicas_from_another_node_return_nan_unless_allowed(fetch):
    arguments, parallel = single(fetch=fetch)
    across = arguments | {"plan": plans("2x4", 2, "relibra_across").layer(2).layer(0)}
    across["expert_ids"] = jnp.asarray(routings()[2])
    assert_all_nan(call(across, parallel), across)


@pytest.mark.parametrize("wrong", [-2, EXPERTS])
def test_ids_outside_the_model(wrong):
    """Refused where they are known, NaN for the rank's tokens where they are not."""
    arguments, parallel = single()
    ids = arguments["expert_ids"].at[6, 0, 1].set(wrong)
    live = arguments | {"expert_ids": ids, "plan": arguments["plan"]._replace(load=None)}
    out = np.asarray(call(live, parallel))
    assert np.isnan(out[6]).all()
    held = LayerExperts(arguments["experts"], jnp.zeros((2, 4, 2, 3, WIDTH, HIDDEN)))
    with pytest.raises(ValueError, match=rf"expert_ids\[6, 0, 1\]: {wrong} is outside 0..15"):
        moe_layer(**arguments | {"expert_ids": ids, "experts": held}, parallel=parallel)


@pytest.mark.parametrize("small", [{"rows": 8}, {"exports": 1}])
def test_gradients_of_a_step_that_misses_tokens_are_nan(small):
    arguments, parallel = single(fetch="emulated")
    parallel = dataclasses.replace(
        parallel, capacities=dataclasses.replace(parallel.capacities, **small), fetch="emulated"
    )

    def loss(trained):
        return call(arguments | trained, parallel).sum()

    grads = jax.jit(jax.grad(loss))({name: arguments[name] for name in ("x", "gates", "experts")})
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(grads))


def test_exports_that_do_not_fit_return_nan():
    arguments, parallel = single(fetch="emulated")
    sizes = dataclasses.replace(parallel.capacities, exports=1)
    assert_all_nan(call(arguments, dataclasses.replace(parallel, capacities=sizes)), arguments)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("plan", lambda plan: plan._replace(quota=plan.quota[..., :-1]), r"\(2, 4, 4\), found \(2, 4, 3\)"),
        ("plan", lambda plan: plan._replace(home=plan.home[:8]), r"plan.home: .*\(16,\), found \(8,\)"),
        (
            "experts",
            lambda experts: experts.reshape(EXPERTS, 3, WIDTH, HIDDEN),
            r"experts: expected .*\(2, 4, 2, 3",
        ),
        (
            "expert_ids",
            lambda ids: ids[..., :1],
            r"gates: expected shape \(8, 12, 1\), found \(8, 12, 2\)",
        ),
        ("expert_ids", lambda ids: ids[:, 1:], r"expert_ids: expected .*12, 2\), found \(8, 11, 2\)"),
        (
            "x",
            lambda x: x[:7],
            r"x: expected \[B, \.\.\.\] with B a multiple of 8 ranks \(2 x 4\), found shape \(7, 12",
        ),
        (
            "plan",
            lambda plan: plan._replace(load=plan.load[..., :8]),
            r"plan.load: .*\(2, 4, 16\), found \(2, 4, 8\)",
        ),
        ("replicas", lambda _: None, r"experts.replicas: expected shape \(2, 4, 2, .*found \(2, 4, 0\)"),
    ],
)
def test_what_does_not_belong_together_is_refused(name, change, message):
    arguments, parallel = single()
    with pytest.raises(ValueError, match=message):
        call(arguments | {name: change(arguments.get(name))}, parallel)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "direct"}, "path='direct' must be one of flat, hierarchical"),
        ({"exchange": "rdma"}, "exchange='rdma' must be one of"),
        ({"fetch": "copy"}, "fetch='copy' must be one of"),
        ({"data_axes": ("data",)}, "'data' is no further axis of the mesh"),
        ({"topology": topology_of("4x2", 2)}, "mesh axis 'node': expected 4 .*found 2"),
    ],
)
def test_settings_that_cannot_run_are_refused(options, message):
    _, parallel = single()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(parallel, **options)


def test_a_mesh_with_explicit_axes_is_refused():
    _, parallel = single()
    with pytest.raises(ValueError, match=r"mesh axis 'node': expected AxisType\.Auto, found"):
        dataclasses.replace(parallel, mesh=jax.make_mesh((2, 4), ("node", "local")))


def test_the_hierarchical_path_needs_counted_visits():
    _, parallel = single()
    sizes = dataclasses.replace(parallel.capacities, node=None)
    with pytest.raises(ValueError, match="needs capacities counted with visits"):
        dataclasses.replace(parallel, path="hierarchical", capacities=sizes)
