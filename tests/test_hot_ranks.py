"""The rule finds hot ranks and does not change the plan, and only hot ranks compute in float8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from support.plans import load_of, planned, random_plan
from test_balancer import OPTIMIZER, Run, batches, train_step
from test_moe import RANKS, gates_of, routings, topology_of, weights

from experiments.float8.grouped_mlp import grouped_mlp_float8
from experiments.float8.hot_ranks import HotRanks, in_float8, mark_hot_ranks
from pallas_kernels import grouped_mlp
from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import LayerPlan, Topology, layer_plans
from relibra_jax.execution import ExpertParallel, expert_mesh, fetch_replicas, moe_layer, prepare_layer

TOPOLOGY = topology_of("2x4", 0)
VALUES = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights())
IDS = routings()[0]
GATES = gates_of(VALUES, IDS).astype(jnp.float32)
PARALLEL = ExpertParallel(mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY, path="flat")
ALL = HotRanks(threshold=0.0, min_rows=1)
HOT = HotRanks(threshold=1.0, min_rows=1)
REFUSAL = "grouped_dot_float8 has no gradient: float8 is for rollout and recompute, not for updates"


@functools.cache
def plan_of_layer():
    load = load_of(IDS[None, None], TOPOLOGY)
    return layer_plans(planned("static", TOPOLOGY, load), load).layer(0).layer(0)


def run_layer(x, plan, expert_mlp=None):
    layer = prepare_layer(IDS, plan, PARALLEL)
    layer_experts, x = fetch_replicas(VALUES["experts"][home_layout(plan.home, TOPOLOGY)], layer, x, PARALLEL)
    return moe_layer(x, IDS, GATES, layer_experts, layer, PARALLEL, expert_mlp=expert_mlp)


run = jax.jit(run_layer, static_argnames="expert_mlp")


@given(
    st.lists(st.integers(0, 5000), min_size=24, max_size=24),
    st.floats(0, 3, width=32),
    st.integers(1, 4000),
)
@settings(deadline=None, max_examples=100)
def test_mark_hot_ranks_by_threshold_and_floor(rows, threshold, min_rows):
    """Marks equal a count rank by rank and layer by layer, over all slots of a rank."""
    quota = np.array(rows, np.int32).reshape(3, 2, 2, 2)
    actual = mark_hot_ranks(
        LayerPlan(quota, quota, quota, None), HotRanks(threshold=threshold, min_rows=min_rows)
    )
    for layer in range(3):
        load = [sum(slots) for node in quota[layer].tolist() for slots in node]
        hot = [each > threshold * sum(load) / 4 and each >= min_rows for each in load]
        near = [abs(each - threshold * sum(load) / 4) < 1e-2 for each in load]  # float32 rounding decides
        assert all(a == b or c for a, b, c in zip(np.ravel(actual[layer]).tolist(), hot, near, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_mark_hot_ranks_reads_any_plan_and_changes_nothing_of_it(seed):
    """Marks of a batch equal those of each micro-batch alone; some rank is above the mean unless all are equal."""
    topology = topology_of("2x4", 2, 1)
    load = load_of(routings()[:, None], topology)
    plan = random_plan(np.random.default_rng(seed), load, topology)
    before = jax.tree.map(np.array, plan)
    marks = np.asarray(mark_hot_ranks(plan, HOT))
    assert marks.shape == plan.quota.shape[:-1]
    for number, layer in enumerate(marks):
        of_layer = layer_plans(plan, load).layer(number).layer(0)
        np.testing.assert_array_equal(mark_hot_ranks(of_layer, HOT), layer[0])
    rows = np.asarray(plan.quota).sum(-1)
    even = (rows == rows[..., :1, :1]).all((-2, -1))
    assert not marks[even].any()
    assert (marks.any((-2, -1)) == ~even).all(), "where ranks differ, one is above the mean"
    for kept, now in zip(before, plan, strict=True):
        np.testing.assert_array_equal(kept, now)


@pytest.mark.slow
def test_hot_ranks_compute_in_float8_and_all_others_the_same_bits():
    """Without replicas each copy is computed at home, so a token's output differs if one of its ranks is hot."""
    exact, some = (run(VALUES["x"], plan_of_layer(), expert_mlp) for expert_mlp in (None, HOT))
    hot = np.ravel(mark_hot_ranks(plan_of_layer(), HOT))
    assert 0 < hot.sum() < RANKS
    of_copy = hot[np.maximum(IDS, 0) // TOPOLOGY.home_slots] & (IDS >= 0)
    touched = of_copy.any(-1)
    assert 0.1 < touched.mean() < 0.9
    same = (np.asarray(exact.output) == np.asarray(some.output)).all(-1)
    np.testing.assert_array_equal(same, ~touched)
    error = np.linalg.norm(some.output - exact.output) / np.linalg.norm(exact.output)
    assert 0.005 < error < 0.1
    np.testing.assert_array_equal(exact.slot_rows, some.slot_rows)


def test_hot_ranks_are_found_in_each_data_parallel_copy():
    """The rule, run on every rank of two copies, computes in float8 exactly where the marks of the copy's plan say."""
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:4], data=2)
    sizes = np.array([[[[4], [2]]], [[[1], [7]]]], np.int32)  # [copies N G slots]; the means are 3 and 4
    rng = np.random.default_rng(0)
    rows, experts = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((8, 64), (1, 3, 64, 32)))
    scale = jnp.ones(8, jnp.float32)

    def on_rank(sizes):
        out = HOT(rows, [experts], sizes.reshape(1), scale, implementation=None)
        return out.reshape(1, 1, 1, *out.shape)

    spec = PartitionSpec("data", "node", "local")
    outputs = np.asarray(jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec))(sizes))
    for copy in range(2):
        hot = mark_hot_ranks(LayerPlan(sizes[copy], np.arange(2), sizes[copy], None), HOT)
        assert hot.sum() == 1
        for rank in np.ndindex(1, 2):
            function = grouped_mlp_float8 if hot[rank] else grouped_mlp
            np.testing.assert_allclose(
                outputs[copy][rank], function(rows, [experts], sizes[copy][rank], scale), rtol=1e-5
            )


