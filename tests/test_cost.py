"""The cost model against arithmetic done by hand, and against what it must never say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.cost.step_time import (
    LayerTime,
    balanced_time,
    batch_time,
    count_traffic,
    layer_time,
    push_time,
    rank_time,
    reorder_time,
)
from relibra_jax.planning.eplb import eplb
from relibra_jax.cost.hardware import CLUSTERS, MODELS, Cluster, Model
from relibra_jax.planning.metrics import cross_node_load
from relibra_jax.planning.planners import static
from relibra_jax.replay import expert_load
from relibra_jax.token_split import node_visits, source_quota
from relibra_jax.types import EMPTY, Plan, RoutingReplay, Topology

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
CLUSTER = Cluster(
    matmul_flops=1e6,
    matmul_efficiency=0.5,
    fast_bandwidth=1000.0,
    slow_bandwidth=100.0,
    network_efficiency=0.5,
    tile=16,
)
MODEL = Model(
    moe_layers=1,
    num_experts=8,
    top_k=2,
    width=4,
    expert_width=5,
    shared_width=0,
    attention_params=50,
    attention_width=10,
)
KNOWN = {"cluster": CLUSTER, "model": MODEL, "context": 20.0}


@pytest.fixture
def plan():
    """Expert e at home in slot e; rank (0, 1) holds a replica of expert 0."""
    slot_expert = np.array([[[[[0, 1, EMPTY], [2, 3, 0]], [[4, 5, EMPTY], [6, 7, EMPTY]]]]], np.int32)
    quota = np.array([[[[[17, 0, 0], [0, 0, 13]], [[10, 0, 0], [0, 0, 0]]]]], np.int32)
    return Plan(slot_expert, np.arange(8, dtype=np.int32)[None], quota)


@pytest.fixture
def load():
    """20 copies for expert 0 on rank (0, 0) and 10 on rank (1, 1), which also sends 10 to expert 4."""
    load = np.zeros((1, 1, 2, 2, 8), np.int32)
    load[0, 0, 0, 0, 0], load[0, 0, 1, 1, 0], load[0, 0, 1, 1, 4] = 20, 10, 10
    return load


def test_layer_time_by_hand(plan, load):
    time = layer_time(rank_time(plan, load, TOPOLOGY, **KNOWN))
    tokens = 20 / 2
    attention = tokens * (2 * 50 + 10 * 20) / 5e5
    assert float(time.attention[0, 0]) == pytest.approx(3 * attention)
    assert float(time.compute[0, 0]) == pytest.approx(3 * 32 * (2 * 3 * 4 * 5) / 5e5), (
        "17 rows fill two tiles"
    )
    # Rank (0, 0) keeps 17 and sends 3 to its neighbour; rank (1, 1) sends 10 to node 0, and 10 to its neighbour.
    slow, fast = 10 * 8 / 100, 10 * 8 / 1000
    assert float(time.exchange[0, 0]) == pytest.approx(4 * max(slow, fast) / 0.5)
    push = 3 * 4 * 5 * 2 / 1000 / 0.5
    assert float(push_time(plan, TOPOLOGY, cluster=CLUSTER, model=MODEL).max()) == pytest.approx(push)
    assert float(time.exposed[0, 0]) == pytest.approx(3 * (push - attention))
    assert float(time.total[0, 0]) == pytest.approx(float(sum(part[0, 0] for part in time)))


def test_push_hides_behind_attention(plan, load):
    known = KNOWN | {"context": 1e5}
    assert float(layer_time(rank_time(plan, load, TOPOLOGY, **known)).exposed[0, 0]) == 0


def test_scale_reads_a_small_trace_as_a_large_one(plan, load):
    big = plan._replace(quota=16 * plan.quota)
    expected = rank_time(big, 16 * load, TOPOLOGY, **KNOWN)
    found = rank_time(plan, load, TOPOLOGY, scale=16.0, **KNOWN)
    for name, part in found._asdict().items():
        np.testing.assert_allclose(part, getattr(expected, name), rtol=1e-6, err_msg=name)


def test_reorder_counts_state_on_the_busiest_link():
    before = np.arange(8)[None]
    now = np.array([[0, 4, 2, 3, 1, 5, 7, 6]])  # 1 and 4 change node; 6 and 7 change slots on one rank
    moved = 1 * (3 * 4 * 5) * 14
    found = reorder_time(now, before, TOPOLOGY, cluster=CLUSTER, model=MODEL)
    assert float(found) == pytest.approx(moved / 100 / 0.5)
    assert float(reorder_time(before, before, TOPOLOGY, cluster=CLUSTER, model=MODEL)) == 0


def test_batch_time_waits_for_the_slowest_copy():
    times = LayerTime(*(jnp.array([[1.0], [2.0], [3.0], [4.0]]) * part for part in (1, 0, 0, 0)))
    assert float(batch_time(times)) == 10
    assert float(batch_time(times, data_parallel=2, reorder=0.5)) == 7.5
    with pytest.raises(ValueError, match="4 micro-batches must divide evenly over data_parallel=3"):
        batch_time(times, data_parallel=3)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (12, 9, 2, 1)), axis=-1)[..., :3]
    replay = RoutingReplay(ids, np.arange(9) < rng.integers(1, 10, 12)[:, None])
    assignment = assign_in_order(12, TOPOLOGY, num_micro_batches=2)
    load = expert_load(replay, assignment, num_experts=8)
    plan, _ = jax.jit(eplb().update)(load, eplb().init(TOPOLOGY, 2, key=jax.random.key(0)), TOPOLOGY)
    return replay, assignment, load, plan


def test_sending_a_token_once_is_never_slower(batch):
    replay, assignment, load, plan = batch
    visits = node_visits(replay, assignment, plan, TOPOLOGY)
    flat, once = (count_traffic(plan, load, TOPOLOGY, visits=v) for v in (None, visits))
    assert (once.slow <= flat.slow).all()
    assert once.slow.sum() < flat.slow.sum()


def test_flat_traffic_is_that_of_the_routes(batch):
    """Counted without the routes, rank by rank, it is what they send."""
    _, _, load, plan = batch
    sent = np.asarray(source_quota(plan, load, TOPOLOGY)).sum(-1).reshape(2, 2, 2, 2, 2, 2)
    slow, fast = np.zeros((2, 2, 2, 2, 2), int), np.zeros((2, 2, 2, 2, 2), int)
    for n, g, n2, g2 in np.ndindex(2, 2, 2, 2):
        if (n, g) != (n2, g2):
            kind = slow if n != n2 else fast
            kind[0, :, :, n, g] += sent[:, :, n, g, n2, g2]
            kind[1, :, :, n2, g2] += sent[:, :, n, g, n2, g2]
    found = count_traffic(plan, load, TOPOLOGY)
    np.testing.assert_array_equal(found.slow, slow.max(0))
    np.testing.assert_array_equal(found.fast, fast.max(0))


def test_traffic_agrees_with_cross_node_load(batch):
    """With one rank a node, what the busiest rank sends or receives is at least half of what crosses."""
    _, _, load, plan = batch
    slow = count_traffic(plan, load, TOPOLOGY).slow
    crossing = cross_node_load(plan, load)
    assert (2 * slow.sum((2, 3)) >= crossing).all()
    assert (slow.max((2, 3)) <= crossing).all()


def test_balanced_traffic_is_that_of_uniform_routing():
    """Counted on tokens that draw their experts evenly, for both paths."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=16, replica_slots=0)
    model = dataclasses.replace(MODEL, num_experts=16, top_k=3)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4, 4000, 1, 16)), axis=-1)[..., :3].astype(np.uint8)
    replay = RoutingReplay(ids, np.ones((4, 4000), bool))
    assignment = assign_in_order(4, topology, num_micro_batches=1)
    load = expert_load(replay, assignment, num_experts=16)
    plan, _ = static().update(load, (), topology)
    known = {"cluster": CLUSTER, "model": model, "context": 20.0}
    for visits in (None, node_visits(replay, assignment, plan, topology)):
        found = layer_time(rank_time(plan, load, topology, visits=visits, **known)).exchange
        bound = layer_time(balanced_time(load, topology, hierarchical=visits is not None, **known)).exchange
        np.testing.assert_allclose(found, bound, rtol=0.03)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_balanced_is_a_bound_at_real_sizes(name):
    model = MODELS[name]
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=model.num_experts, replica_slots=2)
    rng = np.random.default_rng(0)
    share = rng.zipf(1.5, (2, 1, 1, 1, model.num_experts)).clip(0, 50).astype(float)
    copies = 4096 * model.top_k * share / share.sum(-1, keepdims=True)
    load = jnp.asarray(np.broadcast_to(copies, (2, 1, 2, 4, model.num_experts)), jnp.int32)
    known = {"cluster": CLUSTERS["h100"], "model": model, "context": 4096.0}
    bound = layer_time(balanced_time(load, topology, **known))
    for planner in (static(), eplb()):
        plan, _ = jax.jit(planner.update)(load, planner.init(topology, 1, key=jax.random.key(0)), topology)
        time = layer_time(rank_time(plan, load, topology, **known))
        for part in ("attention", "compute", "total"):
            assert (getattr(time, part) >= getattr(bound, part) * 0.999).all(), part


def test_model_sizes_add_up():
    """Active and total weights as the models' names state them, embeddings left out."""
    for name, total, active in (
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("glm-4.5-106b-a12b", 106e9, 12e9),
        ("deepseek-v3", 671e9, 37e9),
        ("gpt-oss-20b", 20.9e9, 3.6e9),
        ("gpt-oss-120b", 116.8e9, 5.1e9),
    ):
        model = MODELS[name]
        outside = model.attention_params + 3 * model.width * model.shared_width
        every = model.moe_layers * (outside + model.num_experts * model.expert_params)
        used = model.moe_layers * (outside + model.top_k * model.expert_params)
        assert 0.93 * total < every < 1.01 * total, name
        assert 0.65 * active < used < 1.02 * active, name
