"""Planning the stages of a batch, which have their own micro-batches and samples, and share homes and residents."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.costs import CLUSTER, MODEL
from support.plans import random_routing

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.planner import Placement, Planner, PlanRequest
from relibra_jax.contract.replay import expert_load, sample_load
from relibra_jax.contract.types import EMPTY, Assignment, Topology, layer_plans
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.cost.copies import padded_exports
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.plan_price import priced_micro_batches
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.planning.routes import sample_routes
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.planning.starts import start_assignment
from relibra_jax.routing.visits import node_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1, resident_slots=1)
STAGES = (Stage(2), Stage(4))
COST_MODEL = CostModel(cluster=CLUSTER, model=MODEL, scale=100.0, recompute=True)
COSTS = (
    COST_MODEL.price(TOPOLOGY, updates=0, recompute=True),
    COST_MODEL.price(TOPOLOGY, updates=1, recompute=False),
)
"""The prices of a recompute and of an update."""
ASSIGN = functools.partial(assign_samples, steps=200)
KEY = jax.random.key(0)
PLANNER = relibra(place=functools.partial(place_experts, steps=50))


@pytest.fixture(scope="module")
def replay():
    return random_routing(np.random.default_rng(0), samples=32, tokens=12, layers=2, experts=8, top_k=2)


def first_state():
    return PLANNER.init(TOPOLOGY, 2, key=jax.random.key(0))


def plan(replay, state, *, stages=STAGES, **options):
    return plan_batch(replay, PLANNER, state, TOPOLOGY, stages=stages, cost=COSTS, **options)


def samples_of(batch_plan):
    samples = np.asarray(batch_plan.assignment.sample)
    return sorted(samples[samples != EMPTY].tolist())


@pytest.fixture(scope="module")
def packed(replay):
    """Return the stages of packed samples."""
    return plan(replay, first_state())[0]


def check_stages(replay, stages):
    """Check that the plans are valid, hold all samples, and share homes and residents, of which there are some."""
    assert [len(stage.load) for stage in stages] == [stage.num_micro_batches for stage in STAGES]
    for stage in stages:
        check_plan(stage.plan, stage.load, TOPOLOGY)
        assert samples_of(stage) == list(range(32))
        np.testing.assert_array_equal(stage.load, expert_load(replay, stage.assignment, num_experts=8))
    recompute, update = (stage.plan for stage in stages)
    np.testing.assert_array_equal(recompute.home, update.home)
    residents = resident_experts(recompute, TOPOLOGY)
    assert (residents != EMPTY).any()
    np.testing.assert_array_equal(residents, resident_experts(update, TOPOLOGY))


@pytest.mark.long  # so do the stages of test_stages_never_exchange_samples_of_updates, and of test_front_door
def test_stages_have_all_samples_packed_alone(replay, packed):
    check_stages(replay, packed)
    for stage, batch_plan, price in zip(STAGES, packed, COSTS, strict=True):
        number = stage.num_micro_batches
        start = start_assignment(replay.mask.sum(1), TOPOLOGY, num_micro_batches=number, price=price)
        chex.assert_trees_all_equal(batch_plan.assignment, start)


@pytest.mark.long
def test_stages_are_assigned_under_jit(replay):
    stages, _ = jax.jit(functools.partial(plan, assign=ASSIGN, key=KEY, rounds=2))(replay, first_state())
    check_stages(replay, stages)


SPLIT = (Stage(2), Stage(2, range(12)), Stage(4, range(12, 32)))
"""A recompute of all samples, and two updates of some samples each."""
SPLIT_COSTS = (COSTS[0], COSTS[1], COSTS[1])


@pytest.mark.parametrize(
    "assign", [pytest.param(None, marks=pytest.mark.long, id="packed"), pytest.param(ASSIGN, id="assigned")]
)
@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, marks=pytest.mark.long, id="eager"),
        pytest.param(True, id="jit", marks=pytest.mark.slow),
    ],
)
def test_stages_never_exchange_samples_of_updates(replay, assign, compiled):
    def split(replay, state):
        options = {"stages": SPLIT, "cost": SPLIT_COSTS, "assign": assign, "key": KEY, "rounds": 2}
        return plan_batch(replay, PLANNER, state, TOPOLOGY, **options)

    stages, _ = (jax.jit(split) if compiled else split)(replay, first_state())
    for stage, own in zip(stages, (range(32), SPLIT[1].samples, SPLIT[2].samples), strict=True):
        check_plan(stage.plan, stage.load, TOPOLOGY)
        assert samples_of(stage) == list(own)
        np.testing.assert_array_equal(stage.load, expert_load(replay, stage.assignment, num_experts=8))
        np.testing.assert_array_equal(stage.plan.home, stages[0].plan.home)
        residents = resident_experts(stage.plan, TOPOLOGY)
        assert (residents != EMPTY).any()
        np.testing.assert_array_equal(residents, resident_experts(stages[0].plan, TOPOLOGY))


def packed_as(start, batch, topology):
    """Pack the samples of a batch into the positions of an assignment."""
    micro_batches, *_, samples_per_rank = start.sample.shape
    return pack_samples(
        batch.lengths, topology, num_micro_batches=micro_batches, samples_per_rank=samples_per_rank
    )


@pytest.mark.slow
def test_stage_is_assigned_as_a_batch_of_its_samples(replay):
    """``assign`` receives the same arguments for an update's samples as for a batch of these samples."""
    received = []

    def assign(batch, placement, topology, *, start, price, key):
        data = (batch.sample_load, batch.lengths, batch.routes, start)
        jax.debug.callback(lambda *data: received.append(data), *data, ordered=True)
        return packed_as(start, batch, topology)

    options = {"stages": SPLIT, "cost": SPLIT_COSTS, "assign": assign, "rounds": 2}
    plan_batch(replay, static(), (), TOPOLOGY, **options)
    jax.effects_barrier()
    assert len(received) == 6
    whole, early, late = received[3:]
    for (load, lengths, routes, start), own in ((early, range(12)), (late, range(12, 32))):
        np.testing.assert_array_equal(load, whole[0][own.start : own.stop])
        np.testing.assert_array_equal(lengths, whole[1][own.start : own.stop])
        inside = np.isin(whole[2].sample, own)
        np.testing.assert_array_equal(routes.sample, np.where(inside, whole[2].sample - own.start, EMPTY))
        samples = np.asarray(start.sample)
        assert sorted(samples[samples != EMPTY].tolist()) == list(range(len(own)))


