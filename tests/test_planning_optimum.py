"""ReLibra with cost and tokens, compared with a mixed-integer program of homes, residents and quotas."""

import functools

import jax
import numpy as np
import pytest
from support.reference_placement import PlacedBatch, batch_seconds, solve_batch

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.planner import PlacedRoutes, PlanRequest
from relibra_jax.contract.types import LayerPlan, Price, Topology
from relibra_jax.planning.relibra import relibra
from relibra_jax.routing.split import source_quota

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=1, num_experts=6, replica_slots=0, resident_slots=1)
INSTANCES, MICRO_BATCHES, TOKENS, TOP_K = 12, 3, 64, 2
PRICES = {
    "crossings": {"crossing": 1.0, "move": 0.0, "push": 0.0},
    "moves and pushes": {"crossing": 1.0, "move": 12.0, "push": 12.0},
    "fast network": {"crossing": 0.1, "move": 1.0, "push": 1.0},
}


@pytest.fixture(scope="module")
def batch():
    """Make instances as layers; the tokens of a node prefer experts that partly change between micro-batches."""
    rng = np.random.default_rng(0)
    shape = (MICRO_BATCHES, 2, TOKENS, INSTANCES)
    popular = rng.normal(size=(1, 2, 1, INSTANCES, 6)) + 0.5 * rng.normal(
        size=(MICRO_BATCHES, 2, 1, INSTANCES, 6)
    )
    ids = np.argsort(-(popular + rng.gumbel(size=(*shape, 6))), -1)[..., :TOP_K]
    m, node, _ = np.indices(shape[:3])
    routes = PlacedRoutes(ids.reshape(-1, INSTANCES, TOP_K).astype(np.int32), m.ravel(), node.ravel())
    load = (ids[..., None] == np.arange(6)).sum((2, 4)).swapaxes(1, 2)  # [M L N E]
    return load.astype(np.int32)[:, :, :, None], routes


def price(prices):
    return Price(token=0.0, copy=1.0, spread=0.0, hierarchical=False, **PRICES[prices])


@functools.cache
def planner():
    return jax.jit(functools.partial(relibra().update, topology=TOPOLOGY))


def placed(plan, load, layer):
    """Convert one layer of a plan to the variables of the oracle, with copies sent by `source_quota`."""
    home, slots, quota = np.asarray(plan.home[layer]), *(np.asarray(leaf[:, layer]) for leaf in plan[::2])
    moved = np.zeros((len(slots), 6, 2, 2))
    for m in range(len(slots)):
        one = LayerPlan(slots[m], home, quota[m], load[m, layer])
        sent = np.asarray(source_quota(one, TOPOLOGY)).sum(2)  # [from N S]
        for source, node, slot in np.argwhere(sent):
            moved[m, slots[m, node, 0, slot], source, node] += sent[source, node, slot]
    resident = (slots[0, :, 0, 3:, None] == np.arange(6)).any(1)
    return PlacedBatch(home // 3, resident, moved)


@pytest.mark.parametrize(
    "prices",
    [pytest.param(prices, marks=[pytest.mark.slow] * (prices != "moves and pushes")) for prices in PRICES],
)
def test_relibra_is_near_the_least_time(batch, prices):
    """The plan is near the optimum and never below it."""
    load, routes = batch
    cost, old_node = price(prices), np.arange(6) // 3
    state = relibra().init(TOPOLOGY, INSTANCES, key=jax.random.key(0))
    plan, _ = planner()(PlanRequest(load, routes, price=cost), state)
    check_plan(plan, load, TOPOLOGY)
    result, least, still = np.zeros((3, INSTANCES))
    for layer in range(INSTANCES):
        result[layer] = batch_seconds(placed(plan, load, layer), old_node, cost)
        best = solve_batch(load[:, layer, :, 0], old_node, cost, resident_slots=1)
        least[layer] = batch_seconds(best, old_node, cost)
        static = np.zeros((MICRO_BATCHES, 6, 2, 2))
        static[:, np.arange(6), :, old_node] = load[:, layer, :, 0].transpose(2, 0, 1)
        still[layer] = batch_seconds(PlacedBatch(old_node, np.zeros((2, 6), bool), static), old_node, cost)
    gap = result / least - 1
    print(
        f"{prices}: {gap.mean():.2%} above the least time, worst {gap.max():.2%};"
        f" no planning {(still / least - 1).mean():.2%}"
    )
    assert gap.min() > -1e-5
    assert gap.mean() < 0.1
    assert result.sum() < still.sum()
