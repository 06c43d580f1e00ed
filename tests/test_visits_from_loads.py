"""Node visits that are estimated from loads alone, beside those of tokens whose experts are known."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.types import Topology
from relibra_jax.planning.replication import without_replicas
from relibra_jax.planning.visit_estimates import estimate_visits

NODES, EXPERTS = 4, 8
TOPOLOGY = Topology(num_nodes=NODES, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0)


def estimate(chance, tokens=100_000):
    """Return the share of the first node's tokens that visit each node, of tokens that choose experts so often."""
    load = jnp.broadcast_to(
        jnp.round(jnp.asarray(chance) * tokens).astype(jnp.int32), (1, 1, NODES, 1, EXPERTS)
    )
    plan = without_replicas(load.sum((2, 3)), contiguous_homes(TOPOLOGY, 1), TOPOLOGY)
    counts = jnp.full((1, NODES, 1), float(tokens))
    visits = estimate_visits(plan, load, counts, None, TOPOLOGY, even=True)
    return np.asarray(visits)[0, 0, 0] / tokens


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_visits_are_those_of_sets_of_distinct_experts(top_k):
    """The estimate equals an enumeration of all sets of ``top_k`` experts, for experts that are equally popular."""
    sets = list(itertools.combinations(range(EXPERTS), top_k))
    expected = [
        np.mean([any(expert // 2 == node for expert in each) for each in sets]) for node in range(1, NODES)
    ]
    np.testing.assert_allclose(estimate(np.full(EXPERTS, top_k / EXPERTS))[1:], expected, rtol=2e-2)


def test_visits_of_experts_that_all_tokens_choose():
    """Copies that are independent would leave three of ten tokens without a visit."""
    np.testing.assert_allclose(estimate([1, 0, 1, 0, 1, 0, 0, 0]), [1, 1, 1, 0], atol=1e-2)


def test_visits_of_popular_and_rare_experts():
    """Beside sets of two experts drawn with a probability in proportion to the product of their odds."""
    odds = np.array([4, 2, 1, 1, 0.5, 0.5, 0.25, 0.25])
    pairs = np.array(list(itertools.combinations(range(EXPERTS), 2)))
    weight = odds[pairs].prod(1) / odds[pairs].prod(1).sum()
    chance = [weight[(pairs == expert).any(1)].sum() for expert in range(EXPERTS)]
    expected = [weight[(pairs // 2 == node).any(1)].sum() for node in range(NODES)]
    np.testing.assert_allclose(estimate(chance)[1:], expected[1:], rtol=3e-2)


def test_no_token_visits_a_node_without_tokens():
    """Nodes without tokens and experts without load make no visits and no NaN."""
    assert not estimate(np.zeros(EXPERTS))[1:].any()
