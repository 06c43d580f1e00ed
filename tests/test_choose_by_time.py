"""Choices by modelled time are never slower than their candidates, and replicas cross nodes only if hidden."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from relibra_jax.planning.extra_args import with_extra_args

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.types import Planner, TokenSample, Topology, layer_plans
from relibra_jax.cost.copies import fetch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.cost.step_time import layer_time, rank_time
from relibra_jax.planning.baselines.eplb import eplb
from relibra_jax.planning.baselines.lplb import lplb
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.choose_by_time import cheapest, replicate_while_hidden
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
COST_MODEL = CostModel(
    cluster=CLUSTERS["h100"],
    model=dataclasses.replace(MODELS["qwen3-30b-a3b"], num_experts=32),
    path="flat",
    between="ragged",
    scale=100.0,
)
TOP_K = 8
TOKENS = TokenSample(*(np.zeros(shape, np.int32) for shape in ((5, 2, TOP_K), (5,), (5,))))
"""Sampled tokens, of which only the number of experts is read."""


def random_load(seed):
    """Return a load that is uneven over experts and over the ranks that hold the tokens."""
    rng = np.random.default_rng(seed)
    load = rng.lognormal(4, 1.5, (3, 2, 1, 1, 32)) * rng.lognormal(0, 1, (3, 2, 2, 4, 32))
    return jnp.asarray(load.astype(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("reach", ["node", "across"])
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
    planner, cost = cheapest(parts), COST_MODEL.price(TOPOLOGY)
    states = planner.init(TOPOLOGY, 2, key=jax.random.key(0))

    @jax.jit
    def run(load, states):
        extra = {"cost": cost, "tokens": TOKENS}
        plans = [planner.update(load, states, TOPOLOGY, **extra)[0]]
        for part, own in zip(parts, states, strict=True):
            plans.append(with_extra_args(part).update(load, own, TOPOLOGY, **extra)[0])
        attention = cost.token * load[:, 0].sum(-1) / TOP_K
        ranks = [rank_time(layer_plans(plan, load), attention, TOPOLOGY, cost) for plan in plans]
        times = [layer_time(each._replace(gather=jnp.zeros_like(each.gather))).total.sum() for each in ranks]
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
def test_competitors_get_the_extra_arguments_that_they_name():
    """Each planner gets only the arguments that it names, and keeps a state of its own."""
    seen = []

    def update(load, state, topology, *, refine, tokens=None):
        seen.append((refine, tokens))
        plan, _ = static().update(load, (), topology)
        return plan, state + 1

    planner_with_cost = Planner(lambda topology, num_layers, *, key: 5, update)
    planner, cost = cheapest([static(), planner_with_cost]), COST_MODEL.price(TOPOLOGY)
    state = planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    assert state == ((), 5)
    load, home = random_load(0), np.zeros((2, 32), np.int32)
    plan, state = planner.update(load, state, TOPOLOGY, refine=home, cost=cost, tokens=TOKENS)
    assert seen == [(home, TOKENS)]
    assert state == ((), 6)
    check_plan(plan, load, TOPOLOGY)
    assert with_extra_args(planner) is planner, "it takes them all"


def test_nothing_to_choose_from():
    with pytest.raises(ValueError, match="cheapest needs at least one planner"):
        cheapest([])
    planner, load = cheapest([static()]), random_load(0)
    for some in ({}, {"cost": COST_MODEL.price(TOPOLOGY)}, {"tokens": TOKENS}):
        with pytest.raises(ValueError, match="cheapest compares modelled times, so it needs cost and tokens"):
            planner.update(load, ((),), TOPOLOGY, **some)


@pytest.mark.parametrize(("scale", "expected"), [(1e-3, "near"), (1e5, "far")])
def test_replicas_leave_the_node_only_behind_attention(scale, expected):
    load = random_load(0)
    by_expert, home = load.sum((2, 3)), jnp.tile(jnp.arange(32)[None], (2, 1))
    cost = dataclasses.replace(COST_MODEL, scale=scale).price(TOPOLOGY)
    run = functools.partial(replicate_while_hidden, topology=TOPOLOGY, cost=cost, tokens=TOKENS)
    plan = jax.jit(run)(by_expert, home)
    check_plan(plan, load, TOPOLOGY, across_nodes=expected == "far")
    replicate = jax.jit(replicate_experts, static_argnames="across_nodes")
    near, far = (replicate(by_expert, home, TOPOLOGY, across_nodes=across) for across in (False, True))
    expected_plan = near if expected == "near" else far
    np.testing.assert_array_equal(plan.quota, expected_plan.quota)
    assert batch_imbalance(rank_load(far)) < batch_imbalance(rank_load(near))
    assert (fetch_time(layer_plans(far, None), TOPOLOGY, cost) > 0).any()
