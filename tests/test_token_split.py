"""Who serves whom: exact, nearest first, and the tokens that cross to a node counted one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.plan import check_plan
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.eplb import eplb
from relibra_jax.planning.metrics import cross_node_load
from relibra_jax.planning.planners import static
from relibra_jax.replay import expert_load
from relibra_jax.token_split import node_visits, source_quota
from relibra_jax.types import EMPTY, RoutingReplay, Topology

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=2)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(8), (12, 9, 2, 1)), axis=-1, out=None)[..., :3].astype(np.uint8)
    ids = np.where(rng.random((12, 9, 2, 1)) < 0.4, np.array([0, 1, 6], np.uint8), ids)
    mask = np.arange(9) < rng.integers(1, 10, 12)[:, None]
    replay = RoutingReplay(ids, mask)
    assignment = assign_in_order(12, TOPOLOGY, num_micro_batches=2)
    return replay, assignment, expert_load(replay, assignment, num_experts=8)


@pytest.fixture(scope="module", params=["intra-node", "across nodes", "static"])
def plan(request, batch):
    planner = {"intra-node": eplb(), "across nodes": eplb(hierarchical=False), "static": static()}[
        request.param
    ]
    plan, _ = jax.jit(planner.update)(batch[2], planner.init(TOPOLOGY, 2, key=None), TOPOLOGY)
    check_plan(plan, batch[2], TOPOLOGY, intra_node=request.param != "across nodes")
    return plan


def test_every_copy_is_sent_once(plan, batch):
    sent = np.asarray(jax.jit(source_quota)(plan, batch[2], TOPOLOGY))
    assert (sent >= 0).all()
    np.testing.assert_array_equal(sent.sum(2), plan.quota)
    load = np.asarray(batch[2]).reshape(2, 2, 4, 8)
    for expert in range(8):
        served = (sent * (np.asarray(plan.slot_expert) == expert)[:, :, None]).sum((3, 4, 5))
        np.testing.assert_array_equal(served, load[..., expert])


def test_own_rank_then_own_node_come_first(plan, batch):
    """A copy leaves its rank only when the quota there is used up, and its node only when the node's is."""
    sent = np.asarray(jax.jit(source_quota)(plan, batch[2], TOPOLOGY))
    load = np.asarray(batch[2]).reshape(2, 2, 4, 8)
    held = np.asarray(plan.slot_expert)[:, :, None] == np.arange(8).reshape(8, 1, 1, 1)[None, None]
    quota = (held * np.asarray(plan.quota)[:, :, None]).sum(-1).reshape(2, 2, 8, 4)
    for rank in range(4):
        own = sent[:, :, rank, rank // 2, rank % 2][:, :, None] * held[:, :, :, rank // 2, rank % 2]
        np.testing.assert_array_equal(own.sum(-1), np.minimum(load[:, :, rank], quota[..., rank]))
    crossing = sum(sent[:, :, rank, 1 - rank // 2].sum((2, 3)) for rank in range(4))
    np.testing.assert_array_equal(crossing, cross_node_load(plan, batch[2]))


def test_node_visits_by_brute_force(plan, batch):
    """Walk over the tokens of each rank and hand out its quotas copy by copy."""
    replay, assignment, load = batch
    sent = np.asarray(source_quota(plan, load, TOPOLOGY))
    expected = np.zeros((2, 2, 4, 2), int)
    for m, layer, rank in np.ndindex(2, 2, 4):
        slots = np.asarray(plan.slot_expert)[m, layer].ravel()
        left = sent[m, layer, rank].ravel().copy()
        for sample in assignment.sample[m, rank // 2, rank % 2]:
            if sample == EMPTY:
                continue
            for token in np.flatnonzero(replay.mask[sample]):
                nodes = set()
                for expert in replay.expert_ids[sample, token, layer]:
                    slot = next(i for i in range(len(slots)) if slots[i] == expert and left[i])
                    left[slot] -= 1
                    nodes.add(slot // (2 * TOPOLOGY.slots))
                for node in nodes:
                    expected[m, layer, rank, node] += 1
        assert not left.any()
    np.testing.assert_array_equal(node_visits(replay, assignment, plan, TOPOLOGY), expected)


def test_works_under_jit(batch):
    plan, _ = static().update(batch[2], (), TOPOLOGY)
    sent = jax.jit(source_quota)(plan, batch[2], TOPOLOGY)
    assert int(sent.sum()) == int(jnp.sum(batch[2]))
