"""The cost model against arithmetic done by hand, and against what it must never say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import planned, random_plan, random_routing

from relibra_jax.cost.hardware import CLUSTERS, MODELS, Cluster, Model
from relibra_jax.cost.step_time import (
    LayerTime,
    balanced_time,
    batch_time,
    layer_time,
    push_time,
    rank_time,
    reorder_time,
)
from relibra_jax.cost.traffic import count_traffic
from relibra_jax.node_visits import node_visits
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.metrics import cross_node_load
from relibra_jax.replay import expert_load
from relibra_jax.token_split import source_quota
from relibra_jax.types import EMPTY, BatchPlan, Plan, RoutingReplay, Topology, layer_plans

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
    time = layer_time(rank_time(layer_plans(plan, load), TOPOLOGY, **KNOWN))
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
    assert float(
        push_time(layer_plans(plan, None), TOPOLOGY, cluster=CLUSTER, model=MODEL).max()
    ) == pytest.approx(push)
    assert float(time.exposed[0, 0]) == pytest.approx(3 * (push - attention))
    assert float(time.total[0, 0]) == pytest.approx(float(sum(part[0, 0] for part in time)))


def test_push_hides_behind_attention(plan, load):
    known = KNOWN | {"context": 1e5}
    assert float(layer_time(rank_time(layer_plans(plan, load), TOPOLOGY, **known)).exposed[0, 0]) == 0


def test_scale_reads_a_small_trace_as_a_large_one(plan, load):
    big = plan._replace(quota=16 * plan.quota)
    expected = rank_time(layer_plans(big, 16 * load), TOPOLOGY, **KNOWN)
    found = rank_time(layer_plans(plan, load), TOPOLOGY, scale=16.0, **KNOWN)
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


@functools.cache
def a_batch(kind):
    rng = np.random.default_rng(0)
    replay = random_routing(rng, samples=12, tokens=9, layers=2, experts=8, top_k=3, skew=0)
    assignment = assign_in_order(12, TOPOLOGY, num_micro_batches=2)
    load = expert_load(replay, assignment, num_experts=8)
    if kind == "eplb":
        plan = planned("eplb", TOPOLOGY, load)
    else:
        plan = random_plan(rng, load, TOPOLOGY, across_nodes="across" in kind)
    return replay, BatchPlan(assignment, load, plan)


@pytest.fixture(scope="module", params=["eplb", "any", "any across nodes"])
def batch(request):
    return a_batch(request.param)


def sent_by(batch_plan):
    """Token copies from rank to rank, ``[M, L, N, G, N, G]``."""
    split = jax.vmap(jax.vmap(functools.partial(source_quota, topology=TOPOLOGY)))
    return np.asarray(jax.jit(split)(batch_plan.layer_plans())).sum(-1).reshape(2, 2, 2, 2, 2, 2)


def test_no_rank_sends_more_tokens_than_copies_to_another_node(batch):
    replay, batch_plan = batch
    tokens = node_visits(replay, batch_plan, TOPOLOGY).reshape(2, 2, 2, 2, 2)
    copies = sent_by(batch_plan).sum(-1)
    assert (tokens <= copies).all()
    assert tokens.sum() < copies.sum()


def test_sending_a_token_once_is_never_slower():
    """Not a law, as another rank of the node may receive it; but so for a planner's plan of this batch."""
    replay, batch_plan = a_batch("eplb")
    visits = node_visits(replay, batch_plan, TOPOLOGY)
    flat, once = (count_traffic(batch_plan.layer_plans(), TOPOLOGY, visits=v) for v in (None, visits))
    assert (once.slow <= flat.slow).all()
    assert once.slow.sum() < flat.slow.sum()


def test_flat_traffic_is_that_of_the_routes(batch):
    """Counted without the routes, rank by rank, it is what they send."""
    _, batch_plan = batch
    sent = sent_by(batch_plan)
    slow, fast = np.zeros((2, 2, 2, 2, 2), int), np.zeros((2, 2, 2, 2, 2), int)
    for n, g, n2, g2 in np.ndindex(2, 2, 2, 2):
        if (n, g) != (n2, g2):
            kind = slow if n != n2 else fast
            kind[0, :, :, n, g] += sent[:, :, n, g, n2, g2]
            kind[1, :, :, n2, g2] += sent[:, :, n, g, n2, g2]
    found = count_traffic(batch_plan.layer_plans(), TOPOLOGY)
    np.testing.assert_array_equal(found.slow, slow.max(0))
    np.testing.assert_array_equal(found.fast, fast.max(0))


def test_hierarchical_traffic_is_that_of_the_routes(batch):
    """A token crosses to the rank of its own index; from there its copies spread inside the node."""
    replay, batch_plan = batch
    visits, sent = node_visits(replay, batch_plan, TOPOLOGY), sent_by(batch_plan)
    slow, fast = np.zeros((2, 2, 2, 2, 2), int), np.zeros((2, 2, 2, 2, 2), int)
    for n, g, n2, g2 in np.ndindex(2, 2, 2, 2):
        if g != g2:
            fast[0, :, :, n2, g] += sent[:, :, n, g, n2, g2]
            fast[1, :, :, n2, g2] += sent[:, :, n, g, n2, g2]
        if n != n2 and g == g2:
            tokens = visits.reshape(2, 2, 2, 2, 2)[:, :, n, g, n2]
            slow[0, :, :, n, g] += tokens
            slow[1, :, :, n2, g] += tokens
    found = count_traffic(batch_plan.layer_plans(), TOPOLOGY, visits=visits)
    np.testing.assert_array_equal(found.slow, slow.max(0))
    np.testing.assert_array_equal(found.fast, fast.max(0))


def test_traffic_agrees_with_cross_node_load(batch):
    """With one rank a node, what the busiest rank sends or receives is at least half of what crosses."""
    _, batch_plan = batch
    slow = count_traffic(batch_plan.layer_plans(), TOPOLOGY).slow
    crossing = cross_node_load(batch_plan.layer_plans())
    assert (2 * slow.sum((2, 3)) >= crossing).all()
    assert (slow.max((2, 3)) <= crossing).all()


@pytest.mark.slow
def test_balanced_traffic_is_that_of_uniform_routing():
    """Counted on tokens that draw their experts evenly, for both paths."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=16, replica_slots=0)
    model = dataclasses.replace(MODEL, num_experts=16, top_k=3)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4, 4000, 1, 16)), axis=-1)[..., :3].astype(np.uint8)
    replay = RoutingReplay(ids, np.ones((4, 4000), bool))
    assignment = assign_in_order(4, topology, num_micro_batches=1)
    load = expert_load(replay, assignment, num_experts=16)
    batch_plan = BatchPlan(assignment, load, planned("static", topology, load))
    known = {"cluster": CLUSTER, "model": model, "context": 20.0}
    for visits in (None, node_visits(replay, batch_plan, topology)):
        found = layer_time(rank_time(batch_plan.layer_plans(), topology, visits=visits, **known)).exchange
        bound = layer_time(balanced_time(load, topology, hierarchical=visits is not None, **known)).exchange
        np.testing.assert_allclose(found, bound, rtol=0.03)


@pytest.mark.slow
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
    for name in ("static", "eplb"):
        time = layer_time(rank_time(layer_plans(planned(name, topology, load), load), topology, **known))
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