def test_hot_ranks_with_a_plan_of_other_tokens_give_nan():
    plan = plan_of_layer()
    wrong = plan._replace(load=np.roll(plan.load, 1, axis=-1), quota=np.roll(plan.quota, 1, axis=-1))
    assert np.isnan(run(VALUES["x"], wrong, HOT).output).all()


def test_moe_layer_is_traced_without_float8_by_default():
    def trace(expert_mlp):
        layer = functools.partial(run_layer, expert_mlp=expert_mlp)
        return str(jax.make_jaxpr(layer)(VALUES["x"], plan_of_layer()))

    assert "f8_e4m3" in trace(HOT)
    assert "f8_e4m3" not in trace(None)
    assert trace(None) == trace(grouped_mlp)


def test_hot_ranks_have_no_gradient():
    def loss(x):
        return run_layer(x, plan_of_layer(), HOT).output.sum()

    with pytest.raises(ValueError, match=f"^{REFUSAL}\n"):
        jax.eval_shape(jax.grad(loss), VALUES["x"])


@nnx.jit
def first_micro_batch(model, batch, sequences):
    x, replay = jax.tree.map(lambda leaf: leaf[0], sequences)
    return model(x, replay, batch.micro_batch(0), batch.parallel)


@pytest.mark.long
def test_in_float8_rounds_passes_and_refuses_updates():
    """A forward pass of the model in float8 rounds, with replay and live routing; an update of it raises."""
    run = Run()
    replayed = run.prepare()
    sequences = replayed.to_ranks(batches()[0])
    live = run.balancer.prepare(run.model, run.optimizer, None, mask=batches()[0][1].mask)
    for batch in (replayed, live):
        outputs = [
            np.asarray(first_micro_batch(model, batch, sequences))
            for model in (run.model, in_float8(run.model, ALL))
        ]
        error = np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0])
        assert 1e-4 < error < 0.1
        rounded = in_float8(run.model, ALL)
        with pytest.raises(ValueError, match=REFUSAL):
            train_step(rounded, nnx.Optimizer(rounded, OPTIMIZER, wrt=nnx.Param), batch, sequences)
    assert np.isfinite(train_step(run.model, run.optimizer, live, sequences))


def test_hot_ranks_check_their_numbers():
    with pytest.raises(ValueError, match=r"threshold=-1.0 must be at least 0"):
        HotRanks(threshold=-1.0)
    with pytest.raises(ValueError, match=r"min_rows=0 must be an integer of at least 1"):
        HotRanks(threshold=1.0, min_rows=0)
