"""Planning a batch from its replay: assignments, rounds, and gradients that do not depend on the assignment."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load, replica_experts
from relibra_jax.contract.planner import Placement, Planner, PlanRequest
from relibra_jax.contract.replay import expert_load, sample_load
from relibra_jax.contract.types import BALANCE, EMPTY, Assignment, BatchPlan, Price, RoutingReplay, Topology
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.batch import Batch, count_batch
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.relibra import keep_homes, relibra
from relibra_jax.planning.replication import replicate_experts, without_replicas
from relibra_jax.planning.starts import start_assignment

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
MICRO_BATCHES = 4


@pytest.fixture(scope="module")
def replay():
    """Make a replay of 32 samples, each of which prefers some experts."""
    rng = np.random.default_rng(0)
    liked = rng.integers(8, size=(32, 1, 1, 8)) < 2
    score = rng.random((32, 12, 2, 8)) + 0.6 * liked
    ids = np.argsort(-score, axis=-1)[..., :2].astype(np.uint8)
    return RoutingReplay(ids, np.arange(12) < rng.integers(4, 13, 32)[:, None])


@pytest.fixture(scope="module")
def planner():
    return relibra(place=functools.partial(place_experts, steps=300))


ASSIGN = functools.partial(assign_samples, steps=500)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def update(planner):
    """Return the planner's update, compiled once."""
    return jax.jit(planner.update)


@pytest.fixture(scope="module")
def in_order(replay):
    """Return the load of samples assigned in order."""
    return expert_load(replay, assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES), num_experts=8)


def start(planner):
    return planner.init(TOPOLOGY, 2, key=jax.random.key(0))


def in_order_stage():
    """Return a stage whose samples start in their order."""
    return Stage(MICRO_BATCHES, start=assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES))


def packed_samples(lengths):
    return start_assignment(lengths, TOPOLOGY, num_micro_batches=MICRO_BATCHES, price=BALANCE)


@pytest.mark.long
def test_plan_batch_keeps_samples_without_assign(replay, planner, update, in_order):
    stage = in_order_stage()
    only_moves = Planner(planner.init, update)
    (batch_plan,), after = plan_batch(replay, only_moves, start(planner), TOPOLOGY, stages=[stage])
    assert type(batch_plan) is BatchPlan
    chex.assert_trees_all_equal(batch_plan.assignment, stage.start)
    np.testing.assert_array_equal(batch_plan.load, in_order)
    plan, expected = update(PlanRequest(in_order), start(planner), TOPOLOGY)
    chex.assert_trees_all_equal(batch_plan.plan, plan)
    chex.assert_trees_all_equal(after.home, expected.home)
    chex.assert_trees_all_equal(jax.random.key_data(after.key), jax.random.key_data(expected.key))


@pytest.mark.parametrize("rounds", [0, 1])
def test_plan_batch_packs_samples_by_default(replay, rounds):
    """The first plan is for packed samples, as is the result without rounds, with jit and without."""
    packed = packed_samples(replay.mask.sum(1))
    loads = []

    def update(request, state, topology):
        jax.debug.callback(loads.append, request.load, ordered=True)
        return static().update(request, state, topology)

    recorder = Planner(static().init, update)

    def plan(replay):
        options = {"stages": MICRO_BATCHES, "assign": ASSIGN if rounds else None, "key": KEY}
        return plan_batch(replay, recorder, (), TOPOLOGY, **options, rounds=rounds)[0]

    alone = plan(replay)
    jax.effects_barrier()
    np.testing.assert_array_equal(loads[0], expert_load(replay, packed, num_experts=8))
    if not rounds:
        chex.assert_trees_all_equal(alone.assignment, packed)
        compiled = jax.jit(plan)(replay)
        chex.assert_trees_all_equal(compiled.load, alone.load)
        room = packed.sample.shape[-1]
        assert compiled.assignment.sample.shape[-1] == 8, "four times the mean"
        np.testing.assert_array_equal(compiled.assignment.sample[..., :room], packed.sample)
        assert (compiled.assignment.sample[..., room:] == EMPTY).all()


