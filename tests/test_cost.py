"""The cost model equals arithmetic done by hand, and has the properties that any such model must have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.costs import CLUSTER, KNOWN, MODEL
from support.plans import planned, random_plan, random_routing

from relibra_jax.cost.batch_time import BatchTime, balanced_time, batch_time
from relibra_jax.cost.copies import push_time, reorder_time
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.cost.step_time import layer_time, rank_time
from relibra_jax.cost.traffic import count_traffic
from relibra_jax.cost.unit_times import unit_times
from relibra_jax.hot_ranks import HotRanks, mark_hot_ranks
from relibra_jax.node_visits import node_visits
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.metrics import cross_node_load
from relibra_jax.replay import expert_load
from relibra_jax.token_split import source_quota
from relibra_jax.types import EMPTY, BatchPlan, Plan, RoutingReplay, Topology, layer_plans

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)


@pytest.fixture
def plan():
    """A plan with expert e in home slot e, and a replica of expert 0 on rank (0, 1)."""
    slot_expert = np.array([[[[[0, 1, EMPTY], [2, 3, 0]], [[4, 5, EMPTY], [6, 7, EMPTY]]]]], np.int32)
    quota = np.array([[[[[17, 0, 0], [0, 0, 13]], [[10, 0, 0], [0, 0, 0]]]]], np.int32)
    return Plan(slot_expert, np.arange(8, dtype=np.int32)[None], quota)


@pytest.fixture
def load():
    """A load of 20 copies for expert 0 on rank (0, 0), and of 10 for expert 0 and 10 for expert 4 on rank (1, 1)."""
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
    setting = KNOWN | {"context": 1e5}
    assert float(layer_time(rank_time(layer_plans(plan, load), TOPOLOGY, **setting)).exposed[0, 0]) == 0


def test_scale_reads_a_small_trace_as_a_large_one(plan, load):
    big = plan._replace(quota=16 * plan.quota)
    expected = rank_time(layer_plans(big, 16 * load), TOPOLOGY, **KNOWN)
    time = rank_time(layer_plans(plan, load), TOPOLOGY, scale=16.0, **KNOWN)
    for name, part in time._asdict().items():
        np.testing.assert_allclose(part, getattr(expected, name), rtol=1e-6, err_msg=name)


def test_reorder_counts_state_on_the_busiest_link():
    before = np.arange(8)[None]
    now = np.array([[0, 4, 2, 3, 1, 5, 7, 6]])  # 1 and 4 change node; 6 and 7 change slots on one rank
    moved = 1 * (3 * 4 * 5) * 12
    seconds = reorder_time(now, before, TOPOLOGY, cluster=CLUSTER, model=MODEL)
    assert float(seconds) == pytest.approx(moved / 100 / 0.5)
    assert float(reorder_time(before, before, TOPOLOGY, cluster=CLUSTER, model=MODEL)) == 0


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
    """Not true of all plans, because another rank of the node may receive the copies, but of this one."""
    replay, batch_plan = a_batch("eplb")
    visits = node_visits(replay, batch_plan, TOPOLOGY)
    flat, once = (count_traffic(batch_plan.layer_plans(), TOPOLOGY, visits=v) for v in (None, visits))
    busiest_flat, busiest_once = (np.maximum(each.slow_sent, each.slow_received) for each in (flat, once))
    assert (busiest_once <= busiest_flat).all()
    assert busiest_once.sum() < busiest_flat.sum()


def test_flat_traffic_is_that_of_the_routes(batch):
    """Flat traffic, which is counted without routes, equals a count rank by rank."""
    _, batch_plan = batch
    sent = sent_by(batch_plan)
    slow, fast = np.zeros((2, 2, 2, 2, 2), int), np.zeros((2, 2, 2, 2, 2), int)
    for n, g, n2, g2 in np.ndindex(2, 2, 2, 2):
        if (n, g) != (n2, g2):
            kind = slow if n != n2 else fast
            kind[0, :, :, n, g] += sent[:, :, n, g, n2, g2]
            kind[1, :, :, n2, g2] += sent[:, :, n, g, n2, g2]
    traffic = count_traffic(batch_plan.layer_plans(), TOPOLOGY)
    np.testing.assert_array_equal((traffic.slow_sent, traffic.slow_received), slow)
    np.testing.assert_array_equal((traffic.fast_sent, traffic.fast_received), fast)


def test_hierarchical_traffic_is_that_of_the_routes(batch):
    """A token crosses to the rank with its local index, which sends its copies to the ranks of the node."""
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
    traffic = count_traffic(batch_plan.layer_plans(), TOPOLOGY, visits=visits)
    np.testing.assert_array_equal((traffic.slow_sent, traffic.slow_received), slow)
    np.testing.assert_array_equal((traffic.fast_sent, traffic.fast_received), fast)


def test_traffic_agrees_with_cross_node_load(batch):
    """All that leaves a node is sent by one rank and received by another."""
    _, batch_plan = batch
    traffic = count_traffic(batch_plan.layer_plans(), TOPOLOGY)
    crossing = cross_node_load(batch_plan.layer_plans())
    np.testing.assert_array_equal(traffic.slow_sent.sum((2, 3)), crossing)
    np.testing.assert_array_equal(traffic.slow_received.sum((2, 3)), crossing)


@pytest.mark.slow
def test_balanced_traffic_is_that_of_uniform_routing():
    """The balanced time equals a count on tokens that draw their experts uniformly, for both kinds of dispatch."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=16, replica_slots=0)
    model = dataclasses.replace(MODEL, num_experts=16, top_k=3)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4, 4000, 1, 16)), axis=-1)[..., :3].astype(np.uint8)
    replay = RoutingReplay(ids, np.ones((4, 4000), bool))
    assignment = assign_in_order(4, topology, num_micro_batches=1)
    load = expert_load(replay, assignment, num_experts=16)
    batch_plan = BatchPlan(assignment, load, planned("static", topology, load))
    setting = {"cluster": CLUSTER, "model": model, "context": 20.0}
    for visits in (None, node_visits(replay, batch_plan, topology)):
        exchange = batch_time(batch_plan, topology, visits=visits, **setting).exchange
        dispatch = "flat" if visits is None else "hierarchical"
        bound = balanced_time(load, topology, dispatch=dispatch, **setting).exchange
        np.testing.assert_allclose(exchange, bound, rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_balanced_is_a_bound_at_real_sizes(name):
    model = MODELS[name]
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=model.num_experts, replica_slots=2)
    rng = np.random.default_rng(0)
    share = rng.zipf(1.5, (2, 1, 1, 1, model.num_experts)).clip(0, 50).astype(float)
    copies = 4096 * model.top_k * share / share.sum(-1, keepdims=True)
    load = jnp.asarray(np.broadcast_to(copies, (2, 1, 2, 4, model.num_experts)), jnp.int32)
    setting = {"cluster": CLUSTERS["h100"], "model": model, "context": 4096.0}
    bound = balanced_time(load, topology, **setting)
    for name in ("static", "eplb"):
        time = batch_time(BatchPlan(None, load, planned(name, topology, load)), topology, **setting)
        for part in ("attention", "compute", "total"):
            assert (getattr(time, part) >= getattr(bound, part) * 0.999).all(), part


