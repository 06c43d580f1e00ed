"""The layer under every planner's plans, on every mesh: the mathematics of the dense layer, forward and backward."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_jax.capacities import safe_capacities
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.execution.moe import PATHS, ExpertParallel, fetch_replicas, moe_layer
from relibra_jax.plan import check_plan, home_layout
from relibra_jax.planning.planner import PLANNERS
from relibra_jax.types import EMPTY, Plan, Topology

MESHES = {"2x4": (2, 4), "4x2": (4, 2), "1x8": (1, 8), "8x1": (8, 1)}
RANKS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 8, 12, 6, 5, 16, 2
# Largest error over the largest value: outputs and gradients, whose terms are summed in another order.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2e-2}


def topology_of(mesh, replica_slots):
    nodes, local = MESHES[mesh]
    return Topology(num_nodes=nodes, ranks_per_node=local, num_experts=EXPERTS, replica_slots=replica_slots)


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


def load_of(ids, topology):
    """``[M, 1, N, G, E]`` token copies."""
    load = (ids[..., None] == np.arange(EXPERTS)).sum((2, 3))
    return jnp.asarray(
        load.reshape(len(ids), 1, topology.num_nodes, topology.ranks_per_node, EXPERTS), jnp.int32
    )


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
    """Output and gradients with every expert in one place, a token's weights gathered for it."""

    def loss(values):
        chosen = values["experts"][jnp.maximum(ids, 0)]
        gate, up, down = (chosen[..., part, :, :] for part in range(3))
        x = values["x"]
        hidden = jax.nn.silu(jnp.einsum("rtd,rtkdf->rtkf", x, gate)) * jnp.einsum("rtd,rtkdf->rtkf", x, up)
        out = jnp.einsum("rtkf,rtkdf->rtkd", hidden, down)
        gates = jnp.where(ids == EMPTY, 0, gates_of(values, ids))
        out = (out * gates[..., None]).sum(2)
        return (out * jnp.asarray(COTANGENT, out.dtype)).sum(), out

    grads, out = jax.grad(loss, has_aux=True)(values)
    return {"output": out} | grads


@functools.cache
def run(mesh, replica_slots, path, across_nodes, exchange="padded", fetch="reduce_scatter"):
    """Output and gradients of the layer, compiled once: another trace is an error."""
    topology = topology_of(mesh, replica_slots)
    parallel = ExpertParallel(
        mesh=expert_mesh(topology),
        topology=topology,
        capacities=safe_capacities(TOKENS, TOP_K, topology),
        path=path,
        exchange=exchange,
        fetch=fetch,
        across_nodes=across_nodes,
    )
    ranks = MESHES[mesh]

    def loss(values, ids, plan, load):
        x = values["x"].reshape(*ranks, TOKENS, WIDTH)
        layout = home_layout(plan.home, topology)
        experts = values["experts"][layout]
        gates = gates_of(values, ids).reshape(*ranks, TOKENS, TOP_K)
        gates = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
        replicas, x = fetch_replicas(experts, plan, x, parallel)
        out = moe_layer(x, ids.reshape(gates.shape), gates, experts, replicas, plan, load, parallel)
        out = out.reshape(RANKS, TOKENS, WIDTH)
        return (out * jnp.asarray(COTANGENT, out.dtype)).sum(), out

    def step(values, ids, plan, load):
        grads, out = jax.grad(loss, has_aux=True)(values, ids, plan, load)
        return {"output": out} | grads

    chex.clear_trace_counter()
    return jax.jit(chex.assert_max_traces(step, n=1))


def layer(plan, micro_batch):
    return Plan(plan.slot_expert[micro_batch, 0], plan.home[0], plan.quota[micro_batch, 0])


def assert_same(found, expected, tolerance):
    for name, value in expected.items():
        wanted = np.asarray(value, np.float64)
        scale = max(np.abs(wanted).max(), 1e-3)
        error = np.abs(np.asarray(found[name], np.float64) - wanted).max() / scale
        assert error <= tolerance, f"{name}: {error}"


@functools.cache
def plans(mesh, replica_slots, name):
    """A planner's plan of all routings as micro-batches of one batch."""
    topology = topology_of(mesh, replica_slots)
    planner = PLANNERS[name].planner
    load = load_of(routings(), topology)
    plan, _ = jax.jit(planner.update)(load, planner.init(topology, 1, key=jax.random.key(0)), topology)
    return plan, load


