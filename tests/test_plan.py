"""The judge: every rule of a Plan, broken on purpose; and what is derived from a Plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.plan import check_plan, home_layout, node_quota, rank_load, replica_count, replica_experts
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.types import EMPTY, Plan, Topology

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)


@pytest.fixture
def plan():
    """Expert e at home in slot e; rank (0, 1) also holds expert 0, rank (1, 0) expert 6."""
    slot_expert = np.array([[[[[0, 1, EMPTY], [2, 3, 0]], [[4, 5, 6], [6, 7, EMPTY]]]]], np.int32)
    quota = np.array([[[[[30, 10, 0], [10, 10, 20]], [[10, 10, 15], [15, 20, 0]]]]], np.int32)
    return Plan(slot_expert, np.arange(8, dtype=np.int32)[None], quota)


@pytest.fixture
def load():
    by_expert = np.array([50, 10, 10, 10, 10, 10, 30, 20])
    load = np.zeros((1, 1, 2, 2, 8), np.int32)
    load[0, 0, 0, 0], load[0, 0, 1, 1] = by_expert // 2, by_expert - by_expert // 2
    return load


def test_valid(plan, load):
    check_plan(plan, load, TOPOLOGY)
    check_plan(jax.tree.map(jnp.asarray, plan), jnp.asarray(load), TOPOLOGY)


def test_derived(plan):
    assert rank_load(plan).tolist() == [[[[40, 40], [35, 35]]]]
    assert replica_count(plan).tolist() == [[2]]
    assert replica_experts(plan).ravel().tolist() == [EMPTY, 0, 6, EMPTY]
    assert node_quota(plan)[0, 0].tolist() == [[50, 10, 10, 10, 0, 0, 0, 0], [0, 0, 0, 0, 10, 10, 30, 20]]


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
        f"{RANK}, slot 0: home slot of expert 2 holds 5",
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
        "micro-batch 0, layer 0, expert 0: quotas sum to 49, load is 50",
    ),
    "fractional quota": (
        lambda p: p._replace(quota=p.quota / 1.0),
        "quota: expected integers, found float64",
    ),
    "slots of another topology": (
        lambda p: p._replace(slot_expert=p.slot_expert[..., :2]),
        r"slot_expert: expected shape \(1, 1, 2, 2, 3\) for Topology.*, found \(1, 1, 2, 2, 2\)",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rule_is_named(plan, load, rule):
    change, message = BROKEN[rule]
    with pytest.raises(ValueError, match=f"^{message}"):
        check_plan(change(plan), load, TOPOLOGY)


def test_replicas_may_cross_nodes_when_allowed(plan, load):
    crossing = plan._replace(
        slot_expert=put(put(plan.slot_expert, (0, 0, 0, 0, 2), 7), (0, 0, 0, 1, 2), 0),
        quota=put(put(plan.quota, (0, 0, 0, 0, 2), 5), (0, 0, 1, 1, 1), 15),
    )
    with pytest.raises(ValueError, match="replica of expert 7"):
        check_plan(crossing, load, TOPOLOGY)
    check_plan(crossing, load, TOPOLOGY, intra_node=False)


def test_load_of_another_shape(plan, load):
    with pytest.raises(
        ValueError, match=r"load: expected integers \[M, L, 2, 2, 8\], found int32\[1, 1, 2, 2, 7\]"
    ):
        check_plan(plan, load[..., :7], TOPOLOGY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda load: load - 6,
            "micro-batch 0, layer 0, node 0, local rank 0, expert 1: load -1 is negative",
        ),
        (
            lambda load: load.astype(np.int64) + 2**27,
            r"micro-batch 0, layer 0: \d+ token copies, 2\*\*31 is too many",
        ),
        (lambda load: load / 2, r"load: expected integers \[M, L, 2, 2, 8\], found float64\[1, 1, 2, 2, 8\]"),
        (lambda load: load[:, :, :1], r"found int32\[1, 1, 1, 2, 8\]"),
    ],
)
def test_loads_that_no_planner_takes(load, change, message):
    planners = (row.planner for row in PLANNERS.values())
    for planner in planners:
        with pytest.raises(ValueError, match=message):
            planner.update(change(load), planner.init(TOPOLOGY, 1, key=jax.random.key(0)), TOPOLOGY)
