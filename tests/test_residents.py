"""Tests of residents in plans: every broken rule is rejected, and replicas are fetched from the right slots."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import load_of, random_ids, random_plan

from relibra_jax.contract.check import check_plan, check_slots
from relibra_jax.contract.plan import assemble_plan, copy_source, rank_load, replica_count, resident_experts
from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import EMPTY, LayerPlan, Plan, Price, Topology, layer_plans
from relibra_jax.cost.copies import fetch_time
from relibra_jax.execution.plan_guard import is_valid
from relibra_jax.planning.metrics import cross_node_load, replication_bound
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.routing.sizes import export_count
from relibra_jax.routing.split import refit_quota

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1, resident_slots=2)


@pytest.fixture
def plan():
    """Make two micro-batches of one layer, expert e at home in slot e. A rank has 2 homes, 2 residents, 1 replica.

    Residents: 6 on rank (0, 1), 1 and 7 on (1, 0), 0 on (1, 1). Replicas: in micro-batch 0 expert 1 on (0, 1) from its
    home and 0 on (1, 0) from the resident beside it, in micro-batch 1 expert 4 on (1, 1) from its home.
    """
    first = [
        [[0, 1, EMPTY, EMPTY, EMPTY], [2, 3, 6, EMPTY, 1]],
        [[4, 5, 1, 7, 0], [6, 7, 0, EMPTY, EMPTY]],
    ]
    second = [
        [[0, 1, EMPTY, EMPTY, EMPTY], [2, 3, 6, EMPTY, EMPTY]],
        [[4, 5, 1, 7, EMPTY], [6, 7, 0, EMPTY, 4]],
    ]
    slot_expert = np.array([[first], [second]], np.int32)
    quota = np.where(slot_expert == EMPTY, 0, 10 + np.arange(5)).astype(np.int32)
    return Plan(slot_expert, np.arange(8, dtype=np.int32)[None], quota)


@pytest.fixture
def load(plan):
    """Return the load of the plan, with all tokens on rank (1, 0)."""
    load = np.zeros((2, 1, 2, 2, 8), np.int32)
    for m in range(2):
        filled = plan.slot_expert[m, 0] != EMPTY
        np.add.at(load[m, 0, 1, 0], plan.slot_expert[m, 0][filled], plan.quota[m, 0][filled])
    return load


def test_check_plan_accepts_residents(plan, load):
    """Residents may be on any node, also that of the home, and allow replicas on their node without across_nodes."""
    check_plan(plan, load, TOPOLOGY)
    check_plan(jax.tree.map(jnp.asarray, plan), jnp.asarray(load), TOPOLOGY)
    assert resident_experts(plan, TOPOLOGY).tolist() == [[[[EMPTY, EMPTY], [6, EMPTY]], [[1, 7], [0, EMPTY]]]]
    assert replica_count(plan, TOPOLOGY).tolist() == [[2], [1]]


def put(plan, place, experts):
    changed = plan.slot_expert.copy()
    changed[place] = experts
    return plan._replace(slot_expert=changed)


ALL = slice(None)
BROKEN = {
    "another resident in another micro-batch": (
        lambda p: put(p, (1, 0, 1, 1, 2), 3),
        "micro-batch 1, layer 0, node 1, local rank 1, slot 2: the resident slot holds 3, but 0 in micro-batch 0",
    ),
    "no resident in another micro-batch": (
        lambda p: put(p, (1, 0, 0, 1, 2), EMPTY),
        "micro-batch 1, layer 0, node 0, local rank 1, slot 2: the resident slot holds -1, but 6 in micro-batch 0",
    ),
    "unknown expert": (
        lambda p: put(p, (ALL, 0, 1, 1, 2), 8),
        r"micro-batch 0, layer 0, node 1, local rank 1, slot 2: expert 8 is outside 0\.\.7",
    ),
    "resident beside its home": (
        lambda p: put(p, (ALL, 0, 1, 1, 2), 6),
        "micro-batch 0, layer 0, node 1, local rank 1: holds expert 6 twice",
    ),
    "a resident twice": (
        lambda p: put(p, (ALL, 0, 1, 0, slice(2, 4)), [1, 1]),
        "micro-batch 0, layer 0, node 1, local rank 0: holds expert 1 twice",
    ),
    "replica beside its resident": (
        lambda p: put(p, (1, 0, 1, 1, 4), 0),
        "micro-batch 1, layer 0, node 1, local rank 1: holds expert 0 twice",
    ),
    "residents out of order": (
        lambda p: put(p, (ALL, 0, 1, 0, slice(2, 4)), [7, 1]),
        r"micro-batch 0, layer 0, node 1, local rank 0: residents \[7, 1\] have home slots \[7, 1\], "
        r"but must be sorted by home slot, empty slots last; assemble_plan sorts them",
    ),
    "an empty slot before a resident": (
        lambda p: put(p, (ALL, 0, 1, 1, slice(2, 4)), [EMPTY, 0]),
        r"micro-batch 0, layer 0, node 1, local rank 1: residents \[-1, 0\] have home slots \[8, 0\]",
    ),
    "replica in a node that does not hold its expert": (
        lambda p: put(p, (1, 0, 1, 1, 4), 2),
        "micro-batch 1, layer 0, node 1, local rank 1: replica of expert 2, whose home is on node 0 and which is no"
        " resident of node 1; replicas in nodes that do not hold their expert need across_nodes=True",
    ),
    "replica beside a resident of the other node": (
        lambda p: put(p, (1, 0, 0, 0, 4), 7),
        "micro-batch 1, layer 0, node 0, local rank 0: replica of expert 7, whose home is on node 1 and which is no"
        " resident of node 0",
    ),
    "quota on an empty resident slot": (
        lambda p: p._replace(quota=p.quota + (np.arange(5) == 3)),
        "micro-batch 0, layer 0, node 0, local rank 0, slot 3: quota 1 on an empty slot",
    ),
    "quota of a resident that the load does not know": (
        lambda p: p._replace(quota=p.quota + 3 * (p.slot_expert == 0) * (np.arange(5) == 2)),
        "micro-batch 0, layer 0, expert 0: the quotas sum to 39, but the load is 36",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_check_plan_names_a_broken_rule_of_residents(plan, load, rule):
    change, message = BROKEN[rule]
    with pytest.raises(ValueError, match=f"^{message}"):
        check_plan(change(plan), load, TOPOLOGY)


def test_check_plan_lets_residents_cross_nodes(plan):
    """Only replicas need across_nodes: a replica on a node without its expert is valid only with across_nodes."""
    far = put(plan, (1, 0, 1, 1, 4), 2)
    check_slots(far, TOPOLOGY, across_nodes=True)
    check_slots(put(far, (ALL, 0, 1, 0, slice(2, 4)), [1, 2]), TOPOLOGY)


@functools.cache
def layer_check(across_nodes):
    """Return the jitted check of a plan ``[M, L]`` inside the layer."""
    valid = functools.partial(is_valid, topology=TOPOLOGY, across_nodes=across_nodes)
    return jax.jit(jax.vmap(jax.vmap(valid)))


def layer_accepts(plan, load, across_nodes):
    return bool(layer_check(across_nodes)(layer_plans(plan, load)).all())


SINGLE_LAYER_RULES = [rule for rule in BROKEN if "in another micro-batch" not in rule]


@pytest.mark.parametrize("rule", SINGLE_LAYER_RULES)
def test_is_valid_detects_a_broken_rule_of_residents(plan, load, rule):
    """The check inside the layer detects a broken rule. Cases with a wrong slot have no load, so all sums are right."""
    assert layer_accepts(plan, load, False)
    if not rule.startswith("quota"):
        plan, load = plan._replace(quota=np.zeros_like(plan.quota)), np.zeros_like(load)
    assert layer_accepts(plan, load, False)
    assert not layer_accepts(BROKEN[rule][0](plan), load, False)


@pytest.mark.parametrize("across_nodes", [False, True])
def test_is_valid_agrees_with_check_plan(across_nodes):
    """For random plans with one changed slot, host and layer either both reject or both accept."""
    rng, outcomes = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(150):
        load = np.zeros((1, 1, 2, 2, 8), np.int32)
        plan = random_plan(rng, load, TOPOLOGY, across_nodes=across_nodes)
        slot = (0, 0, *(int(rng.integers(2)) for _ in range(2)), int(rng.integers(2, 5)))
        changed = put(plan, slot, rng.integers(-1, 8))
        try:
            check_plan(changed, load, TOPOLOGY, across_nodes=across_nodes)
            accepted = True
        except ValueError:
            accepted = False
        assert layer_accepts(changed, load, across_nodes) == accepted
        outcomes[accepted] += 1
    assert min(outcomes.values()) > 20


def test_copy_source_prefers_residents_in_the_node():
    """A replica comes from the home if it is on the node, else from the node's first resident, else from the far home.

    Each rank has a home slot, a resident slot and a replica slot.
    """
    topology = Topology(num_nodes=2, ranks_per_node=3, num_experts=6, replica_slots=1, resident_slots=1)
    slots = [
        # 2 has its home on this node, and a resident in an earlier slot.
        [
            [0, EMPTY, 2],
            [1, 2, 0],
            [2, EMPTY, EMPTY],
        ],
        # 0 has two residents, 1 is not on this node.
        [[3, EMPTY, 0], [4, 0, 1], [5, 0, EMPTY]],
    ]
    plan = LayerPlan(np.array(slots), np.arange(6), np.zeros((2, 3, 3), int), None)
    assert copy_source(plan, topology).tolist() == [[[4], [0], [EMPTY]], [[9], [2], [EMPTY]]]
    assert export_count(plan, topology).tolist() == [1, 1, 1, 0, 1, 0]


def test_fetch_time_of_a_resident_is_over_the_fast_network(plan):
    """Rank (1, 1) sends its resident of expert 0 to its neighbour, so that the home on rank (0, 0) does not send it."""
    nothing = dict.fromkeys(("token", "copy", "crossing", "spread", "move", "push"), 0.0)
    cost = Price(**nothing, fetch=1.0, fetch_across=10.0)
    actual = fetch_time(layer_plans(plan, None), TOPOLOGY, cost)
    np.testing.assert_allclose(actual[0, 0], [[1, 1], [1, 1]], rtol=1e-6)
    np.testing.assert_allclose(actual[1, 0], [[0, 0], [1, 1]], rtol=1e-6)


def test_refit_quota_uses_residents(plan, load):
    """Refitted quotas keep the plan's shares, also of residents. An expert without a share is computed at home."""
    layer = layer_plans(plan, load).layer((0, 0))
    no_share = layer._replace(quota=np.where(layer.slot_expert == 7, 0, layer.quota))
    live = np.zeros((2, 2, 8), np.int32)
    live[0, 1, 0], live[1, 1, 7] = 360, 11
    quota = np.asarray(refit_quota(no_share, live, TOPOLOGY).quota)
    assert quota.sum() == 371
    # The plan's shares are 10, 12 and 14 of 36 at home, at the resident and at the replica.
    assert (quota[0, 0, 0], quota[1, 1, 2], quota[1, 0, 4]) == (100, 120, 140)
    assert (quota[1, 1, 1], quota[1, 0, 3]) == (11, 0)


