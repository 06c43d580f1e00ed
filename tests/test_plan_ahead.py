"""Plans for batches whose rollout still runs, and plans that start from their homes and residents."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax import (
    EMPTY,
    PLANNERS,
    Batch,
    Placement,
    Stage,
    Topology,
    assign_in_order,
    assign_samples,
    batch_imbalance,
    check_plan,
    fill_unfinished,
    place_experts,
    plan_batch,
    rank_load,
    relibra,
)

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=16, replica_slots=1)
SAMPLES, LAYERS, MICRO_BATCHES = 48, 3, 4
KEY, ASSIGN = jax.random.key(0), functools.partial(assign_samples, steps=100)


@pytest.fixture(scope="module")
def counts():
    """Samples of two domains with separate experts, in groups of four, with lengths from 20 to 59."""
    rng = np.random.default_rng(0)
    popular = rng.exponential(size=(2, LAYERS, 16)) ** 2
    domain = np.repeat(rng.integers(0, 2, SAMPLES // 4), 4)
    chance = popular[domain] * rng.gamma(4.0, size=(SAMPLES, LAYERS, 16))
    lengths = rng.integers(20, 60, SAMPLES).astype(np.int32)
    load = np.array(
        [
            [rng.multinomial(2 * number, each / each.sum()) for each in layers]
            for layers, number in zip(chance, lengths, strict=True)
        ]
    )
    return Batch(load.astype(np.int32), lengths)


def first_state(planner):
    return planner.init(TOPOLOGY, LAYERS, key=jax.random.key(1))


def in_order():
    return assign_in_order(SAMPLES, TOPOLOGY, num_micro_batches=MICRO_BATCHES)


def plan(counts, planner, *, traced, **options):
    def run(counts, state):
        stages = [Stage(MICRO_BATCHES, start=in_order())]
        return plan_batch(counts, planner, state, TOPOLOGY, stages=stages, key=KEY, **options)

    (batch_plan,), _ = (jax.jit(run) if traced else run)(counts, first_state(planner))
    return batch_plan


def random_placement(seed, resident_slots=0):
    rng = np.random.default_rng(seed)
    home = np.stack([rng.permutation(16) for _ in range(LAYERS)]).astype(np.int32)
    return Placement(jnp.asarray(home), jnp.full((LAYERS, 2, 2, resident_slots), EMPTY, jnp.int32))


@pytest.mark.parametrize("finished", [1, 5, 24, 48])
def test_fill_unfinished_takes_the_nearest_finished_sample(counts, finished):
    load, lengths = counts.sample_load, counts.lengths
    done = np.zeros(SAMPLES, bool)
    done[np.random.default_rng(finished).choice(SAMPLES, finished, replace=False)] = True
    distance = np.abs(np.arange(SAMPLES)[:, None] - np.flatnonzero(done))
    nearest = np.flatnonzero(done)[distance.argmin(1)]  # the earlier one of two
    unfinished = counts._replace(sample_load=np.where(done[:, None, None], load, 99))
    actual = jax.jit(fill_unfinished)(unfinished, done)
    chex.assert_trees_all_equal(actual, Batch(load[nearest], lengths[nearest]))


def test_fill_unfinished_without_finished_samples_counts_nothing(counts):
    filled = fill_unfinished(counts, np.zeros(SAMPLES, bool))
    assert not filled.sample_load.any()
    assert not filled.lengths.any()


def stay(request, previous_home, topology, *, key):
    """Return the homes from which the search starts."""
    return Placement(request.start, random_placement(0).resident)


@pytest.mark.slow
@pytest.mark.parametrize("traced", [pytest.param(False, marks=pytest.mark.long), True])
def test_plan_batch_assigns_samples_to_the_homes_of_the_start_first(counts, traced):
    start, planner = random_placement(3), relibra(place=stay)
    actual = plan(counts, planner, assign=ASSIGN, rounds=1, start=start, traced=traced)
    np.testing.assert_array_equal(actual.plan.home, start.home)
    desired = ASSIGN(counts, start, TOPOLOGY, start=in_order(), key=KEY)
    np.testing.assert_array_equal(actual.assignment.sample, desired.sample)
    in_place = plan(counts, planner, start=start, traced=traced)
    np.testing.assert_array_equal(in_place.plan.home, start.home)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relibra", "static", "eplb", "lplb"])
def test_plan_batch_gives_valid_plans_from_any_start(counts, name):
    entry = PLANNERS[name]
    actual = plan(counts, entry.planner, assign=ASSIGN, rounds=2, start=random_placement(5), traced=True)
    check_plan(actual.plan, actual.load, TOPOLOGY, across_nodes=entry.across_nodes)
    assert sorted(np.asarray(actual.assignment.sample).ravel().tolist()) == list(range(SAMPLES))


@pytest.mark.slow
def test_plan_batch_with_a_start_reaches_the_same_balance_in_half_of_the_rounds(counts):
    done = counts.lengths <= np.quantile(counts.lengths, 0.75)
    planner = relibra(place=functools.partial(place_experts, steps=200))
    imbalance = {}
    early = plan(fill_unfinished(counts, done), planner, assign=ASSIGN, traced=True)
    start = Placement(jnp.asarray(early.plan.home), random_placement(0).resident)
    for name, options in {
        "nothing": {"rounds": 4},
        "early": {"rounds": 2, "start": start},
        "random homes": {"rounds": 0, "start": random_placement(6)},
    }.items():
        actual = plan(counts, planner, assign=ASSIGN, traced=True, **options)
        imbalance[name] = float(batch_imbalance(rank_load(actual.plan)))
    assert imbalance["early"] < 1 + 1.1 * (imbalance["nothing"] - 1)
    # The search has something to gain over random homes.
    assert imbalance["random homes"] > 1 + 1.5 * (imbalance["nothing"] - 1)


def test_plan_batch_rejects_a_start_of_other_shapes(counts):
    start = random_placement(0)
    options = {"assign": ASSIGN, "traced": False}
    with pytest.raises(ValueError, match=r"start.home: expected shape \(3, 16\), found \(2, 16\)"):
        plan(counts, relibra(), start=start._replace(home=start.home[:2]), **options)
    twice = start.home.at[1, 4].set(start.home[1, 5])
    with pytest.raises(ValueError, match=r"start.home, layer 1, home slot \d+: owned by"):
        plan(counts, relibra(), start=start._replace(home=twice), **options)
    with pytest.raises(ValueError, match=r"start.resident: expected shape .*0\), found .*1\)"):
        plan(counts, relibra(), start=random_placement(0, resident_slots=1), **options)
