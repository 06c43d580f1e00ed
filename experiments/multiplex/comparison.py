"""Comparison of ways to run the same jobs: price, work done, and whether the jobs keep their objectives when run."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from experiments.multiplex.baselines import Outcome, outcome_alone, outcome_colocated, outcome_of_groups
from experiments.multiplex.grouping import MOST_JOBS, cheapest_groups, group_jobs, largest_first
from experiments.multiplex.groups import Group
from experiments.multiplex.jobs import Job, Pools
from experiments.multiplex.run_metrics import StepDurations
from experiments.multiplex.simulation import (
    conservative_durations,
    draw_durations,
    resample_durations,
    simulate,
    steps_within_slo,
)

GROUPS: Final = "groups, jobs as they come"
SORTED: Final = "groups, all jobs known"
OPTIMUM: Final = "optimum of groups"
ALONE: Final = "pools of its own"
COLOCATED: Final = "co-location"


type Ways = dict[str, dict[str, float | int]]
"""The numbers of each way to run the jobs, by the name of the way and of the number."""


class Comparison(NamedTuple):
    """The results of all ways to run one set of jobs."""

    groups: tuple[Group, ...]
    """The groups that admit jobs as they arrive."""
    outcomes: dict[str, Outcome]
    """The outcome of each way with conservative durations. The optimum is missing if there are too many jobs."""
    executed_within_slo: int
    """The number of jobs that keep their objectives when ``groups`` are simulated with random or recorded durations."""
    late_phases: int
    """The number of simulated phases that take longer than planned."""
    phases: int
    """The number of all simulated phases."""

    def gap(self, way: str) -> float:
        """Return the share by which the price of a way exceeds the optimum's."""
        return self.outcomes[way].price / self.outcomes[OPTIMUM].price - 1

    def gain(self, way: str, baseline: str) -> float:
        """Return the cost efficiency of a way divided by that of a baseline."""
        return self.outcomes[way].efficiency / self.outcomes[baseline].efficiency


def compare_ways(
    jobs: Sequence[Job],
    pools: Pools,
    *,
    recorded: Mapping[str, StepDurations],
    rollout_speed: float,
    steps: int,
    spread: float,
    seed: int,
) -> Comparison:
    """Compare all ways to run one set of jobs.

    Args:
        jobs: the jobs, in the order in which they arrive.
        pools: the rollout pool and the training pool.
        recorded: the recorded steps of the jobs that are runs, by the names of the jobs.
        rollout_speed: the speed at which a training node generates, relative to a rollout node.
        steps: the number of steps of each job in the simulation.
        spread: the standard deviation of the logarithm of a random duration.
        seed: the seed of the durations.

    Raises:
        ValueError: if the jobs do not fit the pools, or a number is out of its range.
    """
    groups = group_jobs(jobs, pools)
    outcomes = {
        GROUPS: outcome_of_groups(groups, pools),
        SORTED: outcome_of_groups(group_jobs(largest_first(jobs), pools), pools),
        ALONE: outcome_alone(jobs, pools),
        COLOCATED: outcome_colocated(jobs, pools, rollout_speed=rollout_speed),
    }
    if len(jobs) <= MOST_JOBS:
        outcomes[OPTIMUM] = outcome_of_groups(cheapest_groups(jobs, pools), pools)
    within_slo, late = 0, 0
    for group in groups:
        drawn = draw_durations(group, steps=steps, spread=spread, seed=seed)
        durations = resample_durations(group, drawn, recorded, seed=seed)
        within_slo += int(steps_within_slo(group, simulate(durations)).sum())
        planned = conservative_durations(group, steps=steps)
        late += int((durations > planned * (1 + 1e-9)).sum())
    return Comparison(groups, outcomes, within_slo, late, 2 * steps * len(jobs))


def summary(comparisons: Sequence[Comparison]) -> Ways:
    """Summarise each way to run the jobs over all sets of jobs.

    Args:
        comparisons: the comparison of each set of jobs.

    Returns:
        For each way the mean price per hour; the mean, least and largest cost efficiency relative to separate pools;
        the mean cost efficiency relative to co-location; the number of jobs within their objectives; and, if the
        optimum is known, the mean, the 90th percentile and the largest share by which the price exceeds the optimum's.
    """
    ways: Ways = {}
    for way in comparisons[0].outcomes:
        outcomes = [each.outcomes[way] for each in comparisons]
        gains = [each.gain(way, ALONE) for each in comparisons]
        ways[way] = {
            "price": float(np.mean([outcome.price for outcome in outcomes])),
            "over_alone": float(np.mean(gains)),
            "over_alone_least": min(gains),
            "over_alone_most": max(gains),
            "over_colocated": float(np.mean([each.gain(way, COLOCATED) for each in comparisons])),
            "within_slo": sum(outcome.within_slo for outcome in outcomes),
        }
        if OPTIMUM in comparisons[0].outcomes:
            gaps = [each.gap(way) for each in comparisons]
            ways[way] |= {
                "gap": float(np.mean(gaps)),
                "gap_p90": float(np.quantile(gaps, 0.9)),
                "gap_worst": max(gaps),
            }
    return ways
