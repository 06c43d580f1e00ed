"""Hot ranks are marked by the rule, marks do not change the plan, and only marked ranks compute in float8."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import load_of, planned, random_plan
from test_balancer import Run, batches, train_step
from test_moe import RANKS, gates_of, routings, topology_of, weights

import relibra_jax.execution.moe
from pallas_kernels import grouped_mlp
from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import LayerPlan, Topology, layer_plans
from relibra_jax.execution import ExpertParallel, expert_mesh, fetch_replicas, moe_layer, prepare_layer
from relibra_jax.nnx import in_float8
from relibra_jax.routing.hot_ranks import HotRanks, mark_hot_ranks

TOPOLOGY = topology_of("2x4", 0)
VALUES = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights())
IDS = routings()[0]
GATES = gates_of(VALUES, IDS).astype(jnp.float32)
EXACT = ExpertParallel(mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY, path="flat")
ALL = HotRanks(threshold=0.0, min_rows=1)
HOT = HotRanks(threshold=1.0, min_rows=1)


def float8(rule):
    return dataclasses.replace(EXACT, float8=rule)


@functools.cache
def plan_of_layer():
    load = load_of(IDS[None, None], TOPOLOGY)
    return layer_plans(planned("static", TOPOLOGY, load), load).layer(0).layer(0)


def run_layer(x, plan, parallel):
    layer = prepare_layer(IDS, plan, parallel)
    layer_experts, x = fetch_replicas(VALUES["experts"][home_layout(plan.home, TOPOLOGY)], layer, x, parallel)
    return moe_layer(x, IDS, GATES, layer_experts, layer, parallel)


run = jax.jit(run_layer, static_argnames="parallel")
prepare = jax.jit(prepare_layer, static_argnames="parallel")


def gradient(x, parallel):
    return jax.grad(lambda x: run_layer(x, plan_of_layer(), parallel).output.sum())(x)


@given(
    st.lists(st.integers(0, 5000), min_size=24, max_size=24),
    st.floats(0, 3, width=32),
    st.integers(1, 4000),
)
@settings(deadline=None, max_examples=100)
def test_hot_ranks_are_above_the_threshold_and_the_floor(rows, threshold, min_rows):
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
def test_marks_are_of_any_plan_and_change_nothing_of_it(seed):
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


def test_tables_are_the_same_but_for_the_marks():
    exact = prepare(IDS, plan_of_layer(), parallel=EXACT)
    marked = prepare(IDS, plan_of_layer(), parallel=float8(HOT))
    np.testing.assert_array_equal(marked.tokens.float8, mark_hot_ranks(plan_of_layer(), HOT))
    without = marked._replace(tokens=marked.tokens._replace(float8=None))
    assert jax.tree.structure(without) == jax.tree.structure(exact)
    for actual, desired in zip(jax.tree.leaves(without), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(actual, desired)


def test_marked_ranks_compute_in_float8_and_all_others_the_same_bits():
    """Without replicas each copy is computed at home, so a token's output differs if one of its ranks is marked."""
    exact, some = (run(VALUES["x"], plan_of_layer(), parallel) for parallel in (EXACT, float8(HOT)))
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


def test_a_plan_that_is_not_the_tokens_is_nan_in_float8_too():
    plan = plan_of_layer()
    wrong = plan._replace(load=np.roll(plan.load, 1, axis=-1), quota=np.roll(plan.quota, 1, axis=-1))
    assert np.isnan(run(VALUES["x"], wrong, float8(HOT)).output).all()


def test_without_a_rule_the_layer_is_traced_as_if_there_were_no_float8(monkeypatch):
    """The program, forward and backward, is the same as with plain grouped_mlp, primitive by primitive."""

    def trace():
        return str(jax.make_jaxpr(functools.partial(gradient, parallel=EXACT))(VALUES["x"]))

    actual = trace()
    assert "f8_e4m3" not in actual
    assert "f8_e4m3" in str(
        jax.make_jaxpr(run_layer, static_argnums=2)(VALUES["x"], plan_of_layer(), float8(HOT))
    )

    def former(operands, _, implementation):
        return grouped_mlp(*operands, implementation=implementation)

    monkeypatch.setattr(relibra_jax.execution.moe, "_compute_experts", former)
    jax.clear_caches()
    assert trace() == actual


def test_a_layer_with_marks_has_no_gradient():
    refusal = "^grouped_mlp_float8 has no gradient: float8 is for rollout and recompute, not for updates\n"
    with pytest.raises(ValueError, match=refusal):
        jax.eval_shape(functools.partial(gradient, parallel=float8(HOT)), VALUES["x"])


@nnx.jit
def first_micro_batch(model, batch, rows):
    x, replay = jax.tree.map(lambda leaf: leaf[0], rows)
    return model(x, replay, batch.micro_batch(0), batch.parallel)


@pytest.mark.slow
def test_batches_in_float8_are_run_and_refused_by_updates():
    """A forward pass of a marked batch rounds, with replay and live routing, and an update of it raises."""
    run = Run()
    batch = run.prepare()
    rows = batch.to_ranks(batches()[0])
    marked = in_float8(batch, ALL)
    unmarked = run.balancer.prepare(run.model, run.optimizer, None, num_samples=10)
    live = in_float8(unmarked, ALL)
    for rounded in (marked, live):
        exact = batch if rounded is marked else unmarked
        outputs = [np.asarray(first_micro_batch(run.model, each, rows)) for each in (exact, rounded)]
        error = np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0])
        assert 1e-4 < error < 0.1
    for refused in (marked, live):
        with pytest.raises(ValueError, match="updates cannot run in float8, but this batch has float8="):
            train_step(run.model, run.optimizer, refused, rows)
    assert np.isfinite(train_step(run.model, run.optimizer, batch, rows))
    run.prepare(1)
    with pytest.raises(ValueError, match="already moved the experts for batch 2"):
        marked.layers()


@pytest.mark.slow
def test_a_rollout_without_a_batch_is_given_the_rule_as_the_guide_says():
    """Live routing without a prepared batch follows the rule that is set on the balancer's ExpertParallel."""
    run, (x, replay) = Run(), jax.tree.map(lambda leaf: leaf[:8], batches()[0])
    rollout = dataclasses.replace(run.balancer.live, float8=ALL)
    step = nnx.jit(lambda model, parallel: model(x, replay, None, parallel), static_argnums=1)
    exact, rounded = (np.asarray(step(run.model, parallel)) for parallel in (run.balancer.live, rollout))
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.1


def test_copies_of_the_group_have_marks_of_their_own():
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=8, replica_slots=0)
    batch = Run(topology=topology, axes={"data": 2}).prepare()
    marks = np.asarray(in_float8(batch, HOT).layers().tokens.float8)  # [M L copies N G]
    rows = np.asarray(batch.batch_plan.plan.quota).sum(-1)  # micro-batches of a copy are consecutive
    expected = rows > rows.mean((-2, -1), keepdims=True)
    assert expected.any()
    for copy in range(2):
        np.testing.assert_array_equal(marks[:, :, copy], np.split(expected, 2)[copy])


def test_rules_are_checked():
    with pytest.raises(ValueError, match=r"threshold=-1.0 must be at least 0"):
        HotRanks(threshold=-1.0)
    with pytest.raises(ValueError, match=r"min_rows=0 must be an integer of at least 1"):
        HotRanks(threshold=1.0, min_rows=0)