@functools.cache
def expected():
    with jax.enable_x64(True):
        return [dense(jax.tree.map(jnp.asarray, weights()), ids) for ids in routings()]


def check(step, plan, load, ids, wanted, tolerance=TOLERANCE["float64"]):
    with jax.enable_x64(True):
        assert_same(step(jax.tree.map(jnp.asarray, weights()), ids, plan, load), wanted, tolerance)


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("replica_slots", [0, 1, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_plans_do_not_change_the_mathematics(mesh, replica_slots, path, name):
    plan, load = plans(mesh, replica_slots, name)
    across = not PLANNERS[name].intra_node and replica_slots > 0 and MESHES[mesh][0] > 1
    step = run(mesh, replica_slots, path, across)
    for micro_batch, ids in enumerate(routings()):
        check(step, layer(plan, micro_batch), load[micro_batch, 0], ids, expected()[micro_batch])


@pytest.mark.parametrize("path", PATHS)
def test_index_logic_of_the_ragged_exchange_and_fetch(path):
    step = run("2x4", 2, path, False, "emulated", "emulated")
    for name in ("relibra", "eplb"):
        plan, load = plans("2x4", 2, name)
        for micro_batch, ids in enumerate(routings()):
            check(step, layer(plan, micro_batch), load[micro_batch, 0], ids, expected()[micro_batch])


def test_ragged_fetch_across_nodes():
    plan, load = plans("2x4", 2, "relibra_across")
    step = run("2x4", 2, "flat", True, "emulated", "emulated")
    check(step, layer(plan, 0), load[0, 0], routings()[0], expected()[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_dtypes(dtype, path):
    plan, load = plans("2x4", 2, "relibra")
    ids = routings()[0]
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights())
    with jax.enable_x64(True):
        wanted = dense(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), rounded), ids)
    chex.clear_trace_counter()
    found = run.__wrapped__("2x4", 2, path, False)(rounded, ids, layer(plan, 0), load[0, 0])
    assert found["output"].dtype == dtype
    assert_same(found, wanted, TOLERANCE[dtype])


def test_same_input_gives_the_same_bits():
    plan, load = plans("2x4", 2, "relibra")
    step = run("2x4", 2, "hierarchical", False)
    with jax.enable_x64(True):
        values = jax.tree.map(jnp.asarray, weights())
        first, second = (step(values, routings()[0], layer(plan, 0), load[0, 0]) for _ in range(2))
    chex.assert_trees_all_equal(first, second)


@st.composite
def routed_plans(draw):
    """Any routing, and any valid plan of it on 2x4: homes, replicas and splits that no planner would choose."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    topology = topology_of("2x4", 2)
    experts = draw(st.integers(1, EXPERTS))
    ids = rng.integers(0, experts, (RANKS, TOKENS, TOP_K)).astype(np.int32)
    ids[rng.random(ids.shape[:2]) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = EMPTY
    load = load_of(ids[None], topology)
    home = rng.permutation(EXPERTS)
    slot_expert = np.full((2, 4, topology.slots), EMPTY)
    slot_expert[..., : topology.home_slots] = np.argsort(home).reshape(2, 4, -1)
    for node, rank, slot in np.ndindex(2, 4, 2):
        here = slot_expert[node, :, : topology.home_slots].ravel()
        free = np.setdiff1d(here, slot_expert[node, rank])
        if rng.random() < 0.7:
            slot_expert[node, rank, topology.home_slots + slot] = rng.choice(free)
    quota = np.zeros_like(slot_expert)
    for expert, count in enumerate(np.asarray(load).sum((0, 1, 2, 3))):
        places = np.argwhere(slot_expert == expert)
        quota[tuple(places.T)] = rng.multinomial(count, rng.dirichlet(np.full(len(places), 0.5)))
    plan = Plan(
        *(jnp.asarray(leaf, jnp.int32) for leaf in (slot_expert[None, None], home[None], quota[None, None]))
    )
    return ids, plan, load


@settings(max_examples=25)
@given(routed_plans())
def test_any_plan_of_any_routing(drawn):
    ids, plan, load = drawn
    check_plan(plan, load, topology_of("2x4", 2))
    with jax.enable_x64(True):
        wanted = dense(jax.tree.map(jnp.asarray, weights()), ids)
    for path in PATHS:
        check(run("2x4", 2, path, False), layer(plan, 0), load[0, 0], ids, wanted)