def recorder(requests):
    """Make a planner with static plans that records its requests."""

    def update(request, state, topology):
        jax.debug.callback(requests.append, request)
        return static().update(request, state, topology)

    return Planner(static().init, update)


def test_stages_without_common_samples_share_one_copy_of_the_routes(replay):
    """Recompute and updates have two copies of every token, not one per stage; prices are weighed by samples."""
    requests = []
    plan_batch(replay, recorder(requests), (), TOPOLOGY, stages=SPLIT, cost=SPLIT_COSTS)
    jax.effects_barrier()
    ((load, routes, _, mean, *_),) = requests
    micro_batch, rank = np.asarray(routes.micro_batch), np.asarray(routes.rank)
    assert len(micro_batch) == 2 * 16_384
    assert (micro_batch != EMPTY).all()
    counted = np.zeros_like(load)
    for layer in range(2):
        at = (micro_batch[:, None], layer, rank[:, None] // 2, rank[:, None] % 2, routes.expert_ids[:, layer])
        np.add.at(counted, at, 1)
    assert np.abs(counted - len(micro_batch) / 2 / replay.mask.sum() * load).max() < 0.02 * counted.max()
    assert mean.copy == pytest.approx((COSTS[0].copy + COSTS[1].copy) / 2)


@pytest.mark.long
def test_stage_is_assigned_to_the_homes_of_all(replay):
    """In every round, each stage gets its own sizes and price, and homes and residents that all stages share."""
    calls = []

    def assign(batch, placement, topology, *, start, price, key):
        micro_batches, *_, samples_per_rank = start.sample.shape

        def record(placement, price):
            calls.append((micro_batches, samples_per_rank, float(price.copy), *placement))

        jax.debug.callback(record, placement, price, ordered=True)
        return packed_as(start, batch, topology)

    stages, _ = plan(replay, first_state(), assign=assign, rounds=2)
    jax.effects_barrier()
    sizes = [
        (stage.num_micro_batches, batch_plan.assignment.sample.shape[-1], pytest.approx(price.copy))
        for stage, batch_plan, price in zip(STAGES, stages, COSTS, strict=True)
    ]
    assert [call[:3] for call in calls] == 2 * sizes
    for recompute, update in zip(calls[::2], calls[1::2], strict=True):
        chex.assert_trees_all_equal(recompute[3:], update[3:])


def test_stages_reach_planners_as_one_batch(replay):
    """Planners receive concatenated loads, routes placed in each stage, mean prices, and pushes counted once."""
    requests = []
    stages, _ = plan_batch(replay, recorder(requests), (), TOPOLOGY, stages=STAGES, cost=COSTS)
    jax.effects_barrier()
    ((load, routes, transitions, price, tokens, start, predicted, exports),) = requests
    assert transitions is None
    assert start is None
    assert predicted is None
    assert exports is None
    np.testing.assert_array_equal(load, np.concatenate([stage.load for stage in stages]))
    np.testing.assert_array_equal(2 * tokens, load[:, 0].sum(-1))
    counted = np.zeros_like(load)
    micro_batch, rank = np.asarray(routes.micro_batch), np.asarray(routes.rank)
    for layer in range(2):
        at = (micro_batch[:, None], layer, rank[:, None] // 2, rank[:, None] % 2, routes.expert_ids[:, layer])
        np.add.at(counted, at, 1)
    per_token = len(micro_batch) / 2 / replay.mask.sum()
    assert np.abs(counted - per_token * load).max() < 0.02 * counted.max(), "8,192 samples of a small batch"
    for name in ("token", "pair", "copy", "crossing", "spread", "gather", "move"):
        parts = [getattr(each, name) for each in COSTS]
        assert getattr(price, name) == pytest.approx(sum(parts) / 2)
    assert price.push == pytest.approx(COSTS[1].push)
    assert COSTS[0].push == 0


@pytest.mark.slow
def test_stages_of_one_entry_are_a_batch(replay):
    planner = PLANNERS["eplb_history"].planner
    state = planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    (stage,), after = plan_batch(replay, planner, state, TOPOLOGY, stages=[Stage(4)], cost=[COSTS[1]])
    batch_plan, expected = plan_batch(replay, planner, state, TOPOLOGY, stages=4, cost=COSTS[1])
    chex.assert_trees_all_equal(stage, batch_plan)
    chex.assert_trees_all_equal(after, expected)


@pytest.mark.long
def test_stages_are_the_same_under_jit(replay, packed):
    """Lengths are data under jit, so the starts are given."""
    stages = [
        dataclasses.replace(stage, start=batch_plan.assignment)
        for stage, batch_plan in zip(STAGES, packed, strict=True)
    ]
    compiled, _ = jax.jit(functools.partial(plan, stages=stages))(replay, first_state())
    chex.assert_trees_all_equal(compiled, packed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["static", "eplb_history", "lplb", "laer"])
def test_stages_are_planned_by_any_planner(replay, name):
    entry = PLANNERS[name]
    state = entry.planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    stages, _ = plan_batch(replay, entry.planner, state, TOPOLOGY, stages=STAGES)
    for stage in stages:
        check_plan(stage.plan, stage.load, TOPOLOGY, across_nodes=entry.across_nodes)
    np.testing.assert_array_equal(stages[0].plan.home, stages[1].plan.home)


@pytest.mark.slow
def test_stages_add_up_to_the_time_of_a_batch(replay):
    """Stages with the same micro-batches take as long as one plan with recompute; moves and pushes count once."""
    state, lengths = first_state(), replay.mask.sum(1)
    stages, _ = plan_batch(replay, PLANNER, state, TOPOLOGY, stages=(Stage(4), Stage(4)), cost=COSTS)

    def run(stage, cost, home):
        visits = node_visits(replay, stage, TOPOLOGY)
        return batch_time(stage, lengths, TOPOLOGY, cost, visits=visits, previous_home=home)

    recompute, update = run(stages[0], COSTS[0], state.home), run(stages[1], COSTS[1], None)
    together = run(stages[1], COST_MODEL.price(TOPOLOGY), state.home)
    assert recompute.push == 0
    assert update.push > 0
    np.testing.assert_allclose(recompute.total + update.total, together.total, rtol=1e-5)


IN_ORDER = assign_in_order(32, TOPOLOGY, num_micro_batches=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stages": (Stage(2), Stage(4, start=IN_ORDER))},
            r"micro-batches and ranks of start: expected shape \(4, 2, 2\), found \(2, 2, 2\)",
        ),
        (
            {"stages": [Stage(2, start=Assignment(np.maximum(IN_ORDER.sample, 1)))]},
            "start has sample 0 0 times; it must have each once",
        ),
        (
            {"stages": [Stage(2, range(31), start=IN_ORDER)]},
            "start has sample 31, which is not among 0 to 30",
        ),
        (
            {"stages": (Stage(2), Stage(4, range(16, 40)))},
            r"stages\[1\]: samples=range\(16, 40\) must be a range of consecutive samples among 32",
        ),
        (
            {"stages": (Stage(2), Stage(4, range(0, 32, 2)))},
            r"stages\[1\]: samples=range\(0, 32, 2\) must be a range of consecutive samples among 32",
        ),
        (
            {"stages": (Stage(2), Stage(4, range(16, 19)))},
            r"stages\[1\]: 3 samples are fewer than its 4 micro-batches",
        ),
        ({"stages": ()}, "stages must have at least one entry"),
        (
            {"stages": (Stage(4), Stage(40))},
            r"stages\[1\]: 32 samples are fewer than its 40 micro-batches",
        ),
        ({"stages": 40}, r"stages\[0\]: 32 samples are fewer than its 40 micro-batches"),
        ({"stages": 0}, r"stages\[0\]: num_micro_batches=0 must be an integer of at least 1"),
        ({"stages": STAGES, "cost": COSTS[:1]}, "cost has 1 entries; it must have one for each of 2 stages"),
        (
            {"stages": STAGES, "cost": (COSTS[0], dataclasses.replace(COSTS[1], hierarchical=False))},
            r"cost has hierarchical=\[True, False\], which must be the same in all stages",
        ),
        (
            {"stages": STAGES, "cost": (COSTS[0], dataclasses.replace(COSTS[1], across_nodes=True))},
            r"cost has across_nodes=\[False, True\], which must be the same in all stages",
        ),
        ({"stages": STAGES, "rounds": -1}, "rounds=-1 must be an integer of at least 0"),
    ],
)
def test_stages_that_are_invalid_are_rejected(replay, options, message):
    with pytest.raises(ValueError, match=message):
        plan_batch(replay, static(), (), TOPOLOGY, **options)


