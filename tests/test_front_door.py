"""Tests of the price at the front door: what a Balancer plans for, and that `plan_batch` then finds the same plans."""

import dataclasses
import functools
import re
import types

import jax
import numpy as np
import pytest
from flax import nnx
from support.costs import CLUSTER
from support.plans import random_routing

from relibra_jax import (
    RoutingReplay,
    Stage,
    Topology,
    assign_samples,
    place_experts,
    plan_batch,
    relibra,
    static,
)
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import Model
from relibra_jax.evaluation import Batches, Setting, run_planner
from relibra_jax.execution.gating import GATINGS
from relibra_jax.nnx import Balancer, ExpertParallel, MoELayer, expert_mesh
from relibra_jax.nnx.derived_cost import _print_default, cluster_of
from relibra_jax.planning.planners import PlannerEntry

LAYERS, SAMPLES, EXPERTS, WIDTH, HIDDEN, TOP_K = 2, 64, 32, 8, 16, 2
PLANNER = relibra(place=functools.partial(place_experts, steps=50))
ASSIGN = functools.partial(assign_samples, steps=20)
SIZES = Model(
    moe_layers=LAYERS,
    num_experts=EXPERTS,
    top_k=TOP_K,
    width=WIDTH,
    expert_width=HIDDEN,
    shared_width=0,
    attention_params=4 * WIDTH**2,
    attention_width=2 * WIDTH,
    cache_width=2 * WIDTH,
    cache_heads=1,
)
# So slow at products, and with so many tokens, that balance is worth moving experts for.
COST = CostModel(cluster=dataclasses.replace(CLUSTER, matmul_flops=1e3, tile=1), model=SIZES, scale=50.0)
KEY = jax.random.key(0)
STAGES = {1: ([Stage(2)], (1,)), 2: ([Stage(1), Stage(2)], (0, 1))}
"""Stages with the number of updates of each: one stage that trains, or a recompute and an update."""


def topology_of(nodes, local, residents=0):
    return Topology(
        num_nodes=nodes,
        ranks_per_node=local,
        num_experts=EXPERTS,
        replica_slots=1,
        resident_slots=residents,
    )


TOPOLOGY = topology_of(2, 4)


