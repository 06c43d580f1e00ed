"""Tests of plans for batches whose rollout still runs, and of plans with such a warm start."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax import (
    Topology,
    assign_in_order,
    assign_samples,
    batch_imbalance,
    check_plan,
    plan_loads,
    rank_load,
    relibra,
)
from relibra_jax.contract.types import EMPTY
from relibra_jax.planning.placement import Placement, place_experts
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.unfinished import fill_unfinished

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
    tokens = rng.integers(20, 60, SAMPLES).astype(np.int32)
    load = np.array(
        [
            [rng.multinomial(2 * number, each / each.sum()) for each in layers]
            for layers, number in zip(chance, tokens, strict=True)
        ]
    )
    return load.astype(np.int32), tokens


def first_state(planner):
    return planner.init(TOPOLOGY, LAYERS, key=jax.random.key(1))


def in_order():
    return assign_in_order(SAMPLES, TOPOLOGY, num_micro_batches=MICRO_BATCHES)


def plan(counts, planner, *, traced, **options):
    run = functools.partial(
        plan_loads,
        planner=planner,
        topology=TOPOLOGY,
        num_micro_batches=MICRO_BATCHES,
        start=in_order(),
        key=KEY,
        **options,
    )
    run = jax.jit(run) if traced else run
    return run(*counts, state=first_state(planner))[0]


def random_placement(seed, resident_slots=0):
    rng = np.random.default_rng(seed)
    home = np.stack([rng.permutation(16) for _ in range(LAYERS)]).astype(np.int32)
    return Placement(jnp.asarray(home), jnp.full((LAYERS, 2, 2, resident_slots), EMPTY, jnp.int32))


@pytest.mark.parametrize("finished", [1, 5, 24, 48])
def test_the_nearest_finished_sample_stands_in(counts, finished):
    load, tokens = counts
    done = np.zeros(SAMPLES, bool)
    done[np.random.default_rng(finished).choice(SAMPLES, finished, replace=False)] = True
    distance = np.abs(np.arange(SAMPLES)[:, None] - np.flatnonzero(done))
    nearest = np.flatnonzero(done)[distance.argmin(1)]  # the earlier one of two
    actual = jax.jit(fill_unfinished)(np.where(done[:, None, None], load, 99), tokens, done)
    chex.assert_trees_all_equal(actual, (load[nearest], tokens[nearest]))


def test_nothing_stands_in_where_nothing_has_finished(counts):
    load, tokens = fill_unfinished(*counts, np.zeros(SAMPLES, bool))
    assert not load.any()
    assert not tokens.any()


def stay(load, previous_home, topology, *, refine):
    """Return a placement function that returns its starting point."""
    return Placement(refine, random_placement(0).resident)


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_the_first_turn_assigns_samples_to_the_homes_of_the_warm_start(counts, traced):
    start, planner = random_placement(3), relibra(place=stay)
    actual = plan(counts, planner, assign=ASSIGN, rounds=1, warm_start=start, traced=traced)
    np.testing.assert_array_equal(actual.plan.home, start.home)
    options = {"num_micro_batches": MICRO_BATCHES, "key": KEY, "refine": in_order()}
    desired = ASSIGN(*counts, start.home, TOPOLOGY, **options)
    np.testing.assert_array_equal(actual.assignment.sample, desired.sample)
    in_place = plan(counts, planner, warm_start=start, traced=traced)
    np.testing.assert_array_equal(in_place.plan.home, start.home)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relibra", "static", "eplb", "lplb"])
def test_plans_are_valid_whatever_they_begin_with(counts, name):
    entry = PLANNERS[name]
    actual = plan(counts, entry.planner, assign=ASSIGN, rounds=2, warm_start=random_placement(5), traced=True)
    check_plan(actual.plan, actual.load, TOPOLOGY, across_nodes=entry.across_nodes)
    assert sorted(np.asarray(actual.assignment.sample).ravel().tolist()) == list(range(SAMPLES))


@pytest.mark.slow
def test_half_of_the_turns_come_to_the_same_balance(counts):
    load, tokens = counts
    done = tokens <= np.quantile(tokens, 0.75)
    planner = relibra(place=functools.partial(place_experts, steps=200))
    imbalance = {}
    early = plan(fill_unfinished(load, tokens, done), planner, assign=ASSIGN, traced=True)
    start = Placement(jnp.asarray(early.plan.home), random_placement(0).resident)
    for name, options in {
        "nothing": {"rounds": 4},
        "early": {"rounds": 2, "warm_start": start},
        "random homes": {"rounds": 0, "warm_start": random_placement(6)},
    }.items():
        actual = plan(counts, planner, assign=ASSIGN, traced=True, **options)
        imbalance[name] = float(batch_imbalance(rank_load(actual.plan)))
    assert imbalance["early"] < 1 + 1.1 * (imbalance["nothing"] - 1)
    # The search has something to gain over random homes.
    assert imbalance["random homes"] > 1 + 1.5 * (imbalance["nothing"] - 1)


def test_a_warm_start_of_other_shapes_is_refused(counts):
    start = random_placement(0)
    options = {"assign": ASSIGN, "traced": False}
    with pytest.raises(ValueError, match=r"warm_start.home: expected shape \(3, 16\), found \(2, 16\)"):
        plan(counts, relibra(), warm_start=start._replace(home=start.home[:2]), **options)
    twice = start.home.at[1, 4].set(start.home[1, 5])
    with pytest.raises(ValueError, match=r"warm_start.home, layer 1, home slot \d+: owned by"):
        plan(counts, relibra(), warm_start=start._replace(home=twice), **options)
    with pytest.raises(ValueError, match=r"warm_start.resident: expected shape .*0\), found .*1\)"):
        plan(counts, relibra(), warm_start=random_placement(0, resident_slots=1), **options)