@pytest.mark.long
def test_stages_of_counts_and_routes_are_those_of_the_replay(replay):
    load = sample_load(replay, num_experts=8).astype(np.uint8)
    counts = Batch(load, replay.mask.sum(1), sample_routes(replay))
    options = {"stages": (Stage(2), Stage(4, range(8, 32))), "cost": COSTS, "assign": ASSIGN, "key": KEY}
    expected = plan_batch(replay, PLANNER, first_state(), TOPOLOGY, **options, rounds=1)
    result = plan_batch(counts, PLANNER, first_state(), TOPOLOGY, **options, rounds=1)
    chex.assert_trees_all_equal(result[0], expected[0])
    with pytest.raises(ValueError, match=r"sample_load: expected shape \(32, 2, 8\), found \(32, 2, 7\)"):
        plan_batch(counts._replace(sample_load=load[..., :7]), PLANNER, first_state(), TOPOLOGY, **options)


@pytest.mark.slow
@pytest.mark.parametrize("assign", [None, pytest.param(ASSIGN, marks=pytest.mark.long)])
def test_parts_of_many_micro_batches_have_the_plan_of_all_together(replay, assign):
    """Of 3 and 20 micro-batches, 3 and 8 are priced, so that all are planned in three parts, of which two overlap."""
    stages = [Stage(3), Stage(20)]
    planned, state = plan(replay, first_state(), stages=stages, assign=assign, key=KEY, rounds=1)
    load = np.concatenate([stage.load for stage in planned])
    first = planned[0].plan
    placement = Placement(first.home, resident_experts(first, TOPOLOGY))
    together = replicate_experts(PlanRequest(load), placement, TOPOLOGY)
    for stage, part in zip(planned, (slice(0, 3), slice(3, 23)), strict=True):
        check_plan(stage.plan, expert_load(replay, stage.assignment, num_experts=8), TOPOLOGY)
        np.testing.assert_array_equal(stage.plan.home, state.home)
        np.testing.assert_array_equal(stage.plan.slot_expert, together.slot_expert[part])
        np.testing.assert_array_equal(stage.plan.quota, together.quota[part])