def test_plan_batch_rejects_a_start_of_other_ranks(replay):
    message = r"micro-batches and ranks of start: expected shape \(4, 2, 2\), found \(2, 2, 2\)"
    other = assign_in_order(32, TOPOLOGY, num_micro_batches=2)
    with pytest.raises(ValueError, match=message):
        plan_batch(replay, static(), (), TOPOLOGY, stages=[Stage(MICRO_BATCHES, start=other)])


@pytest.mark.slow
def test_plan_batch_evens_out_what_placement_cannot(replay, planner, update, in_order):
    """With jit and without, the returned load is that of the assignment."""

    def run(replay, state):
        return plan_batch(replay, planner, state, TOPOLOGY, stages=MICRO_BATCHES, assign=ASSIGN, key=KEY)

    batch_plan, _ = jax.jit(run)(replay, start(planner))
    load = expert_load(replay, batch_plan.assignment, num_experts=8)
    np.testing.assert_array_equal(batch_plan.load, load)
    check_plan(batch_plan.plan, batch_plan.load, TOPOLOGY)
    samples = np.asarray(batch_plan.assignment.sample)
    assert sorted(samples[samples != EMPTY]) == list(range(32))
    still, _ = update(PlanRequest(in_order), start(planner), TOPOLOGY)
    assert batch_imbalance(rank_load(batch_plan.plan)) < batch_imbalance(rank_load(still))


@pytest.mark.parametrize("rounds", [1, 3])
def test_plan_batch_alternates_and_refines(replay, rounds):
    """Each round assigns samples to the last homes, then plans from the first state with them as ``start``."""
    calls, homes, starts = [], [], []

    def update(request, state, topology):
        jax.debug.callback(lambda *data: calls.append(data), request.load, state, request.start, ordered=True)
        plan, _ = static().update(request, (), topology)
        # Fewer copies for the busiest ranks make every round cheaper than those before it.
        quota = plan.quota // (2 + jnp.where(request.start[0, 0] == EMPTY, -1, request.start[0, 0]))
        return plan._replace(home=(request.start + 1) % 8, quota=quota), state + 1

    def assign(batch, placement, topology, *, start, price, key):
        jax.debug.callback(
            lambda *data: (homes.append(data[0]), starts.append(data[1])), placement.home, start.sample
        )
        in_order = assign_in_order(32, topology, num_micro_batches=len(start.sample))
        return Assignment(in_order.sample[::-1])

    recorder = Planner(lambda *_, key: 0, update)
    stage = in_order_stage()
    (batch_plan,), after = plan_batch(
        replay, recorder, 0, TOPOLOGY, stages=[stage], assign=assign, rounds=rounds
    )
    jax.effects_barrier()
    assert len(homes) == rounds
    assert [int(state) for _, state, _ in calls] == [0] * (rounds + 1)
    assert after == 1
    assert (calls[0][2] == EMPTY).all(), "there are no homes to start from at first"
    np.testing.assert_array_equal(starts[0], stage.start.sample)
    for sample in starts[1:]:
        np.testing.assert_array_equal(sample, batch_plan.assignment.sample)
    for turn, home in enumerate(homes):
        np.testing.assert_array_equal(home, np.full((2, 8), turn))
        np.testing.assert_array_equal(calls[1 + turn][2], home)
        np.testing.assert_array_equal(calls[1 + turn][0], batch_plan.load)
    np.testing.assert_array_equal(batch_plan.load[::-1], calls[0][0])