def test_model_sizes_add_up():
    """Active and total weights agree with the models' names, without embeddings."""
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


def test_a_shared_link_carries_what_the_whole_node_sends(plan, load):
    """Rank (1, 1) sends 10 rows and its neighbour none; on a link that two ranks share, each has the time of 5."""
    shared = dataclasses.replace(CLUSTER, shared_link=True)
    exchange = rank_time(layer_plans(plan, load), TOPOLOGY, **KNOWN | {"cluster": shared}).exchange
    np.testing.assert_allclose(exchange[0, 0], 5 * 8 / 100 / 0.5)
    own = rank_time(layer_plans(plan, load), TOPOLOGY, **KNOWN).exchange
    assert float(own.max()) == pytest.approx(10 * 8 / 100 / 0.5)


@pytest.mark.parametrize(
    ("stage", "compute", "exchange"),
    [
        ({"updates": 1, "recompute": False}, 3, 4),
        ({"updates": 5, "recompute": False}, 3, 4),
        ({"updates": 1, "recompute": True}, 4, 6),
        ({"updates": 0, "recompute": True}, 1, 2),
    ],
)
def test_passes_of_a_stage(plan, load, stage, compute, exchange):
    forward = jax.tree.map(np.max, rank_time(layer_plans(plan, load), TOPOLOGY, **KNOWN))
    time = batch_time(BatchPlan(None, load, plan), TOPOLOGY, **stage, **KNOWN)
    expected = (
        compute * forward.attention,
        compute * forward.compute,
        exchange * forward.exchange,
        compute * (forward.push - forward.attention),
    )
    np.testing.assert_allclose(time[:4], expected, rtol=1e-6)
    assert float(time.exposed) > 0
    assert float(time.total) == pytest.approx(float(sum(time)))


