"""What ``relibra multiplex`` prints: a table of groups, a table of ways to run the same jobs, and what they come to."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.markup import escape
from rich.table import Table

from relibra_jax.cli.multiplex.comparison import ALONE, GROUPS, OPTIMUM, Comparison, Ways
from relibra_jax.cli.terminal import wide_table
from relibra_jax.sharing.groups import Group
from relibra_jax.sharing.jobs import Job, Pools
from relibra_jax.sharing.run_metrics import StepDurations

TABLE_WIDTH: Final = 104


def run_in_words(job: Job, durations: StepDurations) -> str:
    """What a run's steps took, and what they are taken to take.

    Args:
        job: the job of the run.
        durations: its recorded steps.
    """
    rollout, training = np.median(durations.rollout), np.median(durations.training)
    return (
        f"{job.name}: {len(durations.rollout)} learning steps;"
        f" rollout {rollout:.4g}s in the median, {job.rollout_seconds:.4g}s conservative;"
        f" training {training:.4g}s in the median, {job.training_seconds:.4g}s conservative"
    )


def groups_table(groups: Sequence[Group], pools: Pools, title: str) -> Table:
    """A table of groups, one a line.

    Args:
        groups: the groups.
        pools: the pools.
        title: what was planned.
    """
    table = wide_table(escape(title), width=TABLE_WIDTH)
    table.add_column("jobs, in the order of their turns")
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


def ways_table(told: Ways, jobs: int, title: str) -> Table:
    """A table of ways to run jobs, one a line.

    Args:
        told: the figures of each way, from `relibra_jax.cli.multiplex.comparison.summary`.
        jobs: the number of jobs in all sets.
        title: what was compared.
    """
    table = wide_table(escape(title), width=TABLE_WIDTH)
    table.add_column("way", no_wrap=True)
    above = ["above optimum"] if OPTIMUM in told else []
    for name in ("price/h", "efficiency", "least", "most", "over co-location", *above, "within SLO"):
        table.add_column(name, justify="right", no_wrap=True)
    for way, figures in told.items():
        table.add_row(
            way,
            f"{figures['price']:.2f}",
            *(f"{figures[name]:.3f}x" for name in ("over_alone", "over_alone_least", "over_alone_most")),
            f"{figures['over_colocated']:.3f}x",
            *(f"{figures['gap']:.1%}" for _ in above),
            f"{figures['within_slo']} of {jobs}",
        )
    return table


def told_in_words(comparisons: Sequence[Comparison], told: Ways, jobs: int, spread: float) -> list[str]:
    """What the tables come to, a line each.

    Args:
        comparisons: a comparison for each set of jobs.
        told: the figures of each way, from `relibra_jax.cli.multiplex.comparison.summary`.
        jobs: the number of jobs in all sets.
        spread: the standard deviation of the logarithm of a drawn duration.
    """
    executed = sum(each.executed_within_slo for each in comparisons)
    late = sum(each.late_phases for each in comparisons) / sum(each.phases for each in comparisons)
    lines = [
        f"efficiency: steps for the price, beside {ALONE} (conservative durations); modelled",
        f"executed (runs: recorded steps; else lognormal, spread {spread:g}): {executed} of {jobs} jobs within their"
        f" objectives, {late:.1%} of phases late",
    ]
    if len(comparisons) > 1 and OPTIMUM in told:
        figures, equal = told[GROUPS], sum(each.gap(GROUPS) < 1e-9 for each in comparisons)
        lines.append(
            f"above the optimum's price: {figures['gap']:.1%} on the average, {figures['gap_p90']:.1%} in the 90th"
            f" percentile, {figures['gap_worst']:.1%} at worst; none in {equal} of {len(comparisons)} sets"
        )
    return lines
