"""The tables and sentences that ``relibra multiplex`` prints: the groups, and the ways to run the same jobs."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.markup import escape
from rich.table import Table

from experiments.multiplex.comparison import ALONE, GROUPS, OPTIMUM, Comparison, Ways
from experiments.multiplex.groups import Group
from experiments.multiplex.jobs import Job, Pools
from experiments.multiplex.run_metrics import StepDurations
from relibra_jax.cli.terminal import wide_table

TABLE_WIDTH: Final = 104


def describe_run(job: Job, durations: StepDurations) -> str:
    """Describe the recorded durations of a run, and the conservative durations of its job, in one line.

    Args:
        job: the job of the run.
        durations: the recorded durations of its steps.
    """
    rollout, training = np.median(durations.rollout), np.median(durations.training)
    return (
        f"{job.name}: {len(durations.rollout)} learning steps;"
        f" rollout: median {rollout:.4g} s, conservative {job.rollout_seconds:.4g} s;"
        f" training: median {training:.4g} s, conservative {job.training_seconds:.4g} s"
    )


def groups_table(groups: Sequence[Group], pools: Pools, title: str) -> Table:
    """Make a table with one line for each group.

    Args:
        groups: the groups.
        pools: the rollout pool and the training pool.
        title: the title of the table: the jobs.
    """
    table = wide_table(escape(title), width=TABLE_WIDTH)
    table.add_column("jobs, in the order in which they alternate")
    for name in ("rollout", "training", "period", "price/h", "slack", "rollout", "training"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        table.add_row(
            escape(" ".join(job.name for job in group.jobs)),
            f"{group.rollout_nodes} nodes",
            f"{group.training_nodes} nodes",
            f"{group.period:.4g}s",
            f"{group.price(pools):.2f}",
            f"{group.slack:.1%}",
            f"{sum(group.rollouts) / group.period:.0%} busy",
            f"{sum(group.trainings) / group.period:.0%} busy",
        )
    return table


def ways_table(ways: Ways, jobs: int, title: str) -> Table:
    """Make a table with one line for each way to run the jobs.

    Args:
        ways: the numbers of each way, from `experiments.multiplex.comparison.summary`.
        jobs: the number of jobs in all sets together.
        title: the title of the table: the jobs.
    """
    table = wide_table(escape(title), width=TABLE_WIDTH)
    table.add_column("way", no_wrap=True)
    above = ["above optimum"] if OPTIMUM in ways else []
    for name in ("price/h", "efficiency", "least", "most", "over co-location", *above, "within SLO"):
        table.add_column(name, justify="right", no_wrap=True)
    for way, numbers in ways.items():
        table.add_row(
            way,
            f"{numbers['price']:.2f}",
            *(f"{numbers[name]:.3f}x" for name in ("over_alone", "over_alone_least", "over_alone_most")),
            f"{numbers['over_colocated']:.3f}x",
            *(f"{numbers['gap']:.1%}" for _ in above),
            f"{numbers['within_slo']} of {jobs}",
        )
    return table


def explain_ways(comparisons: Sequence[Comparison], ways: Ways, jobs: int, spread: float) -> list[str]:
    """Return the notes under the tables, one line each: what the columns mean, and how the simulation ended.

    Args:
        comparisons: the comparison of each set of jobs.
        ways: the numbers of each way, from `experiments.multiplex.comparison.summary`.
        jobs: the number of jobs in all sets together.
        spread: the standard deviation of the logarithm of a random duration.
    """
    executed = sum(each.executed_within_slo for each in comparisons)
    late = sum(each.late_phases for each in comparisons) / sum(each.phases for each in comparisons)
    lines = [
        f"efficiency, least, most: steps per price, relative to {ALONE} for each job: the mean, least and largest over"
        " the sets of jobs; modelled with conservative durations",
        f"simulation of the groups (runs: their recorded steps; other jobs: lognormal durations, spread {spread:g}):"
        f" {executed} of {jobs} jobs within their objectives, {late:.1%} of phases late",
    ]
    if len(comparisons) > 1 and OPTIMUM in ways:
        numbers, equal = ways[GROUPS], sum(each.gap(GROUPS) < 1e-9 for each in comparisons)
        lines.append(
            f"price of the groups above the optimum's: {numbers['gap']:.1%} on average, {numbers['gap_p90']:.1%} at the"
            f" 90th percentile, {numbers['gap_worst']:.1%} at most; equal to it in {equal} of {len(comparisons)} sets"
        )
    return lines