def quota_per_round(divisors):
    """Make a planner whose quotas, and so the price, shrink by the divisor of its round; its home is the round."""
    table = jnp.asarray(divisors, jnp.int32)

    def update(request, state, topology):
        plan, _ = static().update(request, (), topology)
        number = (request.start[0, 0] + 1) % 8
        return plan._replace(home=(request.start + 1) % 8, quota=plan.quota // table[number]), number

    return Planner(lambda *_, key: 0, update)


@pytest.mark.parametrize(
    ("divisors", "best"), [((1, 4, 2, 3), 1), ((4, 1, 2, 3), 0), ((1, 2, 3, 4), 3), ((2, 2, 2, 2), 0)]
)
@pytest.mark.parametrize(
    "cost", [BALANCE, Price(token=0.0, copy=2.0, crossing=1.0, spread=0.0, move=0.0, push=0.0)]
)
def test_plan_batch_returns_the_cheapest_round(replay, divisors, best, cost):
    """Of all rounds the cheapest is returned with its state, and the earliest of equally cheap ones."""

    def assign(batch, placement, topology, *, start, price, key):
        return start

    options = {"stages": [in_order_stage()], "assign": assign, "rounds": 3, "cost": cost}
    (batch_plan,), state = plan_batch(replay, quota_per_round(divisors), 0, TOPOLOGY, **options)
    assert int(state) == best
    np.testing.assert_array_equal(batch_plan.plan.home, np.full((2, 8), best))


@pytest.mark.parametrize("transfer", ["nothing", "move", "crossing", "push"])
def test_plan_batch_compares_with_staying_where_transfers_cost_something(replay, transfer):
    """The planner gathers the busiest experts on one node. They were spread before, and better so."""

    def in_order(load):
        return jnp.argsort(jnp.argsort(-load, axis=1), axis=1)

    def gather(request, previous_home, topology, *, key):
        return Placement.without_residents(in_order(request.by_expert.sum(0)), topology)

    planner = relibra(place=gather)
    spread = jnp.array([0, 4, 6, 2, 3, 7, 5, 1])[in_order(sample_load(replay, num_experts=8).sum(0))]
    price = BALANCE if transfer == "nothing" else dataclasses.replace(BALANCE, **{transfer: 1e-3})
    before = start(planner)._replace(home=spread)
    batch_plan, state = plan_batch(replay, planner, before, TOPOLOGY, stages=MICRO_BATCHES, cost=price)
    check_plan(batch_plan.plan, batch_plan.load, TOPOLOGY)
    stayed = Placement.without_residents(spread, TOPOLOGY)
    stayed = planner.replicate(PlanRequest(batch_plan.load), stayed, TOPOLOGY)

    def fullest(plan):
        """Return the load of the fullest rank, summed over micro-batches and layers."""
        return np.asarray(rank_load(plan)).max((2, 3)).sum()

    assert (fullest(batch_plan.plan) <= fullest(stayed)) == (transfer != "nothing")
    assert (replica_experts(batch_plan.plan, TOPOLOGY) != EMPTY).any()
    np.testing.assert_array_equal(state.home, batch_plan.plan.home)


def test_plan_batch_assigns_to_given_homes_first(replay):
    """With ``start`` no plan is made for the first assignment: the first round assigns to the given placement."""
    calls, placements = [], []
    topology = dataclasses.replace(TOPOLOGY, resident_slots=1)

    def update(request, state, topology):
        jax.debug.callback(calls.append, request.start, ordered=True)
        return static().update(request, state, topology)

    def assign(batch, placement, topology, *, start, price, key):
        jax.debug.callback(lambda *data: placements.append(data), *placement, ordered=True)
        return start

    home = np.random.default_rng(0).permuted(np.tile(np.arange(8, dtype=np.int32), (2, 1)), axis=1)
    given = Placement(home, np.full((2, 2, 2, 1), 3, np.int32))
    recorder = Planner(static().init, update)
    options = {"stages": MICRO_BATCHES, "assign": assign, "rounds": 2, "start": given}
    plan_batch(replay, recorder, (), topology, **options)
    jax.effects_barrier()
    assert len(calls) == len(placements) == 2
    chex.assert_trees_all_equal(Placement(*placements[0]), given)
    np.testing.assert_array_equal(calls[0], home)
    np.testing.assert_array_equal(calls[1], np.tile(np.arange(8), (2, 1)))
    plan_batch(replay, recorder, (), topology, stages=MICRO_BATCHES, start=given)
    jax.effects_barrier()
    np.testing.assert_array_equal(calls[2], home, err_msg="without assigning samples")


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.long)])
def test_plan_batch_is_the_same_under_jit(replay, rounds, x64):
    """Under jit the rounds are one loop with the same result; 64-bit types change nothing."""
    short = relibra(place=functools.partial(place_experts, steps=50))
    stage = Stage(MICRO_BATCHES, start=packed_samples(replay.mask.sum(1)))

    def plan(replay, state):
        options = {"stages": [stage], "assign": ASSIGN, "key": KEY, "rounds": rounds}
        return plan_batch(replay, short, state, TOPOLOGY, **options)

    alone, after = plan(replay, start(short))
    with jax.enable_x64(x64):
        compiled, later = jax.jit(plan)(replay, start(short))
    chex.assert_trees_all_equal(compiled, alone)
    chex.assert_trees_all_equal(*(jax.random.key_data(state.key) for state in (after, later)))


