"""Groups of jobs that share pools: each rule by itself, and small instances against brute force."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from support.jobs import POOL, POOLS, make_job, random_jobs

from experiments.multiplex.baselines import outcome_alone, outcome_colocated, outcome_of_groups
from experiments.multiplex.grouping import cheapest_groups, group_jobs, largest_first
from experiments.multiplex.groups import rollout_seconds, smallest_group
from experiments.multiplex.job_sources import draw_jobs
from experiments.multiplex.jobs import Pools


def keeps_all_rules(jobs, rollout_nodes, pools):
    """Check the rules of a group, by an independent implementation."""
    rollouts = [
        job.rollout_seconds * (job.tail_share + (1 - job.tail_share) * job.rollout_nodes / rollout_nodes)
        for job in jobs
    ]
    trainings = [job.training_seconds for job in jobs]
    period = max(*np.add(rollouts, trainings), sum(rollouts), sum(trainings))
    return (
        max(job.rollout_nodes for job in jobs) <= rollout_nodes <= pools.rollout.max_nodes
        and max(job.training_nodes for job in jobs) <= pools.training.max_nodes
        and sum(job.rollout_bytes for job in jobs) <= pools.rollout.host_bytes
        and sum(job.training_bytes for job in jobs) <= pools.training.host_bytes
        and all(
            period <= job.slo * (job.rollout_seconds + job.training_seconds) * (1 + 1e-12) for job in jobs
        )
    )


def brute_force(jobs, pools):
    """Return the lowest price over all partitions of the jobs and all numbers of rollout nodes."""

    @functools.cache
    def least(*members):
        fitting = [nodes for nodes in range(1, 5) if keeps_all_rules(members, nodes, pools)]
        training = max(job.training_nodes for job in members) * pools.training.node_price
        return min(fitting) * pools.rollout.node_price + training if fitting else np.inf

    return min(
        sum(
            least(*(job for job, job_label in zip(jobs, labels, strict=True) if job_label == label))
            for label in set(labels)
        )
        for labels in itertools.product(range(len(jobs)), repeat=len(jobs))
    )


def price(groups, pools=POOLS):
    return sum(group.price(pools) for group in groups)


def names(groups):
    return ["".join(job.name for job in group.jobs) for group in groups]


@pytest.mark.parametrize("seed", range(20))
def test_cheapest_groups_are_those_of_brute_force(seed):
    rng = np.random.default_rng(seed)
    jobs = random_jobs(rng, int(rng.integers(1, 5)))
    assert price(cheapest_groups(jobs, POOLS)) == pytest.approx(brute_force(jobs, POOLS))


@pytest.mark.parametrize("count", [5, 6])
def test_cheapest_groups_of_more_jobs_are_those_of_brute_force(count):
    jobs = random_jobs(np.random.default_rng(count), count)
    optimum = cheapest_groups(jobs, POOLS)
    assert 1 < len(optimum) < count
    assert price(optimum) == pytest.approx(brute_force(jobs, POOLS))


@pytest.mark.parametrize("seed", range(2))
def test_group_jobs_keeps_all_rules_and_is_never_cheaper_than_the_optimum(seed):
    rng = np.random.default_rng(100 + seed)
    dearer = 0
    for _ in range(60):
        jobs = random_jobs(rng, int(rng.integers(1, 7)))
        optimum = cheapest_groups(jobs, POOLS)
        for groups in (group_jobs(jobs, POOLS), group_jobs(largest_first(jobs), POOLS), optimum):
            assert sorted(job.name for group in groups for job in group.jobs) == [job.name for job in jobs]
            assert all(keeps_all_rules(group.jobs, group.rollout_nodes, POOLS) for group in groups)
            assert price(optimum) <= price(groups) <= outcome_alone(jobs, POOLS).price
        dearer += price(group_jobs(jobs, POOLS)) > price(optimum)
    assert 0 < dearer < 60, "admission one by one must be optimal on some instances and not on others"


def test_smallest_group_takes_the_fewest_rollout_nodes():
    rng = np.random.default_rng(7)
    grown = 0
    for _ in range(200):
        jobs = random_jobs(rng, 2)
        fitting = [nodes for nodes in range(1, 5) if keeps_all_rules(jobs, nodes, POOLS)]
        group = smallest_group(jobs, POOLS)
        assert (group and group.rollout_nodes) == (min(fitting) if fitting else None)
        grown += group is not None and group.rollout_nodes > max(job.rollout_nodes for job in jobs)
    assert grown


def test_rollout_seconds_shrink_to_the_tail():
    job = make_job(rollout=60.0, rollout_nodes=2, tail_share=0.3)
    assert rollout_seconds(job, 2) == 60.0, (
        "exact equality, or a job with an objective of 1 could not run alone"
    )
    assert rollout_seconds(job, 4) == pytest.approx(60 * (0.3 + 0.7 / 2))
    assert rollout_seconds(job, 10**6) == pytest.approx(60 * 0.3, rel=1e-4)


def test_group_jobs_joins_jobs_where_pools_are_idle():
    jobs = [make_job("a", 60.0, 40.0), make_job("b", 40.0, 60.0)]
    (group,) = group_jobs(jobs, POOLS)
    assert (group.period, group.slack, group.price(POOLS)) == (100.0, 0.0, 4.0)
    assert outcome_of_groups([group], POOLS).efficiency == 2 * outcome_alone(jobs, POOLS).efficiency


def test_group_jobs_leaves_a_job_alone_whose_objective_allows_no_partner():
    patient = [make_job("a", slo=5.0), make_job("b", slo=5.0)]
    hasty = make_job("c", slo=1.0)
    for jobs in itertools.permutations([*patient, hasty]):
        assert sorted(names(group_jobs(jobs, POOLS)), key=len)[0] == "c"
        assert len(group_jobs(jobs, POOLS)) == 2


@pytest.mark.parametrize(
    ("rollout_price", "groups", "nodes"), [(0.5, ["ab"], [4]), (9.0, ["a", "b"], [1, 1])]
)
def test_group_jobs_adds_nodes_where_they_cost_less_than_a_group(rollout_price, groups, nodes):
    # Both rollouts take 160 s together, and 130 s on four nodes; 131 s are allowed. So three more rollout nodes are
    # needed, or a second group with one node of each kind.
    jobs = [make_job(name, 80.0, 20.0, tail_share=0.75, slo=1.31) for name in "ab"]
    pools = dataclasses.replace(POOLS, rollout=dataclasses.replace(POOL, device_price=rollout_price))
    planned = group_jobs(jobs, pools)
    assert names(planned) == groups
    assert [group.rollout_nodes for group in planned] == nodes


@pytest.mark.parametrize("kind", ["rollout_bytes", "training_bytes"])
@pytest.mark.parametrize(("state_bytes", "count"), [(30, 1), (31, 2)])
def test_groups_may_fill_memory_exactly(kind, state_bytes, count):
    jobs = [make_job("a", slo=9.0, **{kind: 70}), make_job("b", slo=9.0, **{kind: state_bytes})]
    assert len(group_jobs(jobs, POOLS)) == len(cheapest_groups(jobs, POOLS)) == count


def test_group_jobs_breaks_ties_by_the_oldest_group():
    jobs = [make_job(name, 50.0, 50.0) for name in "abcd"] + [make_job("e", 1.0, 1.0, slo=60.0)]
    assert names(group_jobs(jobs, POOLS)) == ["ab", "cd", "e"]
    jobs[-1] = dataclasses.replace(jobs[-1], slo=1.0)
    patient = [dataclasses.replace(job, slo=1.1) for job in jobs[:-1]]
    assert names(group_jobs([*patient, make_job("e", 1.0, 1.0, slo=60.0)], POOLS)) == ["abe", "cd"]
    assert names(group_jobs([*patient, jobs[-1]], POOLS)) == ["ab", "cd", "e"]


def test_outcome_colocated_by_hand():
    job = make_job(rollout=60.0, training=40.0, rollout_nodes=2, slo=1.6, tail_share=0.5)
    # On n training nodes a step takes 60 (0.5 + 0.5 * 2 / n) / 0.75 + 40 = 160, 120, ... s; 160 s are allowed.
    (price_, work, kept) = outcome_colocated([job], POOLS, rollout_speed=0.75)
    assert (price_, work, kept) == (3.0, pytest.approx(100 / 160), 1)
    hasty = dataclasses.replace(job, slo=1.3)
    assert outcome_colocated([hasty], POOLS, rollout_speed=0.75).price == 2 * 3.0
    hopeless = dataclasses.replace(job, slo=1.0)
    assert outcome_colocated([hopeless], POOLS, rollout_speed=0.5)[::2] == (3.0, 0)


def test_pools_may_allow_any_number_of_nodes():
    pools = Pools(
        **{kind: dataclasses.replace(POOL, max_nodes=2**31 - 1) for kind in ("rollout", "training")}
    )
    jobs = [make_job("a", tail_share=0.9), make_job("b", slo=1.01)]
    assert names(group_jobs(jobs, pools)) == ["a", "b"], "no number of rollout nodes keeps both objectives"
    assert outcome_colocated(jobs, pools, rollout_speed=0.1).within_slo == 0


def test_draw_jobs_depends_on_the_seed_alone():
    assert draw_jobs(5, seed=1) == draw_jobs(5, seed=1) != draw_jobs(5, seed=2)
    assert draw_jobs(3, seed=1) == draw_jobs(5, seed=1)[:3]


BAD_INPUT = {
    "slo": (
        lambda: make_job(slo=0.9),
        "job a: slo=0.9 must be at least 1, because no step is faster than alone",
    ),
    "not a number": (lambda: make_job(slo=float("nan")), "job a: slo=nan must be at least 0"),
    "no time": (
        lambda: make_job(rollout=0.0),
        "job a: rollout_seconds=0.0 must be positive and at most 31536000, a year",
    ),
    "endless": (lambda: make_job(training=float("inf")), "job a: training_seconds=inf must be positive"),
    "too long": (
        lambda: make_job(training=1e308),
        "job a: training_seconds=1e+308 must be positive and at most",
    ),
    "tail": (lambda: make_job(tail_share=1.1), "job a: tail_share=1.1 must be at least 0 and at most 1"),
    "no nodes": (
        lambda: make_job(rollout_nodes=0),
        "job a: rollout_nodes=0 must be an integer of at least 1",
    ),
    "bytes": (
        lambda: make_job(training_bytes=-1),
        "job a: training_bytes=-1 must be an integer of at least 0",
    ),
    "no jobs": (lambda: group_jobs([], POOLS), "jobs must have at least one job"),
    "twins": (
        lambda: group_jobs([make_job(), make_job()], POOLS),
        "jobs: 2 jobs have the name 'a'; names must be unique",
    ),
    "too large": (
        lambda: group_jobs([make_job(training_nodes=5)], POOLS),
        "job a: training_nodes=5 exceeds the 4 nodes that a group may use",
    ),
    "too heavy": (
        lambda: cheapest_groups([make_job(rollout_bytes=101)], POOLS),
        "job a: rollout_bytes=101 exceeds the 100 bytes of a node's host memory",
    ),
    "too many": (
        lambda: cheapest_groups([make_job(name) for name in "abcdefg"], POOLS),
        "jobs: 7 jobs are too many to try all partitions; the most is 6",
    ),
    "price": (lambda: dataclasses.replace(POOL, device_price=0.0), "device_price=0.0 must be positive"),
    "speed": (
        lambda: outcome_colocated([make_job()], POOLS, rollout_speed=0.0),
        "rollout_speed=0.0 must be positive",
    ),
}


@pytest.mark.parametrize("fault", BAD_INPUT)
def test_groups_report_bad_input(fault):
    run, message = BAD_INPUT[fault]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        run()
    assert str(refusal.value).startswith(message)
