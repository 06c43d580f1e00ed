"""Tests of the planned residents: the greedy choice by saved crossings, and the ranks that get a node's residents."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import random_ids

from relibra_jax.planning.residents import COPY, choose_residents, residents_to_ranks
from relibra_jax.planning.token_bits import token_bits
from relibra_jax.types import EMPTY, TokenSample, Topology

NODES, EXPERTS, LAYERS, TOKENS, TOP_K = 3, 9, 6, 64, 3
TOPOLOGY = Topology(num_nodes=NODES, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0, resident_slots=2)


@pytest.fixture(scope="module")
def case():
    """Tokens ``[TOKENS L K]``, the nodes where they lie, and homes ``[E L]``; each node has tokens, a power of two."""
    rng = np.random.default_rng(0)
    ids = random_ids(rng, (TOKENS, LAYERS), EXPERTS, TOP_K, padding=0)
    lies = np.repeat(np.arange(NODES), [16, 32, 16])
    home_node = np.stack([rng.permutation(EXPERTS) // 3 for _ in range(LAYERS)], 1)
    copies = np.zeros((NODES, EXPERTS, LAYERS))
    np.add.at(copies, (lies[:, None, None], ids, np.arange(LAYERS)[:, None]), NODES / TOKENS)
    # The values differ a little, so that no two experts save equally much.
    copies *= 1 + 1e-3 * rng.random(copies.shape)
    return ids, lies, home_node, copies.astype(np.float32)


def choose(case, *, crossing, push, count, hierarchical):
    ids, lies, home_node, copies = case
    tokens = token_bits(TokenSample(ids, np.zeros(TOKENS, int), lies), TOPOLOGY, num_micro_batches=1)
    return np.asarray(
        choose_residents(
            tokens if hierarchical else None,
            jnp.asarray(copies),
            jnp.asarray(home_node, jnp.int32),
            crossing=crossing,
            push=push,
            count=count,
        )
    )


def choose_one_by_one(case, *, crossing, push, count, hierarchical):
    """For every node and layer, choose the expert that saves most, as long as it saves more than its push costs."""
    ids, lies, home_node, copies = case
    resident = np.zeros((NODES, EXPERTS, LAYERS), bool)
    for node, layer in np.ndindex(NODES, LAYERS):
        home, held = home_node[:, layer], set(np.nonzero(home_node[:, layer] == node)[0].tolist())
        for _ in range(count):
            if len(held) == EXPERTS:
                break
            saved = {expert: copies[node, expert, layer] for expert in set(range(EXPERTS)) - held}
            if hierarchical:
                only = dict.fromkeys(saved, 0)
                for token in ids[lies == node, layer]:
                    away = [int(expert) for expert in token if expert not in held]
                    for expert in away:
                        only[expert] += sum(home[other] == home[expert] for other in away) == 1
                saved = {e: only[e] * NODES / TOKENS + COPY * copies[node, e, layer] for e in saved}
            best = max(saved, key=saved.__getitem__)
            if crossing * saved[best] <= push:
                break
            held.add(best)
            resident[node, best, layer] = True
    return resident


@pytest.mark.parametrize("hierarchical", [True, False], ids=["hierarchical", "flat"])
@pytest.mark.parametrize(("count", "push"), [(1, 0.0), (4, 0.0), (4, 0.35), (9, 0.0), (3, 50.0)])
def test_the_greedy_choice(case, hierarchical, count, push):
    """The cases include more slots than the other nodes have experts, and pushes that cost more than they save."""
    options = {"crossing": 1.0, "push": push, "count": count, "hierarchical": hierarchical}
    actual = choose(case, **options)
    np.testing.assert_array_equal(actual, choose_one_by_one(case, **options))
    assert not actual[case[2], np.arange(EXPERTS)[:, None], np.arange(LAYERS)].any(), "at home in the node"
    number = actual.sum(1)
    assert (number <= count).all()
    if push == 0.35:
        assert number.min() < number.max(), "pushes that do not pay leave slots empty"
    assert actual.any() == (push < 50)


def test_nothing_crosses_where_it_costs_nothing(case):
    assert not choose(case, crossing=0.0, push=0.0, count=2, hierarchical=True).any()


def test_taking_one_expert_out_may_make_another_the_only_reason():
    """All of node 0's tokens use experts 2 and 3, which live together: neither alone saves a crossing."""
    topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    ids = np.tile([[[2, 3]]], (8, 1, 1))
    tokens = token_bits(TokenSample(ids, np.zeros(8, int), np.zeros(8, int)), topology, num_micro_batches=1)
    copies = jnp.zeros((2, 4, 1)).at[0, 2:].set(2.0)
    home_node = jnp.array([[0], [0], [1], [1]])
    actual = choose_residents(tokens, copies, home_node, crossing=1.0, push=0.15, count=2)
    assert np.asarray(actual)[:, :, 0].tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.parametrize("seed", range(4))
def test_each_resident_gets_one_slot_of_its_node(seed):
    """A node's residents fill at most its slots; the heaviest goes first, to the lightest rank with room."""
    rng = np.random.default_rng(seed)
    topology = Topology(
        num_nodes=2, ranks_per_node=3, num_experts=12, replica_slots=0, resident_slots=1 + seed % 3
    )
    home = rng.permutation(12)
    room = 3 * topology.resident_slots
    resident = np.zeros((2, 12), bool)
    for node in range(2):
        away = np.nonzero(home // 6 != node)[0]
        resident[node, rng.permutation(away)[: rng.integers(1, room + 1)]] = True
    load = rng.random((2, 12)).astype(np.float32)
    load[1, resident[1]] *= seed > 0  # residents may have no load
    slots = np.asarray(
        residents_to_ranks(jnp.asarray(resident), jnp.asarray(load), jnp.asarray(home, jnp.int32), topology)
    )
    for node in range(2):
        desired = np.nonzero(resident[node])[0]
        assert sorted(slots[node][slots[node] != EMPTY].tolist()) == desired.tolist()
        total = [load[node, home // 2 == 3 * node + rank].sum() for rank in range(3)]
        used = [0, 0, 0]
        for expert in desired[np.argsort(-load[node, desired], kind="stable")]:
            rank = min((r for r in range(3) if used[r] < topology.resident_slots), key=total.__getitem__)
            assert expert in slots[node, rank]
            total[rank] += load[node, expert]
            used[rank] += 1