@functools.cache
def replay():
    rng = np.random.default_rng(0)
    sizes = {"samples": SAMPLES, "tokens": 16, "layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K}
    return random_routing(rng, **sizes)


class Layers(nnx.Module):
    """MoE layers without anything between them."""

    def __init__(self, topology=TOPOLOGY, mesh=None, width=WIDTH, hidden=(HIDDEN,) * LAYERS, top_k=TOP_K):
        gating = dataclasses.replace(GATINGS["qwen3-moe"], top_k=top_k)
        options = {"mesh": mesh, "rngs": nnx.Rngs(0)}
        self.layers = nnx.List([MoELayer(topology, width, each, gating, **options) for each in hidden])


def balancer_of(planner=PLANNER, topology=TOPOLOGY, mesh=None, *, runs=None, **options):
    """Return a balancer; ``runs`` are fields of its `ExpertParallel`."""
    parallel = ExpertParallel(mesh=mesh or expert_mesh(topology), topology=topology, **(runs or {}))
    options = {"num_layers": LAYERS, "num_micro_batches": 2, "key": KEY, "assign": ASSIGN} | options
    return Balancer(planner, parallel, **options)


def keys():
    """Return the keys of the planner and of the first assignment, as a Balancer makes them from its key."""
    planner_key, key = jax.random.split(KEY)
    return planner_key, jax.random.split(key)[1]


def planned(topology, cost, stages):
    """Return the plans of the pure functions."""
    planner_key, assign_key = keys()
    state, (parts, updates) = PLANNER.init(topology, LAYERS, key=planner_key), STAGES[stages]
    prices = [cost.price(topology, updates=number, recompute=not number) for number in updates]
    options = {"cost": prices, "assign": ASSIGN, "key": assign_key}
    return plan_batch(replay(), PLANNER, state, topology, stages=parts, **options)[0]


def compared(topology, cost):
    """Return the plan that ``relibra compare`` evaluates; seed 0 stands for the key that a Balancer gets here."""
    entry = PlannerEntry(planner=PLANNER, summary="relibra", assign=ASSIGN)
    batches = Batches([replay()], num_micro_batches=2, history=0, samples_left=0)
    (batch,) = run_planner("relibra", entry, Setting(batches, topology, cost), timed_runs=0).batches
    return batch.batch_plan


def assert_same_bits(actual, desired):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (np.asarray(actual[0].plan.home) != np.arange(EXPERTS)).any(), "nothing was worth a move"


LONG, SLOW = pytest.mark.long, pytest.mark.slow


@pytest.mark.parametrize(
    ("residents", "stages"),
    [
        pytest.param(0, 1, marks=LONG),
        pytest.param(1, 2, marks=SLOW),
        pytest.param(0, 2, marks=LONG),
        pytest.param(1, 1, marks=LONG),
    ],
)
def test_balancer_plans_as_plan_batch_and_compare(residents, stages):
    topology = topology_of(2, 4, residents)
    mesh = expert_mesh(topology)
    model, balancer = Layers(topology, mesh), balancer_of(topology=topology, mesh=mesh, cost=COST)
    parts, updates = STAGES[stages]
    batches = balancer.prepare_stages(model, None, replay(), parts, updates=updates)
    plans = [batch.batch_plan for batch in batches]
    assert_same_bits(plans, planned(topology, balancer.cost, stages))
    if stages == 1:
        assert_same_bits([compared(topology, balancer.cost)], plans)
    times = [batch.modelled_times for batch in batches]
    assert sum(time.plan.total for time in times) <= sum(time.staying.total for time in times)
    assert all(("resident slots" in batch.summary()) == bool(residents) for batch in batches)


@pytest.mark.long
@SLOW
@pytest.mark.parametrize("residents", [pytest.param(0, marks=LONG), 1])
@pytest.mark.parametrize(("nodes", "local"), [pytest.param(2, 8, marks=LONG), (4, 8)])
def test_compare_plans_as_plan_batch_on_more_ranks(nodes, local, residents):
    """This is `test_balancer_plans_as_plan_batch_and_compare` for more ranks than there are devices."""
    topology, cost = topology_of(nodes, local, residents), dataclasses.replace(COST, sequences="padded")
    assert_same_bits([compared(topology, cost)], planned(topology, cost, 1))


@pytest.mark.slow
def test_balancer_with_packed_sequences_starts_from_packed_samples():
    mesh = expert_mesh(TOPOLOGY)
    model, balancer = Layers(mesh=mesh), balancer_of(mesh=mesh, cost=COST, sequences="packed")
    batch = balancer.prepare(model, None, replay())
    assert balancer.cost.sequences == "packed"
    assert_same_bits([batch.batch_plan], planned(TOPOLOGY, balancer.cost, 1))
    title, plan, staying, balanced, shares = batch.summary().splitlines()
    times = batch.modelled_times
    assert title.startswith("modelled time")
    for name, line, time in zip(
        ("plan", "staying put", "balanced"), (plan, staying, balanced), times, strict=True
    ):
        assert re.fullmatch(rf"  {name} +[\d.e+]+ = [a-z]+ .*", line)
        assert float(line.split(" = ")[0].split()[-1]) == pytest.approx(float(time.total), rel=1e-3)
        assert float(time.total) == pytest.approx(
            sum(float(part) for part in time.parts().values()), rel=1e-6
        )
    assert f"{times.balanced.total / times.plan.total:.1%} of the balanced run" in shares
    assert f"planned in {batch.plan_seconds:.2f} s" in shares


def live(balancer, model, **options):
    """Prepare live routing, which checks the price and plans nothing."""
    return balancer.prepare(model, None, None, mask=np.ones((SAMPLES, 1), bool), **options)


def test_balancer_cost_is_derived_from_model_and_device():
    balancer = balancer_of(static())
    assert balancer.cost is None
    batch = live(balancer, Layers())
    assert batch.summary() == "this batch routes live: it has no plan, so no time is modelled"
    assert balancer.cost == CostModel(
        cluster=CLUSTERS["cpu-host"],
        model=SIZES,
        path="hierarchical",
        exchange="padded",
        fetch="padded",
        compute_bytes=4,
        sequences="padded",
        striped=False,
    )


@pytest.mark.parametrize(("kind", "name"), [("NVIDIA H200", "h200"), ("NVIDIA Unheard", "h100")])
def test_cluster_of_names_an_unknown_device_once(capsys, kind, name):
    _print_default.cache_clear()
    for _ in range(2):
        assert cluster_of(types.SimpleNamespace(device_kind=kind)) == CLUSTERS[name]
    line = (
        f"relibra_jax: no speeds are known for {kind!r} devices, so plans are priced for 'h100': pass"
        " Balancer(cost=CostModel(...)) for others\n"
    )
    assert capsys.readouterr().err == (line if name == "h100" else "")


def test_balancer_cost_is_of_what_runs():
    runs = {"exchange": "emulated", "fetch": "remote_emulated", "path": "flat"}
    cost = balancer_of(static(), runs=runs, cost=COST, sequences="packed").cost
    assert (cost.path, cost.exchange, cost.fetch, cost.sequences) == ("flat", "needed", "ragged", "packed")
    topology = topology_of(1, 4)
    mesh = expert_mesh(topology, data=2)
    assert balancer_of(static(), topology, mesh, cost=COST).cost.data_parallel == 2


def test_balancer_for_balance_has_no_price():
    balancer = balancer_of(static(), cost="balance", assign=None)
    batch = balancer.prepare(Layers(), None, RoutingReplay(*(leaf[:16] for leaf in replay())))
    assert balancer.cost is None
    assert batch.modelled_times is None
    assert batch.summary().startswith("this batch was planned for balance, without a price")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "flat"}, "path='flat', but the layers of this Balancer run path='hierarchical'"),
        ({"exchange": "ragged"}, "exchange='ragged', but the layers of this Balancer run exchange='padded'"),
        ({"fetch": "ragged"}, "fetch='ragged', but the layers of this Balancer run fetch='padded'"),
        (
            {"sequences": "packed"},
            "sequences='packed', but the layers of this Balancer run sequences='padded'",
        ),
        ({"data_parallel": 3}, "data_parallel=3, but the layers of this Balancer run data_parallel=1"),
        ({"spare_room": False}, "spare_room=False, but the layers of this Balancer run spare_room=True"),
    ],
)
def test_balancer_rejects_a_cost_of_other_settings(change, message):
    with pytest.raises(ValueError, match=message):
        balancer_of(static(), cost=dataclasses.replace(COST, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, "num_experts=16, but the MoE layers of the model have 32"),
        ({"top_k": 4}, "top_k=4, but the MoE layers of the model have 2"),
        ({"width": 4096}, "width=4096, but the MoE layers of the model have 8"),
        ({"expert_width": 12}, "expert_width=12, but the MoE layers of the model have 16"),
        ({"shared_width": 5}, "shared_width=5, but the MoE layers of the model have 0"),
        ({"moe_layers": 3}, "moe_layers=3, but the MoE layers of the model have 2"),
    ],
)
def test_prepare_rejects_a_cost_of_another_model(change, message):
    cost = dataclasses.replace(COST, model=dataclasses.replace(SIZES, **change))
    with pytest.raises(ValueError, match=message):
        live(balancer_of(static(), cost=cost), Layers())


