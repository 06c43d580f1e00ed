"""Planning the stages of a batch, which have their own micro-batches and samples, and share homes and residents."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from relibra_jax.planning.plan_stages import plan_stage_loads, plan_stages
from relibra_jax.planning.token_sample import sample_routes
from support.costs import CLUSTER, MODEL
from support.plans import random_routing

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.replay import expert_load, sample_load
from relibra_jax.contract.types import EMPTY, Planner, Topology
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.planning.starts import start_assignment
from relibra_jax.routing.visits import node_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1, resident_slots=1)
STAGES = (2, 4)
COST_MODEL = CostModel(cluster=CLUSTER, model=MODEL, scale=100.0, recompute=True)
COSTS = (
    COST_MODEL.price(TOPOLOGY, updates=0, recompute=True),
    COST_MODEL.price(TOPOLOGY, updates=1, recompute=False),
)
"""The unit times of a recompute and of an update."""
ASSIGN = functools.partial(assign_samples, steps=200)
KEY = jax.random.key(0)
PLANNER = relibra(place=functools.partial(place_experts, steps=50))


@pytest.fixture(scope="module")
def replay():
    return random_routing(np.random.default_rng(0), samples=32, tokens=12, layers=2, experts=8, top_k=2)


def first_state():
    return PLANNER.init(TOPOLOGY, 2, key=jax.random.key(0))


def plan(replay, state, **options):
    return plan_stages(replay, PLANNER, state, TOPOLOGY, num_micro_batches=STAGES, cost=COSTS, **options)


def samples_of(batch_plan):
    samples = np.asarray(batch_plan.assignment.sample)
    return sorted(samples[samples != EMPTY].tolist())


@pytest.fixture(scope="module")
def packed(replay):
    """Return the stages of packed samples."""
    return plan(replay, first_state())[0]


def check_stages(replay, stages):
    """Check that the plans are valid, hold all samples, and share homes and residents, of which there are some."""
    assert [len(stage.load) for stage in stages] == list(STAGES)
    for stage in stages:
        check_plan(stage.plan, stage.load, TOPOLOGY)
        assert samples_of(stage) == list(range(32))
        np.testing.assert_array_equal(stage.load, expert_load(replay, stage.assignment, num_experts=8))
    recompute, update = (stage.plan for stage in stages)
    np.testing.assert_array_equal(recompute.home, update.home)
    residents = resident_experts(recompute, TOPOLOGY)
    assert (residents != EMPTY).any()
    np.testing.assert_array_equal(residents, resident_experts(update, TOPOLOGY))


@pytest.mark.slow
def test_every_stage_has_all_samples_packed_alone(replay, packed):
    check_stages(replay, packed)
    for number, stage, cost in zip(STAGES, packed, COSTS, strict=True):
        start = start_assignment(replay.mask.sum(1), TOPOLOGY, num_micro_batches=number, cost=cost)
        chex.assert_trees_all_equal(stage.assignment, start)


@pytest.mark.slow
def test_stages_assigned_under_jit(replay):
    stages, _ = jax.jit(functools.partial(plan, assign=ASSIGN, key=KEY, rounds=2))(replay, first_state())
    check_stages(replay, stages)


SPLIT = {"num_micro_batches": (2, 2, 4), "samples": (None, range(12), range(12, 32))}
"""The samples of a recompute of all samples and of two updates of some samples each."""


@pytest.mark.parametrize("assign", [None, ASSIGN], ids=["packed", "assigned"])
@pytest.mark.parametrize(
    "compiled", [pytest.param(False, marks=pytest.mark.long, id="eager"), pytest.param(True, id="jit")]
)
def test_samples_never_cross_an_update(replay, assign, compiled):
    cost = (COSTS[0], COSTS[1], COSTS[1])
    split = functools.partial(plan_stages, planner=PLANNER, topology=TOPOLOGY, **SPLIT, cost=cost)
    split = functools.partial(split, assign=assign, key=KEY, rounds=2)
    stages, _ = (jax.jit(split) if compiled else split)(replay, state=first_state())
    for stage, own in zip(stages, (range(32), *SPLIT["samples"][1:]), strict=True):
        check_plan(stage.plan, stage.load, TOPOLOGY)
        assert samples_of(stage) == list(own)
        np.testing.assert_array_equal(stage.load, expert_load(replay, stage.assignment, num_experts=8))
        np.testing.assert_array_equal(stage.plan.home, stages[0].plan.home)
        residents = resident_experts(stage.plan, TOPOLOGY)
        assert (residents != EMPTY).any()
        np.testing.assert_array_equal(residents, resident_experts(stages[0].plan, TOPOLOGY))


@pytest.mark.slow
def test_a_stage_is_assigned_as_a_batch_of_its_samples(replay):
    """``assign`` receives the same arguments for an update's samples as for a batch of these samples."""
    received = []

    def assign(sample_load, tokens, home, topology, *, num_micro_batches, samples_per_rank, routes, refine):
        jax.debug.callback(
            lambda *data: received.append(data), sample_load, tokens, routes, refine, ordered=True
        )
        room = {"num_micro_batches": num_micro_batches, "samples_per_rank": samples_per_rank}
        return pack_samples(tokens, topology, **room)

    options = SPLIT | {"cost": (COSTS[0], COSTS[1], COSTS[1]), "assign": assign, "rounds": 2}
    plan_stages(replay, PLANNER, first_state(), TOPOLOGY, **options)
    jax.effects_barrier()
    whole, early, late = received[3:]
    for (load, tokens, routes, refine), own in ((early, range(12)), (late, range(12, 32))):
        np.testing.assert_array_equal(load, whole[0][own.start : own.stop])
        np.testing.assert_array_equal(tokens, whole[1][own.start : own.stop])
        inside = np.isin(whole[2].sample, own)
        np.testing.assert_array_equal(routes.sample, np.where(inside, whole[2].sample - own.start, EMPTY))
        samples = np.asarray(refine.sample)
        assert sorted(samples[samples != EMPTY].tolist()) == list(range(len(own)))


