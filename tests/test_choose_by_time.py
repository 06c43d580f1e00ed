"""Choices by modelled time are never slower than their candidates, and replicas cross nodes only if hidden."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.planner import PlacedRoutes, Planner, PlanRequest
from relibra_jax.contract.types import Topology, layer_plans
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.cost.step_time import layer_time, rank_time
from relibra_jax.planning.baselines.eplb import eplb
from relibra_jax.planning.baselines.lplb import lplb
from relibra_jax.planning.baselines.popfetcher import popfetcher
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.choose_by_time import cheapest
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
COST_MODEL = CostModel(
    cluster=CLUSTERS["h100"],
    model=dataclasses.replace(MODELS["qwen3-30b-a3b"], num_experts=32),
    path="flat",
    exchange="needed",
    scale=100.0,
)
TOP_K = 8
ROUTES = PlacedRoutes(*(np.zeros(shape, np.int32) for shape in ((5, 2, TOP_K), (5,), (5,))))
"""Routes of sampled tokens, of which only the number of experts of a token is read."""


def random_load(seed):
    """Return a load that is uneven over experts and over the ranks that hold the tokens."""
    rng = np.random.default_rng(seed)
    load = rng.lognormal(4, 1.5, (3, 2, 1, 1, 32)) * rng.lognormal(0, 1, (3, 2, 2, 4, 32))
    return jnp.asarray(load.astype(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("reach", [pytest.param("node", marks=pytest.mark.long), "across"])
def test_cheapest_is_never_slower_than_its_planners(reach):
    across = reach == "across"
    parts = [
        relibra(
            place=functools.partial(place_experts, steps=200),
            replicate=functools.partial(replicate_experts, across_nodes=across),
        ),
        eplb(across_nodes=across),
        lplb(across_nodes=across),
    ]
    parts = [Planner(part.init, jax.jit(part.update)) for part in parts]
    planner, price = cheapest(parts), COST_MODEL.price(TOPOLOGY)
    states = planner.init(TOPOLOGY, 2, key=jax.random.key(0))

    @jax.jit
    def run(load, states):
        request = PlanRequest(load, ROUTES, price=price)
        plans = [planner.update(request, states, TOPOLOGY)[0]]
        for part, own in zip(parts, states, strict=True):
            plans.append(part.update(request, own, TOPOLOGY)[0])
        attention = price.token * load[:, 0].sum(-1) / TOP_K
        ranks = [rank_time(layer_plans(plan, load), attention, TOPOLOGY, price) for plan in plans]
        times = [
            layer_time(each._replace(gather=jnp.zeros_like(each.gather)), price).total.sum() for each in ranks
        ]
        return plans[0], jnp.stack(times)

    chosen = set()
    for seed in range(4):
        load = random_load(seed)
        plan, times = run(load, states)
        check_plan(plan, load, TOPOLOGY, across_nodes=across)
        assert (times[0] <= times[1:] * (1 + 1e-6)).all()
        chosen.add(int(times[1:].argmin()))
    assert chosen


@pytest.mark.slow
def test_cheapest_passes_the_request_to_its_planners():
    """Each planner gets the whole request, and keeps a state of its own."""
    requests = []

    def update(request, state, topology):
        requests.append(request)
        plan, _ = static().update(request, (), topology)
        return plan, state + 1

    counting = Planner(lambda topology, num_layers, *, key: 5, update)
    planner = cheapest([static(), counting])
    state = planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    assert state == ((), 5)
    load, home = random_load(0), np.zeros((2, 32), np.int32)
    request = PlanRequest(load, ROUTES, price=COST_MODEL.price(TOPOLOGY), start=home)
    plan, state = planner.update(request, state, TOPOLOGY)
    (passed,) = requests
    assert jax.tree.structure(passed) == jax.tree.structure(request)
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(each)] for each in (passed, request)]
    assert shapes[0] == shapes[1]
    assert state == ((), 6)
    check_plan(plan, load, TOPOLOGY)


def test_cheapest_uses_transitions_if_one_of_its_planners_does():
    assert cheapest([static(), popfetcher()]).uses_transitions
    assert not cheapest([static(), eplb()]).uses_transitions


def test_cheapest_needs_a_planner():
    with pytest.raises(ValueError, match="cheapest needs at least one planner"):
        cheapest([])


def test_cheapest_chooses_by_balance_without_a_price():
    """Without optional facts every layer gets the plan whose busiest ranks compute least."""
    load, parts = random_load(0), [static(), eplb()]
    planner = cheapest(parts)
    states = planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    plan, _ = planner.update(PlanRequest(load), states, TOPOLOGY)
    check_plan(plan, load, TOPOLOGY)
    peaks = [
        rank_load(part.update(PlanRequest(load), own, TOPOLOGY)[0]).max((2, 3)).sum(0)
        for part, own in zip(parts, states, strict=True)
    ]
    np.testing.assert_array_equal(rank_load(plan).max((2, 3)).sum(0), jnp.minimum(*peaks))