def test_derived_cost_rejects_layers_of_several_sizes():
    with pytest.raises(
        ValueError, match=r"layers of equal sizes, but the model has .*expert_width=12.*'balance'"
    ):
        live(balancer_of(static()), Layers(hidden=(HIDDEN, 12)))
    live(balancer_of(static(), cost="balance"), Layers(hidden=(HIDDEN, 12)))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (None, {"stretch": 0.0}, "stretch=0.0 must be positive"),
        (None, {"scale": -1.0}, "scale=-1.0 must be positive"),
        ("cluster", {"slow_bandwidth": -1.0}, "cluster.slow_bandwidth=-1.0 must be positive"),
        ("cluster", {"matmul_flops": 0.0}, "cluster.matmul_flops=0.0 must be positive"),
        ("cluster", {"tile": -1}, r"cluster.tile=-1.* must be at least 0"),
        ("model", {"width": 0}, "model.width=0 must be an integer of at least 1"),
        ("model", {"attention_width": -2}, "model.attention_width=-2 must be an integer of at least 0"),
    ],
)
def test_cost_model_rejects_numbers_out_of_range(part, change, message):
    changed = change if part is None else {part: dataclasses.replace(getattr(COST, part), **change)}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(COST, **changed)


def test_prepare_stages_rejects_updates_that_do_not_fit():
    balancer, model = balancer_of(static(), cost=COST), Layers()
    with pytest.raises(ValueError, match="updates has 1 entries, but there are 2 stages"):
        balancer.prepare_stages(model, None, replay(), [Stage(1), Stage(2)], updates=(1,))
    with pytest.raises(ValueError, match="updates=-1 must be an integer of at least 0"):
        balancer.prepare_stages(model, None, replay(), [Stage(1)], updates=(-1,))
    # In tests the check of type annotations raises first, with its own message.
    with pytest.raises((ValueError, TypeError), match="cost"):
        balancer_of(static(), cost="speed")
