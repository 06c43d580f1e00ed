"""Assignment of token copies to slots: every slot gets its quota, and few tokens cross."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from support.plans import load_of, random_ids, random_plan

from relibra_jax.contract.types import EMPTY, Topology, layer_plans
from relibra_jax.routing.slots import copy_slots
from relibra_jax.routing.split import source_quota

TOKENS, TOP_K, EXPERTS = 12, 3, 8
MESHES = {2: (2, 2), 4: (4, 1)}


@functools.cache
def topology_of(nodes):
    return Topology(num_nodes=nodes, ranks_per_node=MESHES[nodes][1], num_experts=EXPERTS, replica_slots=4)


@functools.cache
def functions(nodes, across_nodes=True):
    split = jax.jit(functools.partial(source_quota, topology=topology_of(nodes)))
    serve = functools.partial(copy_slots, topology=topology_of(nodes), across_nodes=across_nodes)
    return split, jax.jit(serve)


def routed(seed, nodes, *, across_nodes=True, padding=0.2):
    """Draw the ids of all ranks ``[4, t, K]`` and a random layer plan for them."""
    rng = np.random.default_rng(seed)
    topology = topology_of(nodes)
    ids = random_ids(rng, (topology.num_ranks, TOKENS), EXPERTS, TOP_K, padding)
    load = load_of(ids[None, None], topology)
    plan = random_plan(rng, load, topology, across_nodes=across_nodes)
    return ids, jax.tree.map(np.asarray, layer_plans(plan, load)).layer(0).layer(0)


def visits(copy_nodes, nodes, own):
    """Count the distinct tokens that cross to other nodes."""
    there = (copy_nodes[..., None] == np.arange(nodes)).any(1)
    return int(np.delete(there, own, axis=1).sum())


def in_token_order(ids, quota):
    """Assign copies in the order of tokens to the first node with room; returns their nodes."""
    left, copy_nodes = quota.copy(), np.full(ids.shape, EMPTY)
    for place in zip(*np.nonzero(ids != EMPTY), strict=True):
        copy_nodes[place] = np.flatnonzero(left[ids[place]])[0]
        left[ids[place], copy_nodes[place]] -= 1
    return copy_nodes


def fewest_visits(ids, quota, own):
    """Compute the minimum number of crossings, as a mixed-integer program over the nodes of copies and token visits."""
    nodes, copies = quota.shape[1], np.argwhere(ids != EMPTY)
    expert, going = ids[ids != EMPTY], np.eye(len(copies) * nodes).reshape(-1, len(copies), nodes)
    every = np.concatenate([going.sum(2), *(going[:, expert == e].sum(1) for e in range(len(quota)))], 1).T
    exactly = np.concatenate([np.ones(len(copies)), quota.ravel()])
    visiting = np.zeros((len(copies), nodes, len(ids), nodes))
    for copy, (token, _) in enumerate(copies):
        visiting[copy, range(nodes), token, range(nodes)] = -1
    visiting = visiting.reshape(len(copies) * nodes, -1)
    cost = np.concatenate([np.zeros(len(visiting)), np.tile(np.arange(nodes) != own, len(ids))])
    solution = milp(
        cost,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(
                np.concatenate([every, np.zeros((len(every), visiting.shape[1]))], 1), exactly, exactly
            ),
            LinearConstraint(np.concatenate([np.eye(len(visiting)), visiting], 1), ub=0),
        ],
    )
    assert solution.success
    return round(solution.fun)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(MESHES)))
def test_copy_slots_gives_every_slot_its_quota_of_its_expert(seed, nodes):
    ids, plan = routed(seed, nodes)
    split, serve = functions(nodes)
    sent, slot_experts = np.asarray(split(plan)), plan.slot_expert.ravel()
    for rank, rank_ids in enumerate(ids):
        slot = np.asarray(serve(rank_ids, plan.slot_expert, sent[rank], node=rank // MESHES[nodes][1]))
        np.testing.assert_array_equal(slot == EMPTY, rank_ids == EMPTY)
        np.testing.assert_array_equal(slot_experts[slot[rank_ids != EMPTY]], rank_ids[rank_ids != EMPTY])
        np.testing.assert_array_equal(
            np.bincount(slot[rank_ids != EMPTY], minlength=slot_experts.size), sent[rank].ravel()
        )


def test_copy_slots_has_no_choice_of_nodes_with_intra_node_replicas():
    for seed in range(5):
        ids, plan = routed(seed, 2, across_nodes=False)
        sent = np.asarray(functions(2)[0](plan))
        for rank, rank_ids in enumerate(ids):
            simple, general = (
                functions(2, across)[1](rank_ids, plan.slot_expert, sent[rank], node=rank // 2)
                for across in (False, True)
            )
            np.testing.assert_array_equal(general, simple)


@pytest.mark.parametrize("nodes", sorted(MESHES))
def test_copy_slots_has_crossings_near_the_minimum(nodes):
    """Copies are split at random over all slots of their experts. In total, at most 5% more tokens cross than in
    the optimum, and the excess is at most a quarter of that of assignment in token order."""
    serve = functions(nodes)[1]
    total = dict.fromkeys(("copy_slots", "in order", "fewest"), 0)
    for seed in range(6):
        ids, plan = routed(seed, nodes, padding=0)
        rng = np.random.default_rng(seed)
        for rank, rank_ids in enumerate(ids):
            own, sent = rank // MESHES[nodes][1], np.zeros_like(plan.quota)
            for expert in range(EXPERTS):
                places = plan.slot_expert == expert
                sent[places] = rng.multinomial(
                    (rank_ids == expert).sum(), rng.dirichlet(np.ones(places.sum()))
                )
            quota = np.stack([(sent * (plan.slot_expert == e)).sum((1, 2)) for e in range(EXPERTS)])
            slot = np.asarray(serve(rank_ids, plan.slot_expert, sent, node=own))
            total["copy_slots"] += visits(slot // sent[0].size, nodes, own)
            total["in order"] += visits(in_token_order(rank_ids, quota), nodes, own)
            total["fewest"] += fewest_visits(rank_ids, quota, own)
    assert total["fewest"] <= total["copy_slots"] <= 1.05 * total["fewest"], total
    assert 4 * (total["copy_slots"] - total["fewest"]) <= total["in order"] - total["fewest"], total
