"""Ways to run the same jobs, side by side: what they cost, what they do, and whether objectives hold in execution."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from relibra_jax.sharing.baselines import Outcome, outcome_alone, outcome_colocated, outcome_of_groups
from relibra_jax.sharing.groups import Group
from relibra_jax.sharing.jobs import Job, Pools
from relibra_jax.sharing.multiplex import largest_first, multiplex
from relibra_jax.sharing.optimum import MOST_JOBS, cheapest_groups
from relibra_jax.sharing.run_metrics import StepDurations
from relibra_jax.sharing.simulation import (
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
"""The figures of each way, by their names."""


class Comparison(NamedTuple):
    """One set of jobs, run in all ways."""

    groups: tuple[Group, ...]
    """The groups of the jobs as they come."""
    outcomes: dict[str, Outcome]
    """What each way costs and does, by conservative durations; without the optimum where there are too many jobs."""
    executed_within_slo: int
    """The jobs that keep their objectives when ``groups`` are executed with drawn or recorded durations."""
    late_phases: int
    """The executed phases that took longer than planned."""
    phases: int
    """All executed phases."""

    def gap(self, way: str) -> float:
        """By which share a way's price exceeds the optimum's."""
        return self.outcomes[way].price / self.outcomes[OPTIMUM].price - 1

    def gain(self, way: str, baseline: str) -> float:
        """How many times a baseline's cost efficiency a way has."""
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
    """Run one set of jobs in all ways.

    Args:
        jobs: the jobs, in the order in which they come.
        pools: the pools.
        recorded: the recorded steps of those jobs that are runs, by their names.
        rollout_speed: how fast a training node generates, a rollout node being 1.
        steps: the steps of each job in the execution.
        spread: the standard deviation of the logarithm of a drawn duration.
        seed: the seed of the durations.

    Raises:
        ValueError: if the jobs do not fit the pools, or a number is out of its range.
    """
    groups = multiplex(jobs, pools)
    outcomes = {
        GROUPS: outcome_of_groups(groups, pools),
        SORTED: outcome_of_groups(multiplex(largest_first(jobs), pools), pools),
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
    """The figures of each way over all sets of jobs.

    Args:
        comparisons: a comparison for each set of jobs.

    Returns:
        For each way the mean price; mean, least and largest cost efficiency over that of pools of a job's own; the mean
        over that of co-location; the jobs within their objectives; and where the optimum is known the mean, the 90th
        percentile and the largest excess over its price.
    """
    told: Ways = {}
    for way in comparisons[0].outcomes:
        outcomes = [each.outcomes[way] for each in comparisons]
        gains = [each.gain(way, ALONE) for each in comparisons]
        told[way] = {
            "price": float(np.mean([outcome.price for outcome in outcomes])),
            "over_alone": float(np.mean(gains)),
            "over_alone_least": min(gains),
            "over_alone_most": max(gains),
            "over_colocated": float(np.mean([each.gain(way, COLOCATED) for each in comparisons])),
            "within_slo": sum(outcome.within_slo for outcome in outcomes),
        }
        if OPTIMUM in comparisons[0].outcomes:
            gaps = [each.gap(way) for each in comparisons]
            told[way] |= {
                "gap": float(np.mean(gaps)),
                "gap_p90": float(np.quantile(gaps, 0.9)),
                "gap_worst": max(gaps),
            }
    return told