def whole_batch():
    """Return a batch of two micro-batches of two layers, its node visits, and the previous homes."""
    replay, batch_plan = a_batch("any")
    home = np.stack([np.random.default_rng(1).permutation(8) for _ in range(2)])
    return {
        "batch_plan": batch_plan,
        "visits": node_visits(replay, batch_plan, TOPOLOGY),
        "previous_home": home,
    }


def test_stages_add_up():
    """The times of a recompute alone and of an update alone, with the same plan, add up to that of both in one call."""
    batch = whole_batch()
    stages = [
        batch_time(**batch | {"previous_home": None}, topology=TOPOLOGY, updates=0, recompute=True, **KNOWN),
        batch_time(**batch, topology=TOPOLOGY, updates=2, **KNOWN),
    ]
    both = batch_time(**batch, topology=TOPOLOGY, updates=2, recompute=True, **KNOWN)
    np.testing.assert_allclose(sum(map(np.array, stages)), both, rtol=1e-6)
    assert float(both.reorder) == pytest.approx(
        float(
            reorder_time(
                batch["batch_plan"].plan.home, batch["previous_home"], TOPOLOGY, cluster=CLUSTER, model=MODEL
            )
        )
    )


def test_a_batch_waits_for_its_slowest_copy():
    _, batch_plan = a_batch("any")
    copies = [
        batch_time(
            BatchPlan(
                None,
                batch_plan.load[m : m + 1],
                batch_plan.plan._replace(
                    slot_expert=batch_plan.plan.slot_expert[m : m + 1], quota=batch_plan.plan.quota[m : m + 1]
                ),
            ),
            TOPOLOGY,
            **KNOWN,
        )
        for m in range(2)
    ]
    totals = [float(copy.total) for copy in copies]
    assert min(totals) < max(totals)
    actual = batch_time(batch_plan, TOPOLOGY, data_parallel=2, **KNOWN)
    np.testing.assert_allclose(actual, copies[int(np.argmax(totals))], rtol=1e-6)
    assert float(batch_time(batch_plan, TOPOLOGY, **KNOWN).total) == pytest.approx(sum(totals))


def test_batch_time_under_jit_and_vmap(monkeypatch):
    """Stacked batches have the times of each alone, and other batches and scales do not compile again."""
    batch = whole_batch()
    other = batch | {"batch_plan": a_batch("any across nodes")[1]}
    run = functools.partial(batch_time, topology=TOPOLOGY, **KNOWN)

    def planes(batch):
        return batch["batch_plan"]._replace(assignment=None), batch["visits"], batch["previous_home"]

    def call(batch_plan, visits, previous_home):
        return run(batch_plan, visits=visits, previous_home=previous_home)

    before = [call(*planes(one)) for one in (batch, other)]
    with monkeypatch.context() as context:
        context.setattr("relibra_jax.cost.batch_time.rank_time", None)  # a trace would call it
        alone = [call(*planes(one)) for one in (other, batch)][::-1]
        plan, visits, previous = planes(batch)
        run(plan, visits=visits, previous_home=previous, scale=2.0)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), planes(batch), planes(other))
    together = jax.jit(jax.vmap(call))(*stacked)
    for number in range(2):
        one = jax.tree.map(lambda leaf, at=number: leaf[at], together)
        np.testing.assert_allclose(one, alone[number], rtol=1e-5)
        np.testing.assert_array_equal(before[number], alone[number])
    assert isinstance(together, BatchTime)
    assert float(together.total[0]) != float(together.total[1])


@pytest.mark.parametrize("visits", ["flat", "hierarchical"])
def test_more_work_and_slower_networks_never_take_less_time(visits):
    batch = whole_batch()
    if visits == "flat":
        batch["visits"] = None
    run = functools.partial(batch_time, **batch, topology=TOPOLOGY)
    base = run(**KNOWN)
    for change in (
        {"scale": 3.0},
        {"updates": 3},
        {"recompute": True},
        {"context": 40.0},
        {"cluster": dataclasses.replace(CLUSTER, slow_bandwidth=50.0)},
        {"cluster": dataclasses.replace(CLUSTER, fast_bandwidth=10.0)},
        {"cluster": dataclasses.replace(CLUSTER, matmul_flops=5e5)},
    ):
        time = run(**KNOWN | change)
        # Longer attention hides more.
        assert all(np.array(time[:3]) >= np.array(base[:3])), change
        assert float(time.total) >= float(base.total) * (1 - 1e-6), change


