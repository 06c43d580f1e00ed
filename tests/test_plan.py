"""check_plan rejects a violation of every rule of a Plan; the quantities that are derived from a Plan are right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import load_of, random_ids, random_plan

from relibra_jax.contract.check import check_plan, check_slots
from relibra_jax.contract.plan import (
    assemble_plan,
    home_layout,
    node_quota,
    rank_load,
    replica_count,
    replica_experts,
)
from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import EMPTY, Assignment, BatchPlan, LayerPlan, Plan, Topology, layer_plans
from relibra_jax.planning.planners import PLANNERS

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)


@pytest.fixture
def plan():
    """Make a plan with expert e in home slot e, a replica of expert 0 on rank (0, 1), and one of 6 on rank (1, 0)."""
    slot_expert = np.array([[[[[0, 1, EMPTY], [2, 3, 0]], [[4, 5, 6], [6, 7, EMPTY]]]]], np.int32)
    quota = np.array([[[[[30, 10, 0], [10, 10, 20]], [[10, 10, 15], [15, 20, 0]]]]], np.int32)
    return Plan(slot_expert, np.arange(8, dtype=np.int32)[None], quota)


@pytest.fixture
def load():
    by_expert = np.array([50, 10, 10, 10, 10, 10, 30, 20])
    load = np.zeros((1, 1, 2, 2, 8), np.int32)
    load[0, 0, 0, 0], load[0, 0, 1, 1] = by_expert // 2, by_expert - by_expert // 2
    return load


def test_check_plan_accepts_a_valid_plan(plan, load):
    check_plan(plan, load, TOPOLOGY)
    check_plan(jax.tree.map(jnp.asarray, plan), jnp.asarray(load), TOPOLOGY)


def test_plan_quantities_equal_those_counted_by_hand(plan):
    assert rank_load(plan).tolist() == [[[[40, 40], [35, 35]]]]
    assert replica_count(plan, TOPOLOGY).tolist() == [[2]]
    assert replica_experts(plan, TOPOLOGY).ravel().tolist() == [EMPTY, 0, 6, EMPTY]
    layer = LayerPlan(plan.slot_expert[0, 0], plan.home[0], plan.quota[0, 0], None)
    assert node_quota(layer).tolist() == [[50, 10, 10, 10, 0, 0, 0, 0], [0, 0, 0, 0, 10, 10, 30, 20]]


def test_home_layout_inverts_home():
    home = np.random.default_rng(0).permuted(np.tile(np.arange(8), (3, 1)), axis=-1)
    layout = np.asarray(home_layout(home, TOPOLOGY)).reshape(3, 8)
    np.testing.assert_array_equal(np.take_along_axis(layout, home, -1), np.tile(np.arange(8), (3, 1)))


def put(array, place, value):
    changed = np.array(array)
    changed[place] = value
    return changed


RANK = "micro-batch 0, layer 0, node 0, local rank 1"
BROKEN = {
    "home slot holds another expert": (
        lambda p: p._replace(slot_expert=put(p.slot_expert, (0, 0, 0, 1, 0), 5)),
        f"{RANK}, slot 0: the home slot of expert 2 holds 5",
    ),
    "two experts share a home": (
        lambda p: p._replace(home=put(p.home, (0, 3), 2)),
        "layer 0, home slot 2: owned by 2 experts, not by one",
    ),
    "home outside the ranks": (
        lambda p: p._replace(home=put(p.home, (0, 3), 8)),
        "layer 0, expert 3: home slot 8 is outside 0..7",
    ),
    "unknown expert": (
        lambda p: p._replace(slot_expert=put(p.slot_expert, (0, 0, 0, 1, 2), 8)),
        f"{RANK}, slot 2: expert 8 is outside 0..7",
    ),
    "expert twice on a rank": (
        lambda p: p._replace(slot_expert=put(p.slot_expert, (0, 0, 0, 1, 2), 3)),
        f"{RANK}: holds expert 3 twice",
    ),
    "replica on another node": (
        lambda p: p._replace(slot_expert=put(p.slot_expert, (0, 0, 0, 1, 2), 7)),
        f"{RANK}: replica of expert 7, whose home is on node 1",
    ),
    "replica of an expert that is at home there": (
        lambda p: p._replace(slot_expert=put(p.slot_expert, (0, 0, 0, 1, 2), 2)),
        f"{RANK}: holds expert 2 twice",
    ),
    "slots that disagree with homes": (
        lambda p: p._replace(home=p.home[:, [1, 0, *range(2, 8)]]),
        "micro-batch 0, layer 0, node 0, local rank 0, slot 0: the home slot of expert 1 holds 0",
    ),
    "negative quota": (
        lambda p: p._replace(quota=put(p.quota, (0, 0, 0, 1, 1), -1)),
        f"{RANK}, slot 1: quota -1 is negative",
    ),
    "quota on an empty slot": (
        lambda p: p._replace(quota=put(p.quota, (0, 0, 0, 0, 2), 4)),
        "micro-batch 0, layer 0, node 0, local rank 0, slot 2: quota 4 on an empty slot",
    ),
    "a token too few": (
        lambda p: p._replace(quota=put(p.quota, (0, 0, 0, 1, 2), 19)),
        "micro-batch 0, layer 0, expert 0: the quotas sum to 49, but the load is 50",
    ),
    "fractional quota": (
        lambda p: p._replace(quota=p.quota / 1.0),
        "quota: expected integers, found float64",
    ),
    "slots of a different topology": (
        lambda p: p._replace(slot_expert=p.slot_expert[..., :2]),
        r"slot_expert: expected shape \(1, 1, 2, 2, 3\) for Topology.*, found \(1, 1, 2, 2, 2\)",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_check_plan_names_a_broken_rule(plan, load, rule):
    change, message = BROKEN[rule]
    with pytest.raises(ValueError, match=f"^{message}"):
        check_plan(change(plan), load, TOPOLOGY)


ROOMY = Topology(num_nodes=1, ranks_per_node=2, num_experts=8, replica_slots=3)


def with_replicas(*replicas):
    """Return a plan with reversed home slots (expert 0 in slot 7), and ``replicas`` of rank 1's experts on rank 0."""
    homes = np.arange(8)[::-1].reshape(2, 4)
    copies = np.array([replicas, [EMPTY] * 3])
    slot_expert = np.concatenate([homes, copies], -1).reshape(1, 1, 1, 2, 7).astype(np.int32)
    return Plan(slot_expert, np.arange(8, dtype=np.int32)[None, ::-1], np.zeros_like(slot_expert))


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ((1, 2, EMPTY), r"replicas \[1, 2, -1\] have home slots \[6, 5, 8\]"),
        ((EMPTY, 2, 1), r"replicas \[-1, 2, 1\] have home slots \[8, 5, 6\]"),
        ((2, EMPTY, 1), r"replicas \[2, -1, 1\] have home slots \[5, 8, 6\]"),
        ((2, 2, EMPTY), "holds expert 2 twice"),
        ((3, EMPTY, 3), "holds expert 3 twice"),
        ((5, EMPTY, EMPTY), "holds expert 5 twice"),
    ],
)
def test_check_slots_accepts_replicas_only_in_the_canonical_order(replicas, message):
    """Replicas are sorted by home slot, not by expert, with empty slots last; no rank holds an expert twice."""
    where = "micro-batch 0, layer 0, node 0, local rank 0"
    no_load = np.zeros((1, 1, 1, 2, 8), np.int32)
    for check in (
        lambda plan: check_plan(plan, no_load, ROOMY),
        lambda plan: check_plan(plan, no_load, ROOMY, across_nodes=True),
        lambda plan: check_slots(plan, ROOMY),
    ):
        with pytest.raises(ValueError, match=f"^{where}: {message}"):
            check(with_replicas(*replicas))
        for right in ((3, 2, 1), (2, 1, EMPTY), (EMPTY, EMPTY, EMPTY)):
            check(with_replicas(*right))


