"""Replicas chosen by the clock, on other nodes too: valid, taken where attention hides them, estimates that agree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import load_of, random_ids, random_plan

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import replica_experts
from relibra_jax.contract.planner import PlacedRoutes, Placement, PlanRequest
from relibra_jax.contract.types import EMPTY, LayerPlan, Topology, layer_plans
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.planning.even_pairs import even_pairs
from relibra_jax.planning.replicate_for_time import replicate_for_time as replicate
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.planning.visit_estimates import estimate_visits
from relibra_jax.planning.visiting_replicas import replicate_with_visitors
from relibra_jax.routing.split import pair_load

replicate_for_time = jax.jit(replicate, static_argnums=2)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=2)
MICRO_BATCHES, LAYERS, TOKENS, TOP_K = 2, 2, 64, 2


def routed(topology=TOPOLOGY, seed=0):
    """Draw routes; return the load, the tokens of ranks and all routes as a sample."""
    rng = np.random.default_rng(seed)
    shape = (MICRO_BATCHES, LAYERS, topology.num_ranks, TOKENS)
    ids = random_ids(rng, shape, topology.num_experts, TOP_K, padding=0.0)
    tokens = np.full((MICRO_BATCHES, topology.num_nodes, topology.ranks_per_node), TOKENS, np.float32)
    micro_batch, rank = (axis.ravel() for axis in np.indices((MICRO_BATCHES, topology.num_ranks, TOKENS))[:2])
    by_token = np.moveaxis(ids, 1, 3).reshape(-1, LAYERS, TOP_K)
    return (
        load_of(ids, topology),
        tokens,
        PlacedRoutes(by_token, micro_batch.astype(np.int32), rank.astype(np.int32)),
    )


def placement_of(topology, seed=0):
    """Draw homes, and different residents for the ranks of a node."""
    rng = np.random.default_rng(seed)
    home = np.stack([rng.permutation(topology.num_experts) for _ in range(LAYERS)])
    room = topology.ranks_per_node * topology.resident_slots
    away = [[np.flatnonzero(row // 4 != node)[:room] for node in range(2)] for row in home]
    resident = np.reshape(away, (LAYERS, 2, topology.ranks_per_node, topology.resident_slots))
    return Placement(jnp.asarray(home, jnp.int32), jnp.asarray(resident, jnp.int32))


@pytest.mark.parametrize("visitors", [1, 2])
@pytest.mark.parametrize("residents", [0, 1])
def test_plans_with_visitors_are_valid(visitors, residents):
    topology = dataclasses.replace(TOPOLOGY, resident_slots=residents)
    load, *_ = routed(topology)
    placement = placement_of(topology)
    plan = replicate_with_visitors(PlanRequest(load), placement, topology, visitors=visitors)
    check_plan(plan, load, topology, across_nodes=True)
    away = np.asarray(plan.home) // 4 != 0
    on_first = np.asarray(plan.slot_expert)[:, :, 0].reshape(MICRO_BATCHES, LAYERS, -1)
    assert any(
        away[row, expert]
        for m, row, at in np.ndindex(on_first.shape)
        if (expert := on_first[m, row, at]) >= 0
    )


@pytest.mark.parametrize(("scale", "leaves"), [(1e-3, False), (1e5, True)])
def test_replicas_leave_the_node_only_behind_attention(scale, leaves):
    model = dataclasses.replace(MODELS["qwen3-30b-a3b"], num_experts=8, top_k=TOP_K)
    cost_model = CostModel(cluster=CLUSTERS["h100"], model=model, scale=scale, across_nodes=True)
    price = cost_model.price(TOPOLOGY)
    load, tokens, routes = routed()
    placement = Placement.without_residents(jnp.tile(jnp.arange(8)[None], (LAYERS, 1)), TOPOLOGY)
    request = PlanRequest(load, routes, price=price, tokens=tokens)
    plan = replicate_for_time(request, placement, TOPOLOGY)
    check_plan(plan, load, TOPOLOGY, across_nodes=True)
    inside = replicate_experts(request, placement, TOPOLOGY)
    assert (np.asarray(plan.slot_expert) != np.asarray(inside.slot_expert)).any() == leaves
    from_load = replicate_for_time(request._replace(tokens=None), placement, TOPOLOGY)
    np.testing.assert_array_equal(from_load.slot_expert, plan.slot_expert)
    kept = replicate_for_time(
        request._replace(price=dataclasses.replace(price, across_nodes=False)), placement, TOPOLOGY
    )
    np.testing.assert_array_equal(kept.slot_expert, inside.slot_expert)


@pytest.mark.parametrize(("scale", "most"), [(1.0, 2), (1e4, 3)])
def test_ranks_export_few_experts_where_attention_does_not_hide_a_padded_fetch(scale, most):
    """One rank has three hot experts. With much attention and compute, all of them are worth their transfer."""
    topology = dataclasses.replace(TOPOLOGY, num_nodes=1, ranks_per_node=4, num_experts=16, replica_slots=1)
    model = dataclasses.replace(MODELS["qwen3-30b-a3b"], num_experts=16, top_k=TOP_K)
    price = CostModel(cluster=CLUSTERS["h100"], model=model, scale=scale).price(topology)
    load = np.full((1, 1, 1, 4, 16), 2, np.int32)
    load[..., :3] = 40
    request = PlanRequest(load, price=price, tokens=np.full((1, 1, 4), 64, np.float32))
    placement = Placement.without_residents(jnp.arange(16)[None], topology)
    plan = replicate_for_time(request, placement, topology)
    check_plan(plan, load, topology)

    def exported(plan):
        experts = np.asarray(replica_experts(plan, topology))
        return len(np.unique(experts[(experts != EMPTY) & (experts < 4)]))

    assert exported(plan) == most
    for limit in (2, 3):
        limited = replicate_for_time(request._replace(exports=jnp.int32(limit)), placement, topology)
        assert exported(limited) == limit, "the request leaves no choice"


@pytest.mark.parametrize("across_nodes", [False, True])
def test_even_pairs_send_what_plans_send(across_nodes):
    """The copies of a rank, to it, and to a node are those of the exact count; single pairs are close."""
    load, *_ = routed()
    plan = random_plan(np.random.default_rng(1), load, TOPOLOGY, across_nodes=across_nodes)
    plans = layer_plans(plan, load)
    estimate = np.asarray(even_pairs(plans, TOPOLOGY)).reshape(MICRO_BATCHES, LAYERS, 4, 4)
    for m, row in np.ndindex(MICRO_BATCHES, LAYERS):
        one = LayerPlan(*(np.asarray(leaf)[m, row] for leaf in plans))
        exact = np.asarray(pair_load(one, TOPOLOGY))
        for axis in (0, 1):
            np.testing.assert_allclose(estimate[m, row].sum(axis), exact.sum(axis), atol=1e-3)
        np.testing.assert_allclose(estimate[m, row].max(), exact.max(), rtol=0.1)
        np.testing.assert_allclose(np.diag(estimate[m, row]), np.diag(exact), atol=1e-3)


def test_visits_of_experts_at_home_are_those_of_the_routes():
    """If every expert is served in one place and all tokens are sampled, nothing is left to estimate but the mean."""
    load, tokens, routes = routed()
    placement = Placement.without_residents(jnp.tile(jnp.arange(8)[None], (LAYERS, 1)), TOPOLOGY)
    plan = replicate_experts(PlanRequest(load), placement, TOPOLOGY)
    visits = np.asarray(estimate_visits(plan, load, tokens, routes, TOPOLOGY, even=True))
    served = np.asarray(routes.expert_ids) // 4
    for m, node in np.ndindex(MICRO_BATCHES, 2):
        mine = (routes.micro_batch == m) & (routes.rank // 2 == node)
        crossing = (served[mine] == 1 - node).any(2).sum(0)
        np.testing.assert_allclose(visits[m, :, 2 * node, 1 - node] * 2, crossing, rtol=0.02)
    independent = np.asarray(estimate_visits(plan, load, tokens, None, TOPOLOGY, even=True))
    np.testing.assert_allclose(independent.sum(), visits.sum(), rtol=0.1)


def test_prices_of_64_bits_give_the_same_plan():
    """The loop over lengths of a padded fetch carries float32, whatever the dtype of prices."""
    model = dataclasses.replace(MODELS["qwen3-30b-a3b"], num_experts=8, top_k=TOP_K)
    price = CostModel(cluster=CLUSTERS["h100"], model=model).price(TOPOLOGY)
    load, tokens, routes = routed()
    request = PlanRequest(load, routes, price=price, tokens=tokens)
    expected = replicate(request, placement_of(TOPOLOGY), TOPOLOGY)
    with jax.enable_x64(True):
        wide = request._replace(price=jax.tree.map(np.float64, price))
        plan = replicate(wide, placement_of(TOPOLOGY), TOPOLOGY)
    np.testing.assert_array_equal(plan.quota, expected.quota)
    assert plan.quota.dtype == np.int32
