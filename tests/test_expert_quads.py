"""Quads of experts that tokens choose together: how they are found, and that they are placed as a whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_jax.contract.planner import PlacedRoutes
from relibra_jax.contract.types import Topology
from relibra_jax.planning.expert_quads import has_quads, order_by_quad, search_quads
from relibra_jax.planning.node_placement import RelativePrices, place_on_nodes
from relibra_jax.planning.node_search import NodeProblem, move_times, node_objective, search_nodes
from relibra_jax.planning.token_bits import TokenBits, token_bits

NODES, EXPERTS, LAYERS, TOKENS = 4, 32, 3, 1024
TOPOLOGY = Topology(num_nodes=NODES, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0)
SIZES = {"top_k": 4, "steps": 400}


def quads(seed=0):
    """Return routes whose tokens choose one of four sets of four experts, and the sets of each layer ``[L 4 4]``."""
    rng = np.random.default_rng(seed)
    sets = np.stack([rng.permutation(EXPERTS)[:16].reshape(4, 4) for _ in range(LAYERS)])
    chosen = rng.integers(4, size=(TOKENS, LAYERS))
    return sets[np.arange(LAYERS), chosen], sets


def placed(ids):
    return PlacedRoutes(ids, np.zeros(TOKENS, int), np.arange(TOKENS) % NODES)


def problem_of(ids, start, *, crossing, move):
    tokens = token_bits(placed(ids), TOPOLOGY, num_micro_batches=1)
    count = np.stack([np.bincount(ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)], -1)
    share = jnp.asarray(count[:, None] * NODES / (TOKENS * 4), jnp.float32)
    offset = jnp.zeros((NODES, 1, LAYERS))
    return NodeProblem(share, offset, tokens, jnp.float32(crossing), move_times(start, move, num_nodes=NODES))


def starts_together(sets):
    """Return nodes of experts with all four sets on two nodes."""
    start = np.zeros((EXPERTS, LAYERS), np.int32)
    for layer, each in enumerate(sets):
        others = np.setdiff1d(np.arange(EXPERTS), each)
        start[np.concatenate([each[:2].ravel(), each[2:].ravel(), others]), layer] = np.arange(EXPERTS) // 8
    return jnp.asarray(start)


def test_quads_are_the_sets_that_tokens_choose():
    ids, sets = quads()
    order = np.asarray(order_by_quad(token_bits(placed(ids), TOPOLOGY, num_micro_batches=1)))
    for layer in range(LAYERS):
        found = {frozenset(each) for each in order[:, layer].reshape(-1, 4).tolist()}
        assert {frozenset(each) for each in sets[layer].tolist()} <= found


@settings(max_examples=20)
@given(seed=st.integers(0, 999), experts=st.sampled_from([4, 8, 24]), used=st.integers(0, 8))
def test_quads_hold_every_expert_once(seed, experts, used):
    """Experts that no token uses have quads, too."""
    bits = np.random.default_rng(seed).integers(2**32, size=(experts, 2, 1, 4, 3), dtype=np.uint32)
    bits[used:] = 0
    order = np.asarray(order_by_quad(TokenBits(jnp.asarray(bits), jnp.full((2, 1), 1 / 128))))
    np.testing.assert_array_equal(np.sort(order, axis=0), np.arange(experts)[:, None] * [1, 1, 1])


def test_a_quad_moves_where_no_single_expert_would():
    """With all four sets on two nodes, two of them belong on the other nodes; a single expert's move adds crossings."""
    ids, sets = quads()
    start = starts_together(sets)
    problem = problem_of(ids, start, crossing=8.0, move=0.001)
    alone = search_nodes(problem, start, jax.random.key(0), hottest=1e-6, **SIZES)
    whole = search_quads(problem, start, jax.random.key(0), **SIZES)
    time = [np.asarray(node_objective(problem, node, top_k=4)) for node in (start, alone, whole)]
    assert (time[2] < time[1] - 0.1).all()
    assert (time[1] <= time[0]).all()
    by_set = np.asarray(whole)[sets, np.arange(LAYERS)[:, None, None]]
    assert (by_set == by_set[..., :1]).all(), "no set is divided"
    assert (np.sort(by_set[..., 0]) == np.arange(4)).all(), "every node has one set"


@pytest.mark.parametrize("move", [0.0, 50.0])
def test_quads_never_make_a_layer_worse(move):
    """Random routing has no quads, and moves may cost more than they save."""
    ids = np.random.default_rng(1).random((TOKENS, LAYERS, EXPERTS)).argsort(-1)[..., :4]
    start = jnp.asarray(np.tile(np.arange(EXPERTS, dtype=np.int32)[:, None] // 8, (1, LAYERS)))
    problem = problem_of(ids, start, crossing=0.5, move=move)
    result = search_quads(problem, start, jax.random.key(0), **SIZES)
    old, new = (node_objective(problem, node, top_k=4) for node in (start, result))
    assert (new <= old).all()
    assert (np.bincount(np.asarray(result)[:, 0]) == 8).all()
    if move:
        np.testing.assert_array_equal(result, start)


@pytest.mark.parametrize(("refining", "residents"), [(False, 0), (False, 1), (True, 0)])
def test_homes_of_sets_are_together_unless_the_start_is_refined(refining, residents):
    """A search that refines its start has no steps for quads, and leaves the sets where they are."""
    ids, sets = quads()
    start = starts_together(sets)
    load = jnp.stack(
        [jnp.asarray(np.bincount(ids[:, layer].ravel(), minlength=EXPERTS)) for layer in range(LAYERS)], 1
    )
    load = jnp.broadcast_to(load[None, :, None].astype(jnp.float32) / NODES, (NODES, EXPERTS, 1, LAYERS))
    home_node, resident = place_on_nodes(
        load,
        placed(ids),
        start,
        start,
        dataclasses.replace(TOPOLOGY, resident_slots=residents),
        key=jax.random.key(0),
        steps=400,
        refining=refining,
        prices=RelativePrices(crossing=4.0, move=0.001, push=100.0),
    )
    assert not resident.any(), "pushes cost too much"
    by_set = np.asarray(home_node)[sets, np.arange(LAYERS)[:, None, None]]
    are_spread = (np.sort(by_set[..., 0]) == np.arange(4)).all() and (by_set == by_set[..., :1]).all()
    assert are_spread is not refining


@pytest.mark.parametrize(
    ("nodes", "experts", "top_k", "hierarchical", "expected"),
    [
        (4, 32, 2, True, True),
        (8, 32, 2, True, False),
        (2, 20, 2, True, False),
        (4, 32, 1, True, False),
        (4, 32, 2, False, False),
    ],
)
def test_nodes_have_quads_where_tokens_cross_once(nodes, experts, top_k, hierarchical, expected):
    """A node needs two whole quads, a token several experts, and a crossing has to serve all of them."""
    topology = Topology(num_nodes=nodes, ranks_per_node=1, num_experts=experts, replica_slots=0)
    assert has_quads(topology, top_k=top_k, hierarchical=hierarchical) is expected