def test_unit_times_are_what_a_unit_takes():
    """Each phase has one busiest rank, whose work is counted by hand."""
    cluster = dataclasses.replace(CLUSTER, tile=1)
    topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    model = dataclasses.replace(MODEL, num_experts=2, top_k=1)
    setting = {"cluster": cluster, "model": model, "context": 20.0}
    load = np.array([[[[[3, 7]], [[0, 0]]]]], np.int32)  # rank 0 has 10 tokens and sends 7 to the other node
    plan = Plan(*(np.array(leaf, np.int32) for leaf in ([[[[[0]], [[1]]]]], [[0, 1]], [[[[[3]], [[7]]]]])))
    batch_plan, visits = BatchPlan(None, load, plan), np.array([[[[3, 7], [0, 0]]]])
    for stage in ({}, {"recompute": True}, {"updates": 0, "recompute": True}):
        for dispatch, crossed in (("flat", None), ("hierarchical", visits)):
            units = unit_times(dispatch=dispatch, scale=2.0, **stage, **setting)
            time = batch_time(batch_plan, topology, visits=crossed, scale=2.0, **stage, **setting)
            actual = (10 * units.token, 7 * units.copy, 7 * units.crossing)
            np.testing.assert_allclose(actual, time[:3], rtol=1e-6)
            assert units.hierarchical == (crossed is not None)
            assert units.spread == pytest.approx(units.crossing / 10), "the fast network is ten times as fast"
    moved = reorder_time(np.array([[1, 0]]), np.array([[0, 1]]), topology, cluster=cluster, model=model)
    for updates in (1, 3):
        units = unit_times(scale=2.0, updates=updates, **setting)
        assert units.move == pytest.approx(float(moved))
        assert units.push == pytest.approx(updates * 3 * 4 * 5 * (2 + 4) / 100 / 0.5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 0.0}, "scale=0.0 must be positive and finite"),
        ({"context": float("nan")}, "context=nan must be positive and finite"),
        ({"updates": -1}, "updates=-1 must be an integer of at least 0"),
        ({"updates": 0}, "updates=0 and recompute=False leave no pass to run"),
        ({"data_parallel": 0}, "data_parallel=0 must be an integer of at least 1"),
        ({"data_parallel": 3}, "2 micro-batches must divide evenly over data_parallel=3"),
        (
            {"visits": np.zeros((2, 2, 3, 2), int)},
            r"visits: expected shape \(2, 2, 4, 2\), found \(2, 2, 3, 2\)",
        ),
        ({"previous_home": np.zeros((1, 8), int)}, r"previous_home: expected shape \(2, 8\), found \(1, 8\)"),
        (
            {"topology": dataclasses.replace(TOPOLOGY, num_nodes=1)},
            r"load: expected shape \(2, 2, 1, 2, 8\), found \(2, 2, 2, 2, 8\)",
        ),
    ],
)
def test_bad_input_of_a_batch(wrong, message):
    with pytest.raises(ValueError, match=message):
        batch_time(**{"batch_plan": a_batch("any")[1], "topology": TOPOLOGY} | KNOWN | wrong)


def test_other_bad_input():
    with pytest.raises(ValueError, match="dispatch='ring' must be one of flat, hierarchical"):
        unit_times(CLUSTER, MODEL, context=20.0, dispatch="ring")
    with pytest.raises(ValueError, match="dispatch='ring' must be one of flat, hierarchical"):
        balanced_time(np.zeros((1, 1, 2, 2, 8), int), TOPOLOGY, dispatch="ring", **KNOWN)


def test_hot_ranks_by_hand(plan, load):
    """Rank (0, 0) has two tiles in float8, which is four times as fast here, so rank (0, 1) is the slowest."""
    price = functools.partial(batch_time, BatchPlan(None, load, plan), TOPOLOGY, **KNOWN)
    alone = {"updates": 0, "recompute": True}
    tile = 16 * (2 * 3 * 4 * 5) / 5e5
    hot = mark_hot_ranks(plan, HotRanks(threshold=1.5, min_rows=1))
    np.testing.assert_array_equal(hot, [[[[True, False], [False, False]]]])
    exact, marked = price(**alone), price(**alone, float8=hot)
    assert float(exact.compute) == pytest.approx(2 * tile)
    assert float(marked.compute) == pytest.approx(tile)
    assert float(price(**alone, float8=np.ones_like(hot)).compute) == pytest.approx(2 * tile / 4)
    for part in BatchTime._fields:
        if part != "compute":
            assert getattr(exact, part) == getattr(marked, part), part
    with pytest.raises(ValueError, match="float8 requires a recompute alone, updates=0, not updates=1"):
        price(recompute=True, float8=hot)
    with pytest.raises(ValueError, match=r"float8: expected shape \(1, 1, 2, 2\), found \(1, 1, 1, 4\)"):
        price(**alone, float8=hot.reshape(1, 1, 1, 4))