@pytest.mark.slow
def test_no_part_sends_replicas_of_more_experts_than_were_priced():
    """A padded fetch of the whole batch is as long as that of the rank that exports the most in any micro-batch."""
    rng = np.random.default_rng(5)
    topology = Topology(num_nodes=1, ranks_per_node=8, num_experts=64, replica_slots=2)
    popular = rng.lognormal(0, 2, (192, 2, 64))
    load = rng.multinomial(64, popular / popular.sum(-1, keepdims=True))
    batch = Batch(load.astype(np.int32), np.full(192, 64, np.int32))
    price = dataclasses.replace(COST_MODEL, scale=1e5, exchange="padded").price(topology)
    assert price.fetches == "padded"
    state = PLANNER.init(topology, 2, key=KEY)
    planned, _ = plan_batch(batch, PLANNER, state, topology, stages=24, cost=price)

    def exports(plan):
        plans = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, None], layer_plans(plan, planned.load))
        return np.asarray(jax.vmap(lambda plan: padded_exports(plan, topology))(plans))

    priced = priced_micro_batches(24, 1)
    placement = Placement.without_residents(planned.plan.home, topology)
    free = exports(replicate_experts(PlanRequest(planned.load), placement, topology))
    assert free.max() > free[priced].max(), "without a limit, other micro-batches send more"
    assert 2 < exports(planned.plan).max() <= exports(planned.plan)[priced].max()
