"""Crossings of each sample for each node, compared with plain loops, with and without residents."""

import numpy as np
import pytest
from support.plans import random_routing

from relibra_jax.contract.planner import Placement
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.planning import sample_crossings
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.routes import Routes
from relibra_jax.planning.sample_crossings import crossings_by_node

SAMPLES, TOKENS, LAYERS, EXPERTS, TOP_K = 5, 8, 3, 6, 3
TOPOLOGY = Topology(num_nodes=3, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0, resident_slots=1)
RESIDENTS = {
    "no residents": None,
    "residents": np.array([[5, 0, EMPTY], [EMPTY] * 3, [2, 2, 1]]).reshape(3, 3, 1, 1),
}


@pytest.fixture(scope="module")
def case():
    """Make a replay, and homes such that residents are never on the node of their home."""
    rng = np.random.default_rng(0)
    replay = random_routing(rng, samples=SAMPLES, tokens=TOKENS, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    return replay, np.array([[2, 3, 0, 1, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 4, 5, 2, 3]])


def batch_of(replay, routes=None):
    return Batch(load_of_samples(replay), replay.mask.sum(1), routes)


def place(home, resident=None):
    """Make a placement in the topology of this file; None for no residents."""
    without = Placement.without_residents(home, TOPOLOGY)
    return without if resident is None else without._replace(resident=resident)


def load_of_samples(replay):
    load = np.zeros((SAMPLES, LAYERS, EXPERTS), int)
    for b, t in np.argwhere(replay.mask):
        for layer in range(LAYERS):
            load[b, layer, replay.expert_ids[b, t, layer]] += 1
    return load


def count(replay, home, resident, distinct):
    """Count the crossings of tokens or of copies in plain loops, ``[B N N L]``."""
    crossings = np.zeros((SAMPLES, 3, 3, LAYERS))
    for (b, t), node, layer in (
        (place, node, layer)
        for place in np.argwhere(replay.mask)
        for node in range(3)
        for layer in range(LAYERS)
    ):
        leaves = [
            home[layer, expert] // 2
            for expert in replay.expert_ids[b, t, layer]
            if home[layer, expert] // 2 != node and (resident is None or expert not in resident[layer, node])
        ]
        for there in set(leaves) if distinct else leaves:
            crossings[b, node, there, layer] += 1
    return crossings


@pytest.mark.parametrize("resident", RESIDENTS)
@pytest.mark.parametrize("how", ["loads alone", "flat"])
def test_crossings_by_node_counts_copies_that_cross_exactly(case, resident, how):
    """Crossings of copies divided by top-k, averaged over layers, are exact."""
    replay, home = case
    routes = None if how == "loads alone" else all_routes(replay)
    placement = place(home, RESIDENTS[resident])
    result = crossings_by_node(
        batch_of(replay, routes), placement, TOPOLOGY, hierarchical=how != "flat", groups=LAYERS
    )
    expected = count(replay, home, RESIDENTS[resident], False) / TOP_K / LAYERS
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def all_routes(replay, repeated=1):
    sample = np.broadcast_to(np.arange(SAMPLES)[:, None], replay.mask.shape)[replay.mask]
    return Routes(np.repeat(replay.expert_ids[replay.mask], repeated, 0), np.repeat(sample, repeated))


@pytest.mark.parametrize("resident", RESIDENTS)
def test_crossings_by_node_counts_tokens_that_cross(case, resident):
    """If all tokens are sampled many times, the weight of the batch mean is negligible and counts are exact."""
    replay, home = case
    placement, batch = place(home, RESIDENTS[resident]), batch_of(replay, all_routes(replay, 500))
    result = crossings_by_node(batch, placement, TOPOLOGY, hierarchical=True, groups=LAYERS)
    expected = count(replay, home, RESIDENTS[resident], True) / LAYERS
    np.testing.assert_allclose(result, expected, rtol=5e-3, atol=5e-3)


def test_crossings_by_node_counts_more_pairs_of_nodes_than_bits_of_a_word(monkeypatch):
    """Six nodes have 36 pairs, more than a word has bits; counting in parts of a few tokens gives the same sums."""
    topology = Topology(num_nodes=6, ranks_per_node=1, num_experts=6, replica_slots=0)
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(6)[:2] for _ in range(64 * 2)]).reshape(64, 2, 2)
    routes = Routes(ids, np.repeat(np.arange(4), 16))
    home = np.tile(np.arange(6), (2, 1))
    load = (ids.reshape(4, 16, 2, 2)[..., None] == np.arange(6)).sum((1, 3))
    batch, placement = Batch(load, np.full(4, 16), routes), Placement.without_residents(home, topology)
    whole = np.asarray(crossings_by_node(batch, placement, topology, hierarchical=True))
    common = load.sum(0) / 64
    expected = (load + common[None]).sum(1) / 2 * 16 / 17
    for node in range(6):
        others = np.arange(6) != node
        np.testing.assert_allclose(whole[:, node, others, 0], expected[:, others], rtol=1e-5)
        assert (whole[:, node, node] == 0).all()
    monkeypatch.setattr(sample_crossings, "MOST_VISITS", 256)
    parts = crossings_by_node(batch, placement, topology, hierarchical=True)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


def test_crossings_by_node_of_groups_of_layers_add_up(case):
    replay, home = case
    batch = batch_of(replay, all_routes(replay))
    whole, parts = (
        crossings_by_node(batch, place(home), TOPOLOGY, hierarchical=True, groups=groups) for groups in (1, 2)
    )
    np.testing.assert_allclose(np.asarray(parts).sum(-1), np.asarray(whole)[..., 0], rtol=1e-5)


def test_crossings_by_node_follow_the_mean_without_sampled_tokens(case):
    """A sample without sampled tokens crosses like the batch mean, in proportion to its length."""
    replay, home = case
    routes = Routes(replay.expert_ids[0, :4], np.array([0, 0, 1, 1]))
    batch = batch_of(replay, routes)._replace(lengths=np.array([4, 4, 6, 3, 0]))
    result = np.asarray(crossings_by_node(batch, place(home), TOPOLOGY, hierarchical=True))
    np.testing.assert_allclose(result[2], 2 * result[3], rtol=1e-6)
    assert (result[2].sum(1) > 0).all()
    assert (result[4] == 0).all()


def test_crossings_by_node_ignores_sampled_tokens_of_other_samples(case):
    """A stage of two samples has the counts of a batch of these, however many tokens of others were sampled."""
    replay, home = case
    load, length, routes = load_of_samples(replay)[:2], replay.mask.sum(1)[:2], all_routes(replay)
    of_both = routes._replace(sample=np.where(routes.sample < 2, routes.sample, EMPTY))
    alone = Routes(*(leaf[routes.sample < 2] for leaf in routes))
    result, expected = (
        crossings_by_node(Batch(load, length, each), place(home), TOPOLOGY, hierarchical=True)
        for each in (of_both, alone)
    )
    np.testing.assert_allclose(result, expected, rtol=1e-5)
