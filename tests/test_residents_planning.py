"""Residents: the greedy choice, compared with one token by token, and their assignment to ranks."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import random_ids

from relibra_jax.contract.planner import PlacedRoutes
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.planning.residents import MOST_EXPERTS, SHARE, choose_residents, residents_to_ranks
from relibra_jax.planning.token_bits import token_bits

NODES, EXPERTS, LAYERS, TOKENS, TOP_K = 3, 9, 6, 64, 3
TOPOLOGY = Topology(num_nodes=NODES, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0, resident_slots=2)


@pytest.fixture(scope="module")
def case():
    """Make tokens ``[TOKENS L K]``, their nodes, and homes ``[E L]``; every node has a power of two of tokens."""
    rng = np.random.default_rng(0)
    ids = random_ids(rng, (TOKENS, LAYERS), EXPERTS, TOP_K, padding=0)
    token_node = np.repeat(np.arange(NODES), [16, 32, 16])
    home_node = np.stack([rng.permutation(EXPERTS) // 3 for _ in range(LAYERS)], 1)
    copies = np.zeros((NODES, EXPERTS, LAYERS))
    np.add.at(copies, (token_node[:, None, None], ids, np.arange(LAYERS)[:, None]), NODES / TOKENS)
    # Slightly different values, so that no two experts save the same.
    copies *= 1 + 1e-3 * rng.random(copies.shape)
    return ids, token_node, home_node, copies.astype(np.float32)


def choose(case, *, crossing, push, count, hierarchical):
    ids, token_node, home_node, copies = case
    tokens = token_bits(PlacedRoutes(ids, np.zeros(TOKENS, int), token_node), TOPOLOGY, num_micro_batches=1)
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
    """Choose for every node and layer the expert that saves most, as long as it saves more than its push costs.

    A crossing counts less for each further expert that it serves, and less than one between the two nodes between which
    most tokens cross: by the square of how many cross. Of equal savings, the first by home node wins.
    """
    ids, token_node, home_node, copies = case
    resident = np.zeros((NODES, EXPERTS, LAYERS), bool)
    for layer in range(LAYERS):
        home = home_node[:, layer]
        for _ in range(count):
            saved, crossings = np.zeros((NODES, EXPERTS)), np.zeros((NODES, NODES))
            held = resident[:, :, layer] | (home == np.arange(NODES)[:, None])
            if hierarchical:
                for node, token in zip(token_node, ids[:, layer], strict=True):
                    away = [int(expert) for expert in token if not held[node, expert]]
                    for expert in away:
                        served = sum(home[other] == home[expert] for other in away)
                        saved[node, expert] += NODES / TOKENS * SHARE ** (min(served, MOST_EXPERTS) - 1)
                    for other in {int(home[expert]) for expert in away}:
                        crossings[node, other] += NODES / TOKENS
            else:
                saved = np.where(held, 0, copies[:, :, layer])
                np.add.at(crossings.T, home, saved.T)
            saved *= ((crossings / max(crossings.max(), 1e-30)) ** 2)[:, home]
            for node in range(NODES):
                if held[node].all():
                    continue
                best = max(
                    sorted(np.flatnonzero(~held[node]), key=lambda expert: (home[expert], expert)),
                    key=lambda expert: round(saved[node, expert], 6),
                )
                resident[node, best, layer] = crossing * saved[node, best] > push
    return resident


@pytest.mark.parametrize("hierarchical", [True, False], ids=["hierarchical", "flat"])
@pytest.mark.parametrize(("count", "push"), [(1, 0.0), (4, 0.0), (4, 0.35), (9, 0.0), (3, 50.0)])
def test_choose_residents_is_greedy(case, hierarchical, count, push):
    """The cases include more slots than there are remote experts, and pushes that cost more than any saving."""
    options = {"crossing": 1.0, "push": push, "count": count, "hierarchical": hierarchical}
    result = choose(case, **options)
    np.testing.assert_array_equal(result, choose_one_by_one(case, **options))
    assert not result[case[2], np.arange(EXPERTS)[:, None], np.arange(LAYERS)].any(), "at home in the node"
    number = result.sum(1)
    assert (number <= count).all()
    if push == 0.35:
        assert number.min() < number.max(), "pushes that do not pay leave slots empty"
    assert result.any() == (push < 50)


def test_choose_residents_is_empty_if_crossings_cost_nothing(case):
    assert not choose(case, crossing=0.0, push=0.0, count=2, hierarchical=True).any()


def test_choose_residents_takes_both_experts_of_a_crossing():
    """All of node 0's tokens use experts 2 and 3 of one node, so one resident alone saves no crossing."""
    topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    ids = np.tile([[[2, 3]]], (8, 1, 1))
    tokens = token_bits(PlacedRoutes(ids, np.zeros(8, int), np.zeros(8, int)), topology, num_micro_batches=1)
    copies = jnp.zeros((2, 4, 1)).at[0, 2:].set(2.0)
    home_node = jnp.array([[0], [0], [1], [1]])
    result = choose_residents(tokens, copies, home_node, crossing=1.0, push=0.15, count=2)
    assert np.asarray(result)[:, :, 0].tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.parametrize("seed", range(4))
def test_residents_to_ranks_gives_each_resident_one_slot_of_its_node(seed):
    """Residents fill up to all slots, heaviest first, on the lightest rank that has room."""
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
        expected = np.nonzero(resident[node])[0]
        assert sorted(slots[node][slots[node] != EMPTY].tolist()) == expected.tolist()
        total = [load[node, home // 2 == 3 * node + rank].sum() for rank in range(3)]
        used = [0, 0, 0]
        for expert in expected[np.argsort(-load[node, expected], kind="stable")]:
            rank = min((r for r in range(3) if used[r] < topology.resident_slots), key=total.__getitem__)
            assert expert in slots[node, rank]
            total[rank] += load[node, expert]
            used[rank] += 1