def test_updates_share_one_copy_of_the_sampled_tokens(replay):
    """Recompute and updates have two copies of every token, not one per stage; unit times are weighed by samples."""
    seen = []

    def update(load, state, topology, *, tokens, cost):
        jax.debug.callback(lambda *data: seen.append(data), load, tokens, cost)
        return static().update(load, state, topology)

    cost = (COSTS[0], COSTS[1], COSTS[1])
    plan_stages(replay, Planner(static().init, update), (), TOPOLOGY, **SPLIT, cost=cost)
    jax.effects_barrier()
    ((load, tokens, mean),) = seen
    micro_batch, rank = np.asarray(tokens.micro_batch), np.asarray(tokens.rank)
    assert len(micro_batch) == 2 * 16_384
    assert (micro_batch != EMPTY).all()
    counted = np.zeros_like(load)
    for layer in range(2):
        at = (micro_batch[:, None], layer, rank[:, None] // 2, rank[:, None] % 2, tokens.expert_ids[:, layer])
        np.add.at(counted, at, 1)
    assert np.abs(counted - len(micro_batch) / 2 / replay.mask.sum() * load).max() < 0.02 * counted.max()
    assert mean.copy == pytest.approx((COSTS[0].copy + COSTS[1].copy) / 2)


@pytest.mark.slow
def test_each_stage_is_assigned_to_the_homes_of_all(replay):
    """In every round, each stage gets its own sizes and unit times, and homes and residents that all stages share."""
    calls = []

    def assign(sample_load, tokens, home, topology, *, num_micro_batches, samples_per_rank, resident, cost):
        def record(home, resident, cost):
            calls.append((num_micro_batches, samples_per_rank, float(cost.copy), home, resident))

        jax.debug.callback(record, home, resident, cost, ordered=True)
        room = {"num_micro_batches": num_micro_batches, "samples_per_rank": samples_per_rank}
        return pack_samples(tokens, topology, **room)

    stages, _ = plan(replay, first_state(), assign=assign, rounds=2)
    jax.effects_barrier()
    rooms = [stage.assignment.sample.shape[-1] for stage in stages]
    sizes = [(*each, pytest.approx(cost.copy)) for *each, cost in zip(STAGES, rooms, COSTS, strict=True)]
    assert [call[:3] for call in calls] == 2 * sizes
    for recompute, update in zip(calls[::2], calls[1::2], strict=True):
        chex.assert_trees_all_equal(recompute[3:], update[3:])


def test_planners_see_one_batch_of_all_stages(replay):
    """Planners receive concatenated loads, tokens placed in each stage, mean times, and push times counted once."""
    seen = []

    def update(load, state, topology, *, tokens, cost):
        jax.debug.callback(lambda *data: seen.append(data), load, tokens, cost)
        return static().update(load, state, topology)

    recorder = Planner(static().init, update)
    stages, _ = plan_stages(replay, recorder, (), TOPOLOGY, num_micro_batches=STAGES, cost=COSTS)
    jax.effects_barrier()
    ((load, tokens, cost),) = seen
    np.testing.assert_array_equal(load, np.concatenate([stage.load for stage in stages]))
    counted = np.zeros_like(load)
    micro_batch, rank = np.asarray(tokens.micro_batch), np.asarray(tokens.rank)
    for layer in range(2):
        at = (micro_batch[:, None], layer, rank[:, None] // 2, rank[:, None] % 2, tokens.expert_ids[:, layer])
        np.add.at(counted, at, 1)
    per_token = len(micro_batch) / 2 / replay.mask.sum()
    assert np.abs(counted - per_token * load).max() < 0.02 * counted.max(), "8,192 samples of a small batch"
    for name in ("token", "pair", "copy", "crossing", "spread", "gather", "move"):
        times = [getattr(each, name) for each in COSTS]
        assert getattr(cost, name) == pytest.approx(sum(times) / 2)
    assert cost.push == pytest.approx(COSTS[1].push)
    assert COSTS[0].push == 0


@pytest.mark.slow
def test_one_stage_is_a_batch(replay):
    (stage,), after = plan_stages(
        replay, PLANNER, first_state(), TOPOLOGY, num_micro_batches=[4], cost=[COSTS[1]]
    )
    batch_plan, expected = plan_batch(
        replay, PLANNER, first_state(), TOPOLOGY, num_micro_batches=4, cost=COSTS[1]
    )
    chex.assert_trees_all_equal(stage, batch_plan)
    chex.assert_trees_all_equal(after.home, expected.home)


@pytest.mark.slow
def test_stages_under_jit_are_those_without(replay, packed):
    """Lengths are data under jit, so the starts are given."""
    starts = [stage.assignment for stage in packed]
    compiled, _ = jax.jit(functools.partial(plan, starts=starts))(replay, first_state())
    chex.assert_trees_all_equal(compiled, packed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["static", "eplb_history", "lplb", "relibra_across"])
def test_any_planner_plans_stages(replay, name):
    entry = PLANNERS[name]
    state = entry.planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    stages, _ = plan_stages(replay, entry.planner, state, TOPOLOGY, num_micro_batches=STAGES)
    for stage in stages:
        check_plan(stage.plan, stage.load, TOPOLOGY, across_nodes=entry.across_nodes)
    np.testing.assert_array_equal(stages[0].plan.home, stages[1].plan.home)


@pytest.mark.slow
def test_the_time_of_a_batch_is_the_sum_over_its_stages(replay):
    """Stages with the same micro-batches take as long as one plan with recompute; moves and pushes count once."""
    state, lengths = first_state(), replay.mask.sum(1)
    stages, _ = plan_stages(replay, PLANNER, state, TOPOLOGY, num_micro_batches=(4, 4), cost=COSTS)

    def run(stage, cost, home):
        visits = node_visits(replay, stage, TOPOLOGY)
        return batch_time(stage, lengths, TOPOLOGY, cost, visits=visits, previous_home=home)

    recompute, update = run(stages[0], COSTS[0], state.home), run(stages[1], COSTS[1], None)
    together = run(stages[1], COST_MODEL.price(TOPOLOGY), state.home)
    assert recompute.push == 0
    assert update.push > 0
    np.testing.assert_allclose(recompute.total + update.total, together.total, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_micro_batches": (2, 4), "samples": [None]},
            "samples has 1 entries, but num_micro_batches has 2 stages",
        ),
        (
            {"num_micro_batches": (2, 4), "starts": [assign_in_order(32, TOPOLOGY, num_micro_batches=2)]},
            "starts has 1 entries, but num_micro_batches has 2 stages",
        ),
        (
            {"num_micro_batches": (2, 4), "samples": [None, range(16, 40)]},
            r"samples\[1\]=range\(16, 40\) must be a range of consecutive samples among 32",
        ),
        (
            {"num_micro_batches": (2, 4), "samples": [None, range(0, 32, 2)]},
            r"samples\[1\]=range\(0, 32, 2\) must be a range of consecutive samples among 32",
        ),
        (
            {"num_micro_batches": (2, 4), "samples": [None, range(16, 19)]},
            r"num_micro_batches\[1\]=4 must be an integer of at least 1 and at most 3",
        ),
        ({"num_micro_batches": ()}, "num_micro_batches must have at least one entry, one for each stage"),
        (
            {"num_micro_batches": (4, 40)},
            r"num_micro_batches\[1\]=40 must be an integer of at least 1 and at most 32",
        ),
        (
            {"num_micro_batches": (2, 4), "cost": COSTS[:1]},
            "cost has 1 entries; it must have one for each of 2 stages",
        ),
        (
            {
                "num_micro_batches": (2, 4),
                "cost": (COSTS[0], dataclasses.replace(COSTS[1], hierarchical=False)),
            },
            r"cost has hierarchical=\[True, False\], which must be the same in all stages",
        ),
        ({"num_micro_batches": (2, 4), "rounds": -1}, "rounds=-1 must be an integer of at least 0"),
    ],
)
def test_invalid_stages_are_rejected(replay, options, message):
    with pytest.raises(ValueError, match=message):
        plan_stages(replay, static(), (), TOPOLOGY, **options)


@pytest.mark.slow
def test_counts_and_routes_give_the_plans_of_the_replay(replay):
    counts = sample_load(replay, num_experts=8).astype(np.uint8), replay.mask.sum(1)
    options = {"num_micro_batches": STAGES, "cost": COSTS, "samples": (None, range(8, 32))} | {
        "assign": ASSIGN,
        "key": KEY,
    }
    expected = plan_stages(replay, PLANNER, first_state(), TOPOLOGY, **options, rounds=1)
    routes = sample_routes(replay)
    result = plan_stage_loads(*counts, PLANNER, first_state(), TOPOLOGY, **options, rounds=1, routes=routes)
    chex.assert_trees_all_equal(result[0], expected[0])
    with pytest.raises(ValueError, match=r"sample_load: expected shape \(32, 2, 8\), found \(32, 2, 7\)"):
        plan_stage_loads(counts[0][..., :7], counts[1], PLANNER, first_state(), TOPOLOGY, **options)
