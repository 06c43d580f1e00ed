"""A batch from replay to plan: who holds which sample, and that it does not matter to the gradient."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_jax.plan import check_plan, rank_load
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.planners import plan_batch
from relibra_jax.planning.relibra import keep_homes, relibra
from relibra_jax.planning.replication import without_replicas, replicate_experts
from relibra_jax.replay import expert_load
from relibra_jax.types import EMPTY, Assignment, RoutingReplay, Topology

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
MICRO_BATCHES = 4


@pytest.fixture(scope="module")
def replay():
    """32 samples, each of which likes two experts."""
    rng = np.random.default_rng(0)
    liked = rng.integers(8, size=(32, 1, 1, 8)) < 2
    score = rng.random((32, 12, 2, 8)) + 0.6 * liked
    ids = np.argsort(-score, axis=-1)[..., :2].astype(np.uint8)
    return RoutingReplay(ids, np.arange(12) < rng.integers(4, 13, 32)[:, None])


@pytest.fixture(scope="module")
def planner():
    return relibra(place=functools.partial(place_experts, steps=300))


ASSIGN = functools.partial(assign_samples, key=jax.random.key(0), steps=500)


def test_samples_in_order_unless_told(replay, planner):
    state = planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    assignment, plan, after = plan_batch(replay, planner, state, TOPOLOGY, num_micro_batches=MICRO_BATCHES)
    chex.assert_trees_all_equal(assignment, assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES))
    expected = planner.update(expert_load(replay, assignment, num_experts=8), state, TOPOLOGY)
    chex.assert_trees_all_equal(
        (plan, jax.random.key_data(after.key)), (expected[0], jax.random.key_data(expected[1].key))
    )


def test_assignment_evens_out_what_placement_cannot(replay, planner):
    state = planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    run = functools.partial(plan_batch, replay, planner, state, TOPOLOGY, num_micro_batches=MICRO_BATCHES)
    _, in_order, _ = run()
    assignment, plan, _ = run(assign=ASSIGN)
    load = expert_load(replay, assignment, num_experts=8)
    check_plan(plan, load, TOPOLOGY)
    held = np.asarray(assignment.sample)
    assert sorted(held[held != EMPTY]) == list(range(32))
    assert batch_imbalance(rank_load(plan)) < batch_imbalance(rank_load(in_order))


def test_refining_goes_on_from_given_homes(replay, planner):
    """Nearly without a search, refined homes are at least as balanced as those that they start from."""
    load = expert_load(replay, assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES), num_experts=8)
    state = planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    found, _ = planner.update(load, state, TOPOLOGY)
    short = relibra(place=functools.partial(place_experts, steps=1))
    from_start, from_found = (
        short.update(load, state, TOPOLOGY, refine=homes)[0] for homes in (None, found.home)
    )
    assert batch_imbalance(rank_load(from_found)) <= batch_imbalance(rank_load(found)) + 1e-6
    assert batch_imbalance(rank_load(from_found)) < batch_imbalance(rank_load(from_start))


def test_parts_alone(replay):
    load = expert_load(replay, assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES), num_experts=8)
    balance = {}
    for name, parts in {
        "nothing": {"place": keep_homes, "replicate": without_replicas},
        "reorder": {"place": functools.partial(place_experts, steps=300), "replicate": without_replicas},
        "replicate": {"place": keep_homes, "replicate": replicate_experts},
    }.items():
        part = relibra(**parts)
        plan, _ = part.update(load, part.init(TOPOLOGY, 2, key=jax.random.key(0)), TOPOLOGY)
        check_plan(plan, load, TOPOLOGY)
        balance[name] = float(batch_imbalance(rank_load(plan)))
    assert balance["reorder"] < balance["nothing"]
    assert balance["replicate"] < balance["nothing"]


def loss(params, ids, mask, targets, total):
    """A router over replayed experts, squared error summed over tokens, divided by the tokens of the batch."""
    x = params["embed"][targets % 5]
    gate = jax.nn.softmax(jnp.take_along_axis(x @ params["router"], ids, axis=-1))
    out = jnp.einsum(
        "...k,...kd->...d", gate, jnp.tanh(jnp.einsum("...d,...kde->...ke", x, params["experts"][ids]))
    )
    error = jnp.square(out - targets[..., None] / 7).sum(-1)
    return jnp.where(mask, error, 0).sum() / total


@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=15, deadline=None)
def test_gradient_does_not_depend_on_the_assignment(replay, seed):
    """Any assignment accumulates the same gradient: the condition under which samples may be assigned at all."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": rng.normal(size=(5, 4)),
        "router": rng.normal(size=(4, 8)),
        "experts": rng.normal(size=(8, 4, 4)),
    }
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    targets = jnp.asarray(rng.integers(20, size=replay.mask.shape))
    in_order = assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES)
    shuffled = Assignment(rng.permutation(32)[in_order.sample])

    def accumulate(assignment):
        total = None
        for rows in np.asarray(assignment.sample).reshape(MICRO_BATCHES, -1):
            part = gradient(
                params, replay.expert_ids[rows, :, 0].astype(int), replay.mask[rows], targets[rows], mass
            )
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    gradient, mass = jax.jit(jax.grad(loss)), float(replay.mask.sum())
    chex.assert_trees_all_close(accumulate(shuffled), accumulate(in_order), rtol=1e-4, atol=1e-5)
