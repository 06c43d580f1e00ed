"""Tests of invalid inputs of a layer: an error while tracing, or NaN if the caller skipped the check on the host."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense import assert_close
from support.plans import load_of, random_ids, random_plan
from test_moe import (
    EXPERTS,
    HIDDEN,
    MESHES,
    RANKS,
    TOKENS,
    TOP_K,
    WIDTH,
    expected,
    gates_of,
    plans,
    routings,
    topology_of,
    weights,
)

from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import EMPTY, Assignment, BatchPlan, RoutingReplay
from relibra_jax.execution import ExpertParallel, expert_mesh, fetch_replicas, moe_layer, prepare_layer
from relibra_jax.routing.sizes import ExchangeSizes, worst_case_capacities
from relibra_jax.routing.visits import most_visits, node_visits, possible_visits


@functools.cache
def single(path="flat", **options):
    """Return the layer in float32 on 2x4 with two replica slots, and its arguments for the first routing."""
    topology = topology_of("2x4", 2)
    options = {"capacities": worst_case_capacities(TOKENS, TOP_K, topology)} | options
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, path=path, **options)
    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights())
    plan = jax.tree.map(jnp.asarray, plans("2x4", 2, "random").layer(0).layer(0))
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
    """Call the layer with arguments by name."""
    layer = prepare_layer(arguments["expert_ids"], arguments["plan"], parallel)
    experts, x = fetch_replicas(arguments["experts"], layer, arguments["x"], parallel)
    if "replicas" in arguments:
        experts = experts._replace(replicas=arguments["replicas"])
    return moe_layer(x, arguments["expert_ids"], arguments["gates"], experts, layer, parallel).output


@pytest.mark.slow
def test_moe_layer_live_refits_the_quotas_of_a_plan():
    """Tokens run under the slots and quotas of another micro-batch lose no token."""
    arguments, parallel = single()
    plan = plans("2x4", 2, "random").layer(2).layer(0)._replace(load=None)
    out = call(arguments | {"plan": plan}, parallel)
    assert_close(out, expected()[0]["output"], 2e-6)


@pytest.mark.parametrize(
    ("path", "buffer"),
    [("flat", "rows"), ("flat", "flat"), ("hierarchical", "node"), ("hierarchical", "local")],
)
def test_moe_layer_is_nan_with_too_small_buffers(path, buffer):
    """An invalid plan gives NaN, not a result without some of the tokens."""
    arguments, parallel = single(path)
    small = {"rows": 8} if buffer == "rows" else {buffer: ExchangeSizes(pair=4, own=4, send=4, receive=4)}
    sizes = dataclasses.replace(parallel.capacities, **small)
    assert_all_nan(call(arguments, dataclasses.replace(parallel, capacities=sizes)), arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "across_nodes"),
    [pytest.param("2x4", False, marks=pytest.mark.long), ("2x4", True), ("1x8", False)],
)
def test_node_visits_are_the_tokens_that_are_sent(mesh, across_nodes):
    """Lanes for just the most tokens that a rank sends to a node, or on a single node to a rank, by `node_visits`,
    suffice; one row less does not."""
    topology, rng, top_k = topology_of(mesh, 2), np.random.default_rng(6), 4
    exchange = "emulated" if topology.num_nodes > 1 else "padded"
    options = {"exchange": exchange, "fetch": "emulated", "across_nodes": across_nodes}
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, path="hierarchical", **options)
    arguments, _ = single("hierarchical")
    ids = random_ids(rng, (RANKS, TOKENS), EXPERTS, top_k)
    load = load_of(ids[None, None], topology)
    plan = random_plan(rng, load, topology, across_nodes=across_nodes)
    replay = RoutingReplay(np.maximum(ids, 0)[:, :, None], (ids != EMPTY).any(-1))
    batch_plan = BatchPlan(Assignment(np.arange(RANKS).reshape(1, *MESHES[mesh], 1)), load, plan)
    nodes = topology.visited.num_nodes
    stays = np.repeat(np.eye(nodes, dtype=bool), RANKS // nodes, 0)
    visits = np.asarray(node_visits(replay, batch_plan, topology))
    most = int(np.where(stays, 0, visits).max())
    assert (visits <= possible_visits(replay, batch_plan, topology)).all()
    assert (visits <= most_visits((ids != EMPTY).any(-1).sum(1), batch_plan, topology)).all()
    arguments |= {
        "expert_ids": jnp.asarray(ids),
        "gates": jnp.ones(ids.shape, jnp.float32),
        "experts": jnp.asarray(weights()["experts"], jnp.float32)[home_layout(plan.home[0], topology)],
        "plan": jax.tree.map(jnp.asarray, batch_plan.layer_plans().layer(0).layer(0)),
    }
    for pair in (most, most - 1):
        node = ExchangeSizes(pair=pair, own=TOKENS, send=nodes * TOKENS, receive=nodes * TOKENS)
        sizes = dataclasses.replace(worst_case_capacities(TOKENS, top_k, topology), node=node)
        out = call(arguments, dataclasses.replace(parallel, capacities=sizes))
        assert np.isfinite(out).all() == (pair == most)


def assert_all_nan(out, arguments):
    """Assert NaN for every token. Padding may be zero."""
    token = np.asarray(arguments["expert_ids"] != EMPTY).any(-1)
    assert np.isnan(np.asarray(out)[token]).all()


@pytest.mark.parametrize("pieces", [1, 2])
def test_moe_layer_is_nan_for_other_ids_on_one_rank(pieces):
    arguments, parallel = single(pieces=pieces)
    changed = arguments | {"expert_ids": arguments["expert_ids"].at[6].set(3)}
    assert_all_nan(call(changed, parallel), changed)


def test_moe_layer_is_nan_under_a_plan_of_another_load():
    """Ids with as many token copies but different experts give NaN."""
    arguments, parallel = single()
    order = np.roll(np.arange(EXPERTS), 1)
    ids = jnp.where(arguments["expert_ids"] == EMPTY, EMPTY, jnp.asarray(order)[arguments["expert_ids"]])
    plan = arguments["plan"]._replace(load=arguments["plan"].load[..., np.argsort(order)])
    assert_all_nan(call(arguments | {"expert_ids": ids, "plan": plan}, parallel), arguments)


@pytest.mark.parametrize("fetch", ["padded", "emulated"])
def test_moe_layer_is_nan_for_replicas_across_nodes_unless_allowed(fetch):
    arguments, parallel = single(fetch=fetch)
    across = arguments | {"plan": plans("2x4", 2, "eplb_global").layer(2).layer(0)}
    across["expert_ids"] = jnp.asarray(routings()[2])
    assert_all_nan(call(across, parallel), across)


@pytest.mark.parametrize("wrong", [-2, EXPERTS])
def test_prepare_layer_rejects_ids_outside_the_model(wrong):
    """Invalid ids raise an error if they are concrete, and give NaN if they are traced."""
    arguments, parallel = single()
    ids = arguments["expert_ids"].at[6, 0, 1].set(wrong)
    live = arguments | {"expert_ids": ids, "plan": arguments["plan"]._replace(load=None)}
    assert_all_nan(call(live, parallel), live)
    with pytest.raises(ValueError, match=rf"expert_ids\[6, 0, 1\]: {wrong} is outside 0..15"):
        prepare_layer(ids, arguments["plan"], parallel)


@pytest.mark.parametrize("small", [{"rows": 8}, {"export_copies": 1}])
def test_moe_layer_gradients_are_nan_where_outputs_are(small):
    arguments, parallel = single(fetch="emulated")
    parallel = dataclasses.replace(
        parallel, capacities=dataclasses.replace(parallel.capacities, **small), fetch="emulated"
    )

    def loss(trained):
        return call(arguments | trained, parallel).sum()

    grads = jax.jit(jax.grad(loss))({name: arguments[name] for name in ("x", "gates", "experts")})
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(("fetch", "buffer"), [("padded", "exports"), ("emulated", "export_copies")])
def test_fetch_replicas_is_nan_for_exports_that_do_not_fit(fetch, buffer):
    arguments, parallel = single(fetch=fetch)
    arguments |= {"plan": plans("2x4", 2, "random").layer(0).layer(0)}
    sizes = dataclasses.replace(parallel.capacities, **{buffer: 1})
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
            r"x: expected \[B, \.\.\.\] with B a multiple of 8 ranks \(2 x 4\) and no empty axis, found shape \(7, 12",
        ),
        (
            "plan",
            lambda plan: plan._replace(load=plan.load[..., :8]),
            r"plan.load: .*\(2, 4, 16\), found \(2, 4, 8\)",
        ),
        ("replicas", lambda _: None, r"experts.replicas: expected shape \(2, 4, 2, .*found \(2, 4, 0\)"),
    ],
)
def test_moe_layer_rejects_arguments_that_do_not_belong_together(name, change, message):
    arguments, parallel = single()
    with pytest.raises(ValueError, match=message):
        call(arguments | {name: change(arguments.get(name))}, parallel)


def test_prepare_layer_rejects_tokens_that_are_none():
    arguments, parallel = single()
    ids = arguments["expert_ids"]
    for none in (ids[:0], ids[:, :0]):
        with pytest.raises(ValueError, match=rf"expert_ids: .* no empty axis, found shape \({len(none)}, "):
            prepare_layer(none, arguments["plan"], parallel)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "direct"}, "path='direct' must be one of auto, flat, hierarchical"),
        ({"exchange": "rdma"}, "exchange='rdma' must be one of"),
        ({"fetch": "copy"}, "fetch='copy' must be one of"),
        ({"late_replicas": True, "pieces": 2}, "late_replicas=True needs pieces=1 .*found pieces=2"),
        ({"late_replicas": True, "fetch": "emulated"}, "needs .*fetch='padded', found .*fetch='emulated'"),
        ({"data_axes": ("data",)}, "data_axes: 'data' must be an axis of the mesh"),
        ({"topology": topology_of("4x2", 2)}, "mesh axis 'node': expected size 4 .*found 2"),
    ],
)
def test_expert_parallel_rejects_settings_that_cannot_run(options, message):
    _, parallel = single()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(parallel, **options)


def test_expert_parallel_rejects_explicit_mesh_axes():
    _, parallel = single()
    with pytest.raises(ValueError, match=r"mesh axis 'node': expected AxisType\.Auto, found"):
        dataclasses.replace(parallel, mesh=jax.make_mesh((2, 4), ("node", "local")))


def test_expert_parallel_hierarchical_needs_counted_visits():
    _, parallel = single()
    sizes = dataclasses.replace(parallel.capacities, node=None)
    with pytest.raises(ValueError, match="needs capacities counted with visits"):
        dataclasses.replace(parallel, path="hierarchical", capacities=sizes)