def test_check_slots_says_what_brings_replicas_in_order():
    with pytest.raises(
        ValueError, match=r"must be sorted by home slot, empty slots last; assemble_plan sorts them$"
    ):
        check_slots(with_replicas(1, 2, 3), ROOMY)


@pytest.mark.parametrize("seed", range(3))
def test_assemble_plan_orders_replicas_together_with_their_quotas(seed):
    rng = np.random.default_rng(seed)
    load = load_of(random_ids(rng, (2, 3, 2, 20), 8, 2), ROOMY)
    plan = random_plan(rng, load, ROOMY)
    order = rng.permuted(np.tile(np.arange(3), (*plan.quota.shape[:-1], 1)), axis=-1)
    experts = np.take_along_axis(plan.slot_expert[..., 4:], order, -1)
    layer = np.arange(3).reshape(3, 1, 1, 1)
    replica = np.where(experts == EMPTY, EMPTY, plan.home[layer, experts])
    copied = np.take_along_axis(plan.quota[..., 4:], order, -1)
    quota = np.concatenate([plan.quota[..., :4], copied], -1)
    for actual, expected in zip(assemble_plan(plan.home, replica, quota, ROOMY), plan, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_check_plan_lets_replicas_cross_nodes_when_allowed(plan, load):
    crossing = plan._replace(
        slot_expert=put(put(plan.slot_expert, (0, 0, 0, 0, 2), 7), (0, 0, 0, 1, 2), 0),
        quota=put(put(plan.quota, (0, 0, 0, 0, 2), 5), (0, 0, 1, 1, 1), 15),
    )
    with pytest.raises(ValueError, match="replica of expert 7"):
        check_plan(crossing, load, TOPOLOGY)
    check_plan(crossing, load, TOPOLOGY, across_nodes=True)


def test_check_plan_rejects_a_load_of_another_shape(plan, load):
    with pytest.raises(
        ValueError, match=r"load: expected integers \[M, L, 2, 2, 8\], found int32\[1, 1, 2, 2, 7\]"
    ):
        check_plan(plan, load[..., :7], TOPOLOGY)


def test_check_plan_rejects_a_load_of_another_batch(plan, load):
    with pytest.raises(
        ValueError, match=r"load has \(2, 1\) micro-batches and layers, but the plan has \(1, 1\)"
    ):
        check_plan(plan, np.concatenate([load, load]), TOPOLOGY)


def a_batch(leaves=np.asarray):
    """Make a batch of two micro-batches of three layers, in which every number is different."""
    shape = (2, 3, TOPOLOGY.num_nodes, TOPOLOGY.ranks_per_node)
    count = iter(range(100_000))

    def numbers(*shape):
        return np.array([next(count) for _ in range(np.prod(shape))], np.int32).reshape(shape)

    plan = Plan(numbers(*shape, 3), numbers(3, 8), numbers(*shape, 3))
    batch = BatchPlan(Assignment(numbers(2, 2, 2, 1)), numbers(*shape, 8), plan)
    return jax.tree.map(leaves, batch)


@pytest.mark.parametrize(("leaves", "kind"), [(np.asarray, np.ndarray), (jnp.asarray, jax.Array)])
def test_batch_plan_gives_the_plans_of_micro_batches_and_layers(leaves, kind):
    batch = a_batch(leaves)
    stacked = batch.layer_plans()
    assert {name: leaf.shape for name, leaf in stacked._asdict().items()} == {
        "slot_expert": (2, 3, 2, 2, 3),
        "home": (2, 3, 8),
        "quota": (2, 3, 2, 2, 3),
        "load": (2, 3, 2, 2, 8),
    }
    for m, layer in np.ndindex(2, 3):
        expected = LayerPlan(
            batch.plan.slot_expert[m, layer],
            batch.plan.home[layer],
            batch.plan.quota[m, layer],
            batch.load[m, layer],
        )
        for actual in (
            stacked.layer(m).layer(layer),
            batch.micro_batch(m).layer(layer),
            stacked.layer((m, layer)),
        ):
            assert type(actual) is LayerPlan
            assert all(isinstance(leaf, kind) for leaf in actual)
            for leaf, right in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(leaf, right)
    for each in (stacked, batch.micro_batch(1), stacked.layer(1)):
        assert all(isinstance(leaf, kind) for leaf in each)
    for actual, right in zip(layer_plans(batch.plan, batch.load), stacked, strict=True):
        np.testing.assert_array_equal(actual, right)


def test_layer_plans_of_a_plan_without_a_load_have_none():
    batch = a_batch()
    layer = layer_plans(batch.plan, None).layer(1).layer(2)
    assert layer.load is None
    np.testing.assert_array_equal(layer.quota, batch.plan.quota[1, 2])
    np.testing.assert_array_equal(layer.home, batch.plan.home[2])


def test_batch_plan_micro_batches_are_taken_under_jit_and_scan():
    """Layer plans can be taken with a traced index, and layer by layer in a scan."""
    batch = a_batch()
    taken = jax.jit(lambda batch, m: batch.micro_batch(m).layer(2))(batch, 1)
    _, scanned = jax.jit(
        lambda plans: jax.lax.scan(
            lambda _, micro: jax.lax.scan(lambda _, p: (None, p), None, micro), None, plans
        )
    )(batch.layer_plans())
    for actual in (taken, scanned.layer(1).layer(2)):
        for leaf, right in zip(actual, batch.micro_batch(1).layer(2), strict=True):
            np.testing.assert_array_equal(leaf, right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda load: load - 6,
            "micro-batch 0, layer 0, node 0, local rank 0, expert 1: load -1 is negative",
        ),
        (
            lambda load: load.astype(np.int64) + 2**27,
            r"micro-batch 0, layer 0: \d+ token copies must be fewer than 2\*\*31",
        ),
        (lambda load: load / 2, r"load: expected integers \[M, L, 2, 2, 8\], found float64\[1, 1, 2, 2, 8\]"),
        (lambda load: load[:, :, :1], r"found int32\[1, 1, 1, 2, 8\]"),
    ],
)
def test_planner_rejects_an_invalid_load(load, change, message):
    planners = (row.planner for row in PLANNERS.values())
    for planner in planners:
        with pytest.raises(ValueError, match=message):
            planner.update(
                PlanRequest(change(load)), planner.init(TOPOLOGY, 1, key=jax.random.key(0)), TOPOLOGY
            )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2, 8, 1), "num_nodes=0 must be an integer of at least 1 and at most 2147483647"),
        ((2, 2, 2**31, 0), "num_experts=2147483648 must be an integer of at least 1 and at most 2147483647"),
        ((2, 2, 8, True), "replica_slots=True must be an integer of at least 0"),
        ((2, 3, 8, 1), "num_experts=8 must divide evenly over 6 ranks (2 nodes x 3)"),
        (
            (2, 2, 8, 2**29 - 2),
            "4 ranks x (2 home slots + resident_slots=0 + replica_slots=536870910) are more than the 2147483647"
            " slots that int32 can number",
        ),
    ],
)
def test_topology_rejects_sizes_that_are_none(sizes, message):
    names = ("num_nodes", "ranks_per_node", "num_experts", "replica_slots")
    with pytest.raises(ValueError, match=re.escape(message)):
        Topology(**dict(zip(names, sizes, strict=True)))


def test_topology_takes_as_many_slots_as_int32_can_number():
    assert Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=2**29 - 3).slots == 2**29 - 1
