"""Planning a batch from its replay: assignments, rounds, and gradients that do not depend on the assignment."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.replay import expert_load, sample_load
from relibra_jax.contract.types import EMPTY, Assignment, BatchPlan, Planner, Price, RoutingReplay, Topology
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.extra_args import with_extra_args
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.plan_batch import plan_batch, plan_loads
from relibra_jax.planning.relibra import keep_homes, relibra
from relibra_jax.planning.replication import replicate_experts, without_replicas
from relibra_jax.planning.sample_packing import pack_samples

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


@pytest.mark.slow
def test_samples_stay_where_they_start_unless_assigned(replay, planner, update, in_order):
    first = assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES)
    batch_plan, after = plan_batch(
        replay,
        Planner(planner.init, update),
        start(planner),
        TOPOLOGY,
        num_micro_batches=MICRO_BATCHES,
        start=first,
    )
    assert type(batch_plan) is BatchPlan
    chex.assert_trees_all_equal(batch_plan.assignment, first)
    np.testing.assert_array_equal(batch_plan.load, in_order)
    plan, expected = update(in_order, start(planner), TOPOLOGY)
    chex.assert_trees_all_equal(batch_plan.plan, plan)
    chex.assert_trees_all_equal(after.home, expected.home)
    chex.assert_trees_all_equal(jax.random.key_data(after.key), jax.random.key_data(expected.key))


@pytest.mark.parametrize("rounds", [0, 1])
def test_samples_are_packed_by_default(replay, rounds):
    """The first plan is for packed samples, as is the result without rounds, with jit and without."""
    packed = pack_samples(replay.mask.sum(1), TOPOLOGY, num_micro_batches=MICRO_BATCHES)
    loads = []

    def update(load, state, topology):
        jax.debug.callback(loads.append, load, ordered=True)
        return static().update(load, state, topology)

    def plan(replay):
        recorder = Planner(static().init, update)
        options = {"num_micro_batches": MICRO_BATCHES, "assign": ASSIGN if rounds else None, "key": KEY}
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


def test_a_start_of_other_ranks_is_rejected(replay):
    message = r"micro-batches and ranks of start: expected shape \(4, 2, 2\), found \(2, 2, 2\)"
    with pytest.raises(ValueError, match=message):
        plan_batch(
            *(replay, static(), (), TOPOLOGY),
            num_micro_batches=MICRO_BATCHES,
            start=assign_in_order(32, TOPOLOGY, num_micro_batches=2),
        )


@pytest.mark.slow
def test_assignment_evens_out_what_placement_cannot(replay, planner, update, in_order):
    """With jit and without, the returned load is that of the assignment."""
    run = functools.partial(
        plan_batch,
        planner=planner,
        topology=TOPOLOGY,
        num_micro_batches=MICRO_BATCHES,
        assign=ASSIGN,
        key=KEY,
    )
    batch_plan, _ = jax.jit(lambda replay, state: run(replay, state=state))(replay, start(planner))
    load = expert_load(replay, batch_plan.assignment, num_experts=8)
    np.testing.assert_array_equal(batch_plan.load, load)
    check_plan(batch_plan.plan, batch_plan.load, TOPOLOGY)
    samples = np.asarray(batch_plan.assignment.sample)
    assert sorted(samples[samples != EMPTY]) == list(range(32))
    still, _ = update(in_order, start(planner), TOPOLOGY)
    assert batch_imbalance(rank_load(batch_plan.plan)) < batch_imbalance(rank_load(still))


@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_alternate_and_refine(replay, rounds):
    """Each round assigns samples to the last homes, then plans from the first state with them as ``refine``."""
    calls, homes, refined = [], [], []

    def update(load, state, topology, *, refine):
        jax.debug.callback(lambda *data: calls.append(data), load, state, refine, ordered=True)
        plan, _ = static().update(load, (), topology)
        return plan._replace(home=(refine + 1) % 8), state + 1

    def assign(sample_load, tokens, home, topology, *, num_micro_batches, refine):
        jax.debug.callback(
            lambda *data: (homes.append(data[0]), refined.append(data[1])), home, refine.sample
        )
        return Assignment(assign_in_order(32, topology, num_micro_batches=num_micro_batches).sample[::-1])

    recorder = Planner(lambda *_, key: 0, update)
    first = assign_in_order(32, TOPOLOGY, num_micro_batches=MICRO_BATCHES)
    batch_plan, after = plan_batch(
        *(replay, recorder, 0, TOPOLOGY),
        num_micro_batches=MICRO_BATCHES,
        start=first,
        assign=assign,
        rounds=rounds,
    )
    jax.effects_barrier()
    assert len(homes) == rounds
    assert [int(state) for _, state, _ in calls] == [0] * (rounds + 1)
    assert after == 1
    assert (calls[0][2] == EMPTY).all(), "there are no homes to refine at first"
    np.testing.assert_array_equal(refined[0], first.sample)
    for sample in refined[1:]:
        np.testing.assert_array_equal(sample, batch_plan.assignment.sample)
    for turn, home in enumerate(homes):
        np.testing.assert_array_equal(home, np.full((2, 8), turn))
        np.testing.assert_array_equal(calls[1 + turn][2], home)
        np.testing.assert_array_equal(calls[1 + turn][0], batch_plan.load)
    np.testing.assert_array_equal(batch_plan.load[::-1], calls[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("x64", [False, True])
def test_rounds_are_the_same_under_jit(replay, rounds, x64):
    """Under jit the rounds are one loop with the same result; 64-bit types change nothing."""
    short = relibra(place=functools.partial(place_experts, steps=50))
    packed = pack_samples(replay.mask.sum(1), TOPOLOGY, num_micro_batches=MICRO_BATCHES)
    options = {
        "num_micro_batches": MICRO_BATCHES,
        "start": packed,
        "assign": ASSIGN,
        "key": KEY,
        "rounds": rounds,
    }

    def plan(replay, state):
        return plan_batch(replay, short, state, TOPOLOGY, **options)

    alone, after = plan(replay, start(short))
    with jax.enable_x64(x64):
        compiled, later = jax.jit(plan)(replay, start(short))
    chex.assert_trees_all_equal(compiled, alone)
    chex.assert_trees_all_equal(*(jax.random.key_data(state.key) for state in (after, later)))


def test_bad_loads_and_rounds_are_rejected_with_assignment_too(replay):
    counts = np.array(sample_load(replay, num_experts=8))
    tokens = replay.mask.sum(1, dtype=np.int32)
    options = {"num_micro_batches": MICRO_BATCHES, "assign": ASSIGN, "key": KEY}
    with pytest.raises(ValueError, match="rounds=-1 must be an integer of at least 0"):
        plan_loads(counts, tokens, static(), (), TOPOLOGY, **options, rounds=-1)
    counts[0, 1, 3] = -5000
    with pytest.raises(ValueError, match=r"layer 1, .* expert 3: load -.* is negative"):
        plan_loads(counts, tokens, static(), (), TOPOLOGY, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crossing": float("nan")}, "cost.crossing=nan must be at least 0"),
        ({"push": -1.0}, "cost.push=-1.0 must be at least 0"),
        ({"copy": 0.0}, "cost.copy=0.0 must be positive"),
    ],
)
def test_invalid_unit_times_are_rejected(replay, change, message):
    times = {"token": 1.0, "copy": 1.0, "crossing": 1.0, "spread": 1.0, "move": 1.0, "push": 1.0}
    with pytest.raises(ValueError, match=message):
        plan_batch(
            replay,
            static(),
            (),
            TOPOLOGY,
            num_micro_batches=MICRO_BATCHES,
            cost=Price(**times | change),
        )


def test_planners_without_refine_do_not_receive_it(replay):
    planner = static()
    batch_plan, _ = plan_batch(
        replay, planner, (), TOPOLOGY, num_micro_batches=MICRO_BATCHES, assign=ASSIGN, key=KEY, rounds=2
    )
    check_plan(batch_plan.plan, batch_plan.load, TOPOLOGY)


def test_counts_give_the_plan_of_the_replay(replay):
    tokens = replay.mask.sum(1, dtype=np.int32)
    run = {"num_micro_batches": MICRO_BATCHES, "assign": ASSIGN, "key": KEY}
    counted, _ = plan_loads(sample_load(replay, num_experts=8), tokens, static(), (), TOPOLOGY, **run)
    chex.assert_trees_all_equal(counted, plan_batch(replay, static(), (), TOPOLOGY, **run)[0])


def test_extra_arguments_reach_a_planner_that_names_them():
    """A planner receives the extra arguments that it names, or all if it takes any keyword; ``init`` is unchanged."""
    seen = []

    def names_two(load, state, topology, *, tokens=None, refine=None):
        seen.append({"tokens": tokens, "refine": refine})
        return load, state

    def takes_all(load, state, topology, **extra):
        seen.append(extra)
        return load, state

    extras = {"tokens": 1, "cost": 2, "refine": 3}
    some, every = (Planner(static().init, update) for update in (names_two, takes_all))
    assert with_extra_args(some).update(5, 6, TOPOLOGY, **extras) == (5, 6)
    assert with_extra_args(every).update(5, 6, TOPOLOGY, **extras) == (5, 6)
    assert seen == [{"tokens": 1, "refine": 3}, extras]
    assert with_extra_args(every) is every
    assert with_extra_args(some).init is some.init


@pytest.mark.slow
def test_refining_starts_from_given_homes(planner, update, in_order):
    """With hardly any search steps, refined homes are at least as balanced as those from which they start."""
    state = start(planner)
    result, _ = update(in_order, state, TOPOLOGY)
    short = relibra(place=functools.partial(place_experts, steps=1))
    from_start, from_result = (
        short.update(in_order, state, TOPOLOGY, refine=homes)[0] for homes in (None, result.home)
    )
    assert batch_imbalance(rank_load(from_result)) <= batch_imbalance(rank_load(result)) + 1e-6
    assert batch_imbalance(rank_load(from_result)) < batch_imbalance(rank_load(from_start))


def test_parts_alone(in_order):
    balance = {}
    for name, parts in {
        "nothing": {"place": keep_homes, "replicate": without_replicas},
        "reorder": {"place": functools.partial(place_experts, steps=300), "replicate": without_replicas},
        "replicate": {"place": keep_homes, "replicate": replicate_experts},
    }.items():
        part = relibra(**parts)
        plan, _ = part.update(in_order, start(part), TOPOLOGY)
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
def test_gradient_does_not_depend_on_the_assignment(replay, seed):
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