def test_node_visits_are_fewer_with_residents(plan, load):
    """With all tokens on node 1, exactly the copies that node 0 computes cross."""
    crossing = [[plan.quota[m, 0, 0].sum()] for m in range(2)]
    assert cross_node_load(layer_plans(plan, load)).tolist() == crossing


def test_replication_bound_counts_residents_across_nodes():
    """Half of a hot expert's load on another node is below the mean of the node that owns it."""
    topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0, resident_slots=1)
    slots, quota = np.array([[[[[0, EMPTY]], [[1, 0]]]]]), np.array([[[[[50, 0]], [[0, 50]]]]])
    plan, load = Plan(slots, np.array([[0, 1]]), quota), np.array([[[[[100, 0]], [[0, 0]]]]])
    check_plan(plan, load, topology)
    top = int(rank_load(plan).max())
    assert replication_bound(load, plan.home, topology).tolist() == [[top]] == [[50]]
    no_residents = dataclasses.replace(topology, resident_slots=0)
    assert replication_bound(load, plan.home, no_residents).tolist() == [[100]]


@pytest.mark.parametrize("seed", range(3))
def test_assemble_plan_keeps_order_and_quotas(seed):
    rng = np.random.default_rng(seed)
    load = load_of(random_ids(rng, (2, 3, 4, 20), 8, 2), TOPOLOGY)
    plan = random_plan(rng, load, TOPOLOGY)
    check_plan(plan, load, TOPOLOGY)
    # Residents are given once per batch and in a different order than in a plan; their quotas move with them.
    slots = plan.slot_expert.copy()
    slots[..., 2:4], quota = slots[..., 3:1:-1], plan.quota.copy()
    quota[..., 2:4] = quota[..., 3:1:-1]
    home_of = np.where(slots == EMPTY, EMPTY, plan.home[np.arange(3).reshape(3, 1, 1, 1), slots])
    actual = assemble_plan(plan.home, home_of[..., 4:], quota, TOPOLOGY, resident=home_of[0, ..., 2:4])
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, actual), plan)


