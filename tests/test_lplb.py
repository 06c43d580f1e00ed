"""LPLB: its linear program compared with SciPy's, its graphs, and the bounds that its authors test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import Topology
from relibra_jax.planning.baselines.graphs import GRAPHS, default_graph, graph_edges
from relibra_jax.planning.baselines.lplb import lplb, split_over_edges
from relibra_jax.planning.metrics import imbalance


def largest_rank_load(load, capacity, edges):
    """Return the optimum by SciPy's HiGHS."""
    ranks, degree = edges.shape
    rows = np.zeros((ranks, ranks * degree + 1))
    rows[:, -1] = -1
    for rank in range(ranks):
        for k in range(degree):
            rows[rank, rank * degree + k] -= 1
            rows[edges[rank, k], rank * degree + k] += 1
    cost = np.r_[np.zeros(ranks * degree), 1]
    bounds = [(0, c) for c in capacity.ravel()] + [(0, None)]
    return linprog(cost, A_ub=rows, b_ub=-load, bounds=bounds).fun


@pytest.mark.parametrize(
    ("graph", "ranks", "slots"),
    [("ring", 4, 1), ("ring", 24, 2), ("cube", 8, 2), ("hypercube", 16, 2), ("torus", 32, 2)],
)
def test_split_over_edges_is_optimal(graph, ranks, slots):
    rng = np.random.default_rng(0)
    edges = graph_edges(graph, ranks, slots)
    split = jax.jit(lambda load, capacity: split_over_edges(load, capacity, edges))
    shape = (ranks, 4)
    for draw in (
        lambda: rng.zipf(1.4, shape).clip(0, 3000),
        lambda: rng.lognormal(5, 1, shape),
        lambda: rng.normal(1000, 300, shape).clip(0),
        lambda: np.eye(1, ranks * 4).reshape(shape) * 5000,
        lambda: rng.random(shape) * 2**28,
        lambda: np.ones(shape),
    ):
        experts = draw()
        load, capacity = experts.sum(-1), -np.sort(-experts, -1)[:, :slots]
        flow = np.asarray(split(jnp.asarray(load, jnp.float32), jnp.asarray(capacity, jnp.float32)), float)
        assert (flow >= 0).all()
        assert (flow <= capacity * (1 + 1e-6)).all()
        after = load - flow.sum(-1)
        np.add.at(after, edges, flow)
        assert after.max() <= 1.001 * largest_rank_load(load, capacity, edges)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 8, 12, 16, 32])
@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_graph_edges_of_the_default_graph_fill_slots_evenly(ranks, slots):
    edges = graph_edges(None, ranks, slots)
    assert edges.shape == (ranks, min(slots, 2))
    for column in edges.T:
        assert sorted(column) == list(range(ranks)), "one copy leaves and one enters every rank"


def test_graph_edges_of_cubes_use_each_edge_once():
    for name, ranks, edges in (("cube", 8, 16), ("hypercube", 16, 32)):
        pairs = {
            frozenset((rank, int(end))) for rank, row in enumerate(graph_edges(name, ranks, 2)) for end in row
        }
        assert len(pairs) == edges
        assert default_graph(ranks, 2) == name


def test_graph_edges_rejects_graphs_that_do_not_fit():
    with pytest.raises(ValueError, match="graph='cube' is for 8 ranks, but the domain has 4"):
        graph_edges("cube", 4, 2)
    with pytest.raises(ValueError, match=f"graph='star' must be one of {', '.join(GRAPHS)}"):
        graph_edges("star", 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "nodes", "ranks_per_node", "slots", "bound"),
    [
        ("cube", 4, 8, 2, 1.07),
        ("cube", 8, 8, 2, 1.10),
        ("ring", 4, 8, 1, 1.07),
        ("hypercube", 1, 16, 2, 1.03),
        ("torus", 1, 32, 2, 1.01),
    ],
)
def test_lplb_meets_the_bounds_of_its_authors(graph, nodes, ranks_per_node, slots, bound):
    """The bounds hold for every draw of 256 expert loads from N(1, 0.3)."""
    draws = 16
    topology = Topology(num_nodes=nodes, ranks_per_node=ranks_per_node, num_experts=256, replica_slots=slots)
    planner = lplb(graph=graph)
    now = np.random.default_rng(0).normal(1, 0.3, (draws, 256)).clip(0) * 2**12
    load = (
        jnp.zeros((1, draws, nodes, ranks_per_node, 256), jnp.int32).at[0, :, 0, 0].set(now.astype(np.int32))
    )
    state = planner.init(topology, draws, key=jax.random.key(0))
    plan, _ = jax.jit(planner.update)(PlanRequest(load), state, topology)
    check_plan(plan, load, topology)
    assert imbalance(rank_load(plan)).max() <= bound
