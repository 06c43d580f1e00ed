"""Tests with randomly corrupted plans: the host rejects them, and a step that still runs is right or NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense import assert_close, mixture
from support.layer import run_layer
from support.plans import load_of, random_ids, random_plan

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import EMPTY, LayerPlan, Plan, Topology, layer_plans
from relibra_jax.execution import ExpertParallel, expert_mesh
from relibra_jax.routing.exchange_rules import PATHS

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2)
RANKS, TOKENS, WIDTH, HIDDEN, TOP_K = 8, 6, 6, 5, 2
HOMES = TOPOLOGY.home_slots
CASES = 400
RNG = np.random.default_rng(7)
X = RNG.normal(size=(RANKS, TOKENS, WIDTH)).astype(np.float32)
GATES = RNG.random((RANKS, TOKENS, TOP_K)).astype(np.float32)
EXPERTS = (RNG.normal(size=(16, 3, WIDTH, HIDDEN)) * 0.4).astype(np.float32)
COTANGENT = RNG.normal(size=X.shape).astype(np.float32)


@functools.cache
def layer_step(path, pieces=1):
    """Return the output and gradients of the layer, with experts in the homes of the model and not of the plan."""
    parallel = ExpertParallel(mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY, path=path, pieces=pieces)

    @jax.jit
    def step(ids, home, plan):
        def loss(x, gates, experts):
            out = run_layer(x, ids, gates, experts, plan, parallel)
            return (out * COTANGENT).sum(), out

        arguments = X, GATES, jnp.asarray(EXPERTS)[home_layout(home, TOPOLOGY)]
        grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*arguments)
        return out, grads

    return step


@jax.jit
def dense_output(ids):
    return mixture(X, ids, GATES, jnp.asarray(EXPERTS))


def place(rng, array):
    """Return a random index into ``array``."""
    return tuple(int(rng.integers(size)) for size in array.shape)


def swapped_home_slots(rng, plan, other):
    n, g, _ = place(rng, plan.slot_expert)
    plan.slot_expert[n, g, [0, 1]] = plan.slot_expert[n, g, [1, 0]]


def slots_of_one_batch_homes_of_another(rng, plan, other):
    plan.home[:] = other.home


def homes_of_one_batch_slots_of_another(rng, plan, other):
    plan.slot_expert[:] = other.slot_expert


def quotas_of_another_batch(rng, plan, other):
    plan.quota[:] = other.quota


def load_of_another_batch(rng, plan, other):
    plan.load[:] = other.load


def an_expert_twice_on_a_rank(rng, plan, other):
    n, g, _ = place(rng, plan.slot_expert)
    slots = plan.slot_expert[n, g]
    slots[HOMES + rng.integers(2)] = rng.choice(slots[slots != EMPTY])


def an_expert_twice_with_its_quota_split(rng, plan, other):
    n, g, _ = place(rng, plan.slot_expert)
    slot, half = int(rng.integers(HOMES)), None
    half = plan.quota[n, g, slot] // 2
    replica = HOMES + int(rng.integers(2))
    quota = plan.quota[n, g, replica]
    at = plan.slot_expert[n, g, replica]
    if at != EMPTY:
        plan.quota.reshape(-1)[np.flatnonzero(plan.slot_expert.reshape(-1) == at)[0]] += quota
    plan.slot_expert[n, g, replica] = plan.slot_expert[n, g, slot]
    plan.quota[n, g, replica], plan.quota[n, g, slot] = half, plan.quota[n, g, slot] - half


def a_quota_on_an_empty_slot(rng, plan, other):
    empty = np.argwhere(plan.slot_expert == EMPTY)
    if len(empty):
        plan.quota[tuple(rng.choice(empty))] = rng.integers(1, 9)


def negative_quotas_whose_sums_hold(rng, plan, other):
    replicas = np.argwhere(plan.slot_expert[..., HOMES:] != EMPTY)
    if len(replicas):
        n, g, r = rng.choice(replicas)
        expert = plan.slot_expert[n, g, HOMES + r]
        home = tuple(np.argwhere(plan.slot_expert[..., :HOMES] == expert)[0])
        surplus = plan.quota[home] + rng.integers(1, 9)
        plan.quota[home] -= surplus
        plan.quota[n, g, HOMES + r] += surplus


def one_quota_changed(rng, plan, other):
    plan.quota[place(rng, plan.quota)] += rng.choice([-3, -1, 1, 2, 50, 2**30])


def an_unknown_expert(rng, plan, other):
    plan.slot_expert[place(rng, plan.slot_expert)] = rng.choice([-2, -100, 16, 2**31 - 1])


def a_home_outside(rng, plan, other):
    plan.home[place(rng, plan.home)] = rng.choice([-1, -100, 16, 2**31 - 1])


def a_replica_from_another_node(rng, plan, other):
    n, g, _ = place(rng, plan.slot_expert)
    plan.slot_expert[n, g, HOMES] = rng.choice(plan.slot_expert[1 - n, :, :HOMES].ravel())


def replicas_out_of_order(rng, plan, other):
    n, g, _ = place(rng, plan.slot_expert)
    for leaf in (plan.slot_expert, plan.quota):
        leaf[n, g, HOMES:] = leaf[n, g, HOMES:][::-1]


def one_load_changed(rng, plan, other):
    plan.load[place(rng, plan.load)] += rng.choice([-1, 1, 7])


def any_value_anywhere(rng, plan, other):
    leaf = plan[rng.integers(4)]
    leaf[place(rng, leaf)] = rng.integers(-(2**31), 2**31)


def two_values_exchanged(rng, plan, other):
    leaf = plan[rng.integers(4)]
    a, b = place(rng, leaf), place(rng, leaf)
    leaf[a], leaf[b] = leaf[b], leaf[a]


CORRUPTIONS = [
    swapped_home_slots,
    slots_of_one_batch_homes_of_another,
    homes_of_one_batch_slots_of_another,
    quotas_of_another_batch,
    load_of_another_batch,
    an_expert_twice_on_a_rank,
    an_expert_twice_with_its_quota_split,
    a_quota_on_an_empty_slot,
    negative_quotas_whose_sums_hold,
    one_quota_changed,
    an_unknown_expert,
    a_home_outside,
    a_replica_from_another_node,
    replicas_out_of_order,
    one_load_changed,
    any_value_anywhere,
    two_values_exchanged,
]


def routed_plan(rng):
    """Make random ids and a valid layer plan for them, whose arrays the test may change."""
    ids = random_ids(rng, (RANKS, TOKENS), TOPOLOGY.num_experts, TOP_K)
    load = load_of(ids[None, None], TOPOLOGY)
    plan = layer_plans(random_plan(rng, load, TOPOLOGY), load)
    return ids, LayerPlan(*(np.array(leaf)[0, 0] for leaf in plan))


def host_error(plan):
    """Return the host's error message for a plan, or None if it accepts the plan."""
    batch = [leaf[None, None] for leaf in plan]
    try:
        check_plan(Plan(batch[0], plan.home[None], batch[2]), batch[3], TOPOLOGY)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        pytest.param("flat", 1, marks=pytest.mark.long),  # hierarchical dispatch has its hop and one more
        pytest.param("hierarchical", 1, marks=pytest.mark.slow),
        pytest.param("hierarchical", 2, marks=pytest.mark.slow),
    ],
)
def test_moe_layer_under_a_corrupted_plan_is_right_or_nan(path, pieces):
    """A corrupted plan gives right results or NaN, and right ones if the host accepts it.

    Only the layer can detect the load of another batch.
    """
    rng, step = np.random.default_rng(0), layer_step(path, pieces)
    wrong, outcomes = [], {"right": 0, "nan": 0}
    for case in range(CASES // 2):
        corrupt = CORRUPTIONS[case % len(CORRUPTIONS)]
        ids, plan = routed_plan(rng)
        home = plan.home.copy()
        corrupt(rng, plan, routed_plan(rng)[1])
        out, grads = jax.device_get(step(ids, home, plan))
        right = np.isclose(out, dense_output(ids), atol=1e-5).all(-1)
        nan = np.isnan(out).all(-1)
        outcomes["right" if right.all() else "nan"] += 1
        if not (right | nan).all() or (
            host_error(plan) and right.all() and corrupt is not replicas_out_of_order
        ):
            wrong.append((case, corrupt.__name__))
        if nan.all():
            assert all(np.isnan(grad).any() for grad in grads), corrupt.__name__
        elif not right.all():
            assert np.isnan(grads[0]).any(), corrupt.__name__
    assert not wrong
    assert min(outcomes.values()) > 5


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_check_plan_rejects_what_is_valid_rejects(corrupt):
    """The host rejects every plan that does not fit its load. A plan for the routing of another batch does fit."""
    rng, count = np.random.default_rng(1), 0
    for _ in range(12):
        _, plan = routed_plan(rng)
        before = [leaf.copy() for leaf in plan]
        corrupt(rng, plan, routed_plan(rng)[1])
        changed = any((a != b).any() for a, b in zip(before, plan, strict=True))
        refusal = host_error(plan)
        count += refusal is not None
        if not changed:
            assert refusal is None
    assert count > 0


def test_moe_layer_under_a_valid_plan_is_right_and_finite():
    rng = np.random.default_rng(2)
    for path in PATHS:
        ids, plan = routed_plan(rng)
        out, grads = layer_step(path)(ids, plan.home, plan)
        assert_close(out, dense_output(ids), 1e-6)
        assert all(np.isfinite(leaf).all() for leaf in grads)
