"""The tables and sentences that the program prints: the groups, and the ways to run the same jobs."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from rich.markup import escape
from rich.table import Table

from experiments.multiplex.comparison import ALONE, GROUPS, OPTIMUM, Comparison, Ways
from experiments.multiplex.groups import Group
from experiments.multiplex.jobs import Job, Pools
from experiments.multiplex.parking import Parking
from experiments.multiplex.run_metrics import StepDurations
from relibra_jax.cli.terminal import wide_table
from relibra_jax.support.counted import counted

TABLE_WIDTH: Final = 104

type Columns[Row] = Sequence[tuple[str, Callable[[Row], str]]]
"""The columns of a table: the head of each, and the text of its cell in a row."""


def describe_run(job: Job, durations: StepDurations, parking: Parking | None) -> str:
    """Describe the recorded durations of a run, the conservative durations of its job, and its moves, in one line.

    Args:
        job: the job of the run.
        durations: the durations of its steps, with moves if they are measured.
        parking: the measured moves of its state; None if they are not.
    """
    rollout, training = np.median(durations.rollout), np.median(durations.training)
    return (
        f"{job.name}: {len(durations.rollout)} learning steps;"
        f" rollout: median {rollout:.4g} s, conservative {job.rollout_seconds:.4g} s;"
        f" training: median {training:.4g} s, conservative {job.training_seconds:.4g} s;"
        + (" moves of its state are not measured" if parking is None else _describe_moves(parking))
    )


def _describe_moves(parking: Parking) -> str:
    """Describe the moves of a run that are part of its durations."""
    weights, state = parking.weights, parking.state
    return (
        f" of these, weights in {weights.back_seconds:.2g} s ({weights.bytes / 1e6:.3g} MB), state in"
        f" {state.back_seconds:.2g} s and out {state.out_seconds:.2g} s ({state.bytes / 1e6:.3g} MB), measured on"
        f" {parking.devices} x {parking.device}"
    )


def groups_table(groups: Sequence[Group], pools: Pools, title: str) -> Table:
    """Make a table with one line for each group.

    Args:
        groups: the groups.
        pools: the rollout pool and the training pool.
        title: the title of the table: the jobs.
    """
    columns: Columns[Group] = [
        (
            "jobs, in the order in which they alternate",
            lambda group: escape(" ".join(job.name for job in group.jobs)),
        ),
        ("rollout", lambda group: counted(group.rollout_nodes, "node")),
        ("training", lambda group: counted(group.training_nodes, "node")),
        ("period", lambda group: f"{group.period:.4g}s"),
        ("price/h", lambda group: f"{group.price(pools):.2f}"),
        ("slack", lambda group: f"{group.slack:.1%}"),
        ("rollout", lambda group: f"{sum(group.rollouts) / group.period:.0%} busy"),
        ("training", lambda group: f"{sum(group.trainings) / group.period:.0%} busy"),
    ]
    return _table(title, columns, groups)


def ways_table(ways: Ways, jobs: int, title: str) -> Table:
    """Make a table with one line for each way to run the jobs.

    Args:
        ways: the numbers of each way, from `experiments.multiplex.comparison.summary`.
        jobs: the number of jobs in all sets together.
        title: the title of the table: the jobs.
    """
    columns: Columns[str] = [
        ("way", lambda way: way),
        ("price/h", lambda way: f"{ways[way]['price']:.2f}"),
        ("efficiency", lambda way: f"{ways[way]['over_alone']:.3f}x"),
        ("least", lambda way: f"{ways[way]['over_alone_least']:.3f}x"),
        ("most", lambda way: f"{ways[way]['over_alone_most']:.3f}x"),
        ("over co-location", lambda way: f"{ways[way]['over_colocated']:.3f}x"),
        ("above optimum", lambda way: f"{ways[way]['gap']:.1%}"),
        ("within SLO", lambda way: f"{ways[way]['within_slo']} of {jobs}"),
    ]
    if OPTIMUM not in ways:
        columns = [column for column in columns if column[0] != "above optimum"]
    return _table(title, columns, list(ways))


def _table[Row](title: str, columns: Columns[Row], rows: Sequence[Row]) -> Table:
    """Make a table of columns, with a line for each of the rows."""
    table = wide_table(escape(title), width=TABLE_WIDTH)
    for number, (name, _) in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
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
