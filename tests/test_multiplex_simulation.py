"""Simulated groups: the period against all cyclic orders, and objectives with varying durations."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import POOLS, make_job, random_jobs

from experiments.multiplex.grouping import group_jobs
from experiments.multiplex.groups import Group, smallest_group
from experiments.multiplex.run_metrics import StepDurations
from experiments.multiplex.simulation import (
    ROLLOUT,
    TRAINING,
    conservative_durations,
    draw_durations,
    resample_durations,
    simulate,
    steps_within_slo,
)

DURATIONS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def formula(durations):
    rollouts, trainings = np.asarray(durations, float).T
    return max((rollouts + trainings).max(), rollouts.sum(), trainings.sum())


def seconds_of_a_round(ends):
    """Return the mean length of the last 100 rounds, after the initial rounds in which the schedule settles."""
    return (ends[-1] - ends[-101]) / 100


@settings(max_examples=25)
@given(DURATIONS)
def test_simulate_takes_the_period_in_any_order(durations):
    jobs = [make_job(f"{n}", float(r), float(t)) for n, (r, t) in enumerate(durations)]
    assert Group(tuple(jobs), 1).period == formula(durations)
    for order in itertools.permutations(jobs[1:]):  # a cyclic order has no first job
        timeline = simulate(conservative_durations(Group((jobs[0], *order), 1), steps=300))
        assert np.allclose(seconds_of_a_round(timeline.end[..., TRAINING]), formula(durations))


def two_orders(durations, rollouts, trainings, rounds):
    """Return the end times of rounds if each pool serves the jobs in its own order."""
    free, ready, ends = [0.0, 0.0], dict.fromkeys(rollouts, 0.0), []
    for _ in range(rounds):
        for pool, order in ((ROLLOUT, rollouts), (TRAINING, trainings)):
            for job in order:
                free[pool] = ready[job] = max(free[pool], ready[job]) + durations[job][pool]
        ends.append(free[TRAINING])
    return np.array(ends)


@settings(max_examples=25)
@given(DURATIONS)
def test_period_is_not_beaten_by_any_cyclic_order(durations):
    jobs = range(len(durations))
    # The order of one pool; that of the other may stay fixed, since jobs can be renamed.
    for order in itertools.permutations(jobs):
        ends = two_orders(durations, jobs, order, 250)
        assert seconds_of_a_round(ends) >= formula(durations) - 1e-9


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0, 1))
def test_steps_within_slo_if_no_duration_exceeds_the_conservative(seed, count, spread):
    for group in group_jobs(random_jobs(np.random.default_rng(seed), count), POOLS):
        drawn = draw_durations(group, steps=12, spread=spread, seed=seed)
        timeline = simulate(np.minimum(drawn, conservative_durations(group, steps=12)))
        assert steps_within_slo(group, timeline).all()
        allowed = np.array([job.allowed_seconds for job in group.jobs])
        for steps, ends in enumerate(timeline.end[..., TRAINING], 1):
            assert (ends <= (steps + 1) * allowed * (1 + 1e-12)).all()


def test_steps_within_slo_not_if_all_durations_exceed_the_conservative():
    group = smallest_group([make_job(slo=1.0)], POOLS)
    durations = conservative_durations(group, steps=50)
    assert steps_within_slo(group, simulate(durations)).all()
    assert not steps_within_slo(group, simulate(1.1 * durations)).any()


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_draw_durations_makes_one_in_twenty_late(spread):
    group = smallest_group([make_job("a", slo=9.0), make_job("b", 5.0, 700.0, slo=9.0)], POOLS)
    ratios = draw_durations(group, steps=5000, spread=spread, seed=0) / conservative_durations(
        group, steps=5000
    )
    assert (ratios > 1).mean() == pytest.approx(0.05, abs=0.005)
    assert np.log(ratios).std() == pytest.approx(spread, rel=0.02)


def test_steps_within_slo_not_always_if_steps_are_late():
    group = smallest_group([make_job(slo=1.0)], POOLS)
    kept = [
        steps_within_slo(group, simulate(draw_durations(group, steps=1, spread=1.0, seed=seed))).all()
        for seed in range(200)
    ]
    assert 150 < sum(kept) < 200


def test_resample_durations_draws_recorded_steps():
    jobs = [make_job("run", 60.0, 40.0, tail_share=0.5, slo=9.0), make_job("drawn", slo=9.0)]
    group, planned = Group(tuple(jobs), 2), np.full((300, 2, 2), 7.0)
    steps = StepDurations(rollout=np.array([60.0, 20.0]), training=np.array([30.0, 90.0]), seeds=1)
    durations = resample_durations(group, planned, {"run": steps}, seed=0)
    assert (durations[:, 1] == 7).all()
    # A rollout on twice the nodes takes 3/4 of the time; both phases come from the same step.
    pairs, counts = np.unique(durations[:, 0], axis=0, return_counts=True)
    assert pairs.tolist() == [[15.0, 90.0], [45.0, 30.0]]
    assert counts.min() > 100


def test_simulate_lets_phases_wait_for_their_pool_and_their_job():
    rng = np.random.default_rng(3)
    durations = rng.random((20, 3, 2))
    start, end = simulate(durations)
    assert np.allclose(end - start, durations)
    for pool in (ROLLOUT, TRAINING):
        in_turn = start[..., pool].ravel()[1:] - end[..., pool].ravel()[:-1]
        assert (in_turn >= 0).all(), "a pool does one thing at a time"
    rollout_waits = start[1:, :, ROLLOUT] - end[:-1, :, TRAINING]
    training_waits = start[..., TRAINING] - end[..., ROLLOUT]
    assert (rollout_waits >= 0).all()
    assert (training_waits >= 0).all()
    pool_free = np.append(0, end[..., TRAINING].ravel()[:-1]).reshape(20, 3)
    assert np.allclose(start[..., TRAINING], np.maximum(pool_free, end[..., ROLLOUT])), (
        "a phase waits no longer than needed"
    )


@pytest.mark.parametrize(
    ("numbers", "message"),
    {
        (1, 1.5, 0): "spread=1.5 must be at least 0 and at most 1",
        (0, 0.5, 0): "steps=0 must be an integer of at least 1",
        (1, 0.5, -1): "seed=-1 must be an integer of at least 0",
    }.items(),
)
def test_draw_durations_reports_bad_input(numbers, message):
    steps, spread, seed = numbers
    with pytest.raises(ValueError, match=message):
        draw_durations(Group((make_job(),), 1), steps=steps, spread=spread, seed=seed)