@pytest.mark.parametrize("name", ["static", "eplb", "lplb"])
def test_planners_without_residents_leave_their_slots_empty(name):
    """Their plans are those of the topology without resident slots, with these slots empty."""
    planner, narrow = PLANNERS[name].planner, dataclasses.replace(TOPOLOGY, resident_slots=0)
    load = np.random.default_rng(0).zipf(1.4, (2, 1, 2, 2, 8)).clip(0, 900).astype(np.int32)
    plans = [
        planner.update(PlanRequest(load), planner.init(topology, 1, key=jax.random.key(0)), topology)[0]
        for topology in (TOPOLOGY, narrow)
    ]
    check_plan(plans[0], load, TOPOLOGY, across_nodes=PLANNERS[name].across_nodes)
    assert (np.asarray(resident_experts(plans[0], TOPOLOGY)) == EMPTY).all()
    without = Plan(
        *(np.delete(leaf, (2, 3), -1) if leaf.ndim == 5 else leaf for leaf in map(np.asarray, plans[0]))
    )
    chex.assert_trees_all_equal(without, jax.tree.map(np.asarray, plans[1]))


@pytest.mark.parametrize("count", [-1, True])
def test_topology_rejects_numbers_of_resident_slots(count):
    with pytest.raises(ValueError, match=f"resident_slots={count} must be an integer of at least 0"):
        dataclasses.replace(TOPOLOGY, resident_slots=count)