def test_plan_batch_takes_the_state_of_its_planner_alone(replay, planner):
    plan = functools.partial(plan_batch, replay, planner, topology=TOPOLOGY, stages=MICRO_BATCHES)
    plan(planner.init(TOPOLOGY, 2, key=jax.random.PRNGKey(0)))  # keys of the old style too
    for state in (None, jnp.zeros(3), planner.init(TOPOLOGY, 3, key=jax.random.key(0))):
        with pytest.raises(ValueError, match="state must be that of the planner for 2 layers, "):
            plan(state)


def test_plan_batch_rejects_bad_loads_and_rounds(replay):
    batch = Batch(np.array(sample_load(replay, num_experts=8)), replay.mask.sum(1, dtype=np.int32))
    options = {"stages": MICRO_BATCHES, "assign": ASSIGN, "key": KEY}
    with pytest.raises(ValueError, match="rounds=-1 must be an integer of at least 0"):
        plan_batch(batch, static(), (), TOPOLOGY, **options, rounds=-1)
    batch.sample_load[0, 1, 3] = -5000
    with pytest.raises(ValueError, match=r"layer 1, .* expert 3: load -.* is negative"):
        plan_batch(batch, static(), (), TOPOLOGY, **options)


def test_plan_batch_rejects_replays_that_it_would_count_wrong(replay):
    ids, mask = map(np.array, replay)
    sample, token = np.argwhere(mask)[5]
    ids[sample, token, 1, 0] = 8
    wrong = {
        f"sample {sample}, token {token}, layer 1: expert id 8 is outside 0..7": RoutingReplay(ids, mask),
        "mask must be bool": replay._replace(mask=mask.astype(int)),
        "expert_ids must be integers": replay._replace(expert_ids=ids.astype(float)),
        "the batch has no samples": RoutingReplay(ids[:0], mask[:0]),
    }
    for message, other in wrong.items():
        with pytest.raises(ValueError, match=message):
            plan_batch(other, static(), (), TOPOLOGY, stages=MICRO_BATCHES)
    batch = Batch(np.ones((4, 2, 8)), np.ones(4, int))
    with pytest.raises(ValueError, match="sample_load must be integers, not float64"):
        plan_batch(batch, static(), (), TOPOLOGY, stages=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crossing": float("nan")}, "cost.crossing=nan must be at least 0"),
        ({"push": -1.0}, "cost.push=-1.0 must be at least 0"),
        ({"copy": 0.0}, "cost.copy=0.0 must be positive"),
    ],
)
def test_plan_batch_rejects_invalid_prices(replay, change, message):
    price = {"token": 1.0, "copy": 1.0, "crossing": 1.0, "spread": 1.0, "move": 1.0, "push": 1.0}
    with pytest.raises(ValueError, match=message):
        plan_batch(replay, static(), (), TOPOLOGY, stages=MICRO_BATCHES, cost=Price(**price | change))


def test_plan_batch_runs_baselines_in_rounds(replay):
    """A planner that reads nothing but the load plans every round."""
    options = {"stages": MICRO_BATCHES, "assign": ASSIGN, "key": KEY, "rounds": 2}
    batch_plan, _ = plan_batch(replay, static(), (), TOPOLOGY, **options)
    check_plan(batch_plan.plan, batch_plan.load, TOPOLOGY)


def test_plan_batch_assigns_to_the_first_homes_of_a_planner_that_keeps_them(replay):
    """Before its first batch such a planner knows no homes, so the first plan's count, not EMPTY ones."""
    homes = []

    def assign(batch, placement, topology, *, start, price, key):
        jax.debug.callback(lambda home: homes.append(home), placement.home)
        return start

    planner = PLANNERS["eplb"].planner
    state = planner.init(TOPOLOGY, 2, key=KEY)
    plan_batch(replay, planner, state, TOPOLOGY, stages=MICRO_BATCHES, assign=assign, key=KEY, rounds=1)
    jax.effects_barrier()
    assert all((home >= 0).all() for home in homes)
    assert homes


def test_plan_batch_gives_the_plan_of_the_replay_for_counts(replay):
    counts = Batch(sample_load(replay, num_experts=8), replay.mask.sum(1, dtype=np.int32))
    options = {"stages": MICRO_BATCHES, "assign": ASSIGN, "key": KEY}
    of_replay, _ = plan_batch(replay, static(), (), TOPOLOGY, **options)
    for batch in (counts, count_batch(replay, TOPOLOGY)):
        counted, _ = plan_batch(batch, static(), (), TOPOLOGY, **options)
        chex.assert_trees_all_equal(counted, of_replay)


@pytest.mark.slow
def test_place_experts_starts_from_the_homes_of_the_request(planner, update, in_order):
    """With hardly any search steps, the result is at least as balanced as the homes from which it starts."""
    state = start(planner)
    result, _ = update(PlanRequest(in_order), state, TOPOLOGY)
    short = relibra(place=functools.partial(place_experts, steps=1))
    from_start, from_result = (
        short.update(PlanRequest(in_order, start=homes), state, TOPOLOGY)[0] for homes in (None, result.home)
    )
    assert batch_imbalance(rank_load(from_result)) <= batch_imbalance(rank_load(result)) + 1e-6
    assert batch_imbalance(rank_load(from_result)) < batch_imbalance(rank_load(from_start))


def replicate_nothing(request, placement, topology):
    return without_replicas(request.by_expert, placement.home, topology)


def test_relibra_gains_by_each_of_its_parts(in_order):
    balance = {}
    for name, parts in {
        "nothing": {"place": keep_homes, "replicate": replicate_nothing},
        "reorder": {"place": functools.partial(place_experts, steps=300), "replicate": replicate_nothing},
        "replicate": {"place": keep_homes, "replicate": replicate_experts},
    }.items():
        part = relibra(**parts)
        plan, _ = part.update(PlanRequest(in_order), start(part), TOPOLOGY)
        check_plan(plan, in_order, TOPOLOGY)
        balance[name] = float(batch_imbalance(rank_load(plan)))
    assert balance["reorder"] < balance["nothing"]
    assert balance["replicate"] < balance["nothing"]


def loss(params, ids, mask, targets, total):
    """Compute a router's squared error over replayed experts, summed over tokens, divided by the batch's tokens."""
    x = params["embed"][targets % 5]
    gate = jax.nn.softmax(jnp.take_along_axis(x @ params["router"], ids, axis=-1))
    out = jnp.einsum(
        "...k,...kd->...d", gate, jnp.tanh(jnp.einsum("...d,...kde->...ke", x, params["experts"][ids]))
    )
    error = jnp.square(out - targets[..., None] / 7).sum(-1)
    return jnp.where(mask, error, 0).sum() / total


gradient = jax.jit(jax.grad(loss))


@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=15, deadline=None)
def test_batch_gradient_does_not_depend_on_the_assignment(replay, seed):
    """Every assignment accumulates the same gradient, which is the condition for assigning samples freely."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": rng.normal(size=(5, 4)),
        "router": rng.normal(size=(4, 8)),
        "experts": rng.normal(size=(8, 4, 4)),
    }
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    targets = jnp.asarray(rng.integers(20, size=replay.mask.shape))
    in_order = assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES)
    shuffled = Assignment(rng.permutation(32)[in_order.sample])

    def accumulate(assignment):
        total = None
        for rows in np.asarray(assignment.sample).reshape(MICRO_BATCHES, -1):
            part = gradient(
                params, replay.expert_ids[rows, :, 0].astype(int), replay.mask[rows], targets[rows], mass
            )
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    mass = float(replay.mask.sum())
    chex.assert_trees_all_close(accumulate(shuffled), accumulate(in_order), rtol=1e-4, atol=1e-5)
