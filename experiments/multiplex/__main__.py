"""``python -m experiments.multiplex [PATH ...]``: which jobs should share pools, and what that saves.

The method follows RollMux (arXiv 2512.11306). Everything is computed from durations of steps; nothing runs on a
cluster.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import tyro
from rich.console import Console

from experiments.multiplex.comparison import GROUPS, OPTIMUM, Comparison, Ways, compare_ways, summary
from experiments.multiplex.figure import draw_group
from experiments.multiplex.groups import Group
from experiments.multiplex.job_sources import draw_jobs, read_jobs
from experiments.multiplex.jobs import Job, Pool, Pools, check_factor
from experiments.multiplex.parking import Parking, read_parking
from experiments.multiplex.run_metrics import StepDurations, job_of_durations, read_durations
from experiments.multiplex.tables import describe_run, explain_ways, groups_table, ways_table
from experiments.program import run_program
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer

MOST_DRAWN: Final = 256
"""The most jobs that may be drawn."""
MOST_SEEDS: Final = 1000
"""The most sets of jobs that may be drawn."""
MOST_STEPS: Final = 10_000
"""The most steps of each job that may be simulated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunJob:
    """Properties of the job that a run's folder stands for, which the metrics of the run do not contain."""

    rollout_nodes: int = 1
    """For folders of runs: the number of rollout nodes that the job needs."""
    training_nodes: int = 1
    """For folders of runs: the number of training nodes that the job needs."""
    tail_share: float = 1.0
    """For folders of runs: the share of a rollout that more nodes do not shorten, from 0 to 1."""
    slo: float = 1.5
    """For folders of runs: the job's objective, the longest mean step as a multiple of a step alone; at least 1."""
    rollout_bytes: Annotated[
        int | None, tyro.conf.arg(help_behavior_hint="(default: as measured, else 0)")
    ] = None
    """For folders of runs: the bytes that the job keeps in the host memory of each rollout node."""
    training_bytes: Annotated[
        int | None, tyro.conf.arg(help_behavior_hint="(default: as measured, else 0)")
    ] = None
    """For folders of runs: the bytes that the job keeps in the host memory of each training node."""
    quantile: float = 0.95
    """For folders of runs: the share of steps that do not exceed the conservative duration."""

    def __post_init__(self) -> None:
        for name in ("rollout_nodes", "training_nodes"):
            check_integer(name, getattr(self, name), least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of the rollout pool and of the training pool."""

    rollout_price: float = 2.0
    """The price per hour of a device of the rollout pool. The default is an assumption."""
    training_price: float = 5.0
    """The price per hour of a device of the training pool. The default is an assumption."""
    devices_per_node: int = 8
    """The number of devices on each node."""
    host_gigabytes: int = 1000
    """The host memory of a node that the states of jobs may take, in GB."""
    max_nodes: int = 16
    """The most nodes of each pool that one group may use."""

    def pools(self) -> Pools:
        """Make the pools of these nodes."""
        for name in ("rollout_price", "training_price"):
            check_factor(name, getattr(self, name))
        check_integer("host_gigabytes", self.host_gigabytes, least=1)
        rollout, training = (
            Pool(
                device_price=price,
                devices_per_node=self.devices_per_node,
                host_bytes=self.host_gigabytes * 10**9,
                max_nodes=self.max_nodes,
            )
            for price in (self.rollout_price, self.training_price)
        )
        return Pools(rollout=rollout, training=training)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multiplex:
    """Find which training jobs should alternate on shared pools of nodes, and what that saves."""

    paths: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[PATH ...]", help_behavior_hint="(default: jobs drawn at random)"),
    ] = ()
    """Files of jobs (.json) and folders of training runs, in the order in which the jobs arrive."""
    drawn: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: 6)")] = None
    """The number of jobs to draw at random; only without paths."""
    seeds: int = 1
    """The number of sets of jobs to draw, with seeds from 0 on; only without paths."""
    run: Annotated[RunJob, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RunJob)
    nodes: Annotated[Nodes, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Nodes)
    rollout_speed: float = 0.84
    """The speed at which a training node generates in co-location, relative to a rollout node.
    The default is the ratio of memory bandwidths, 3.35 TB/s of an H800 over 4.0 TB/s of an H20."""
    steps: int = 100
    """The number of steps of each job in the simulation of the groups.
    Jobs of runs resample their recorded steps; the durations of all other jobs are random."""
    spread: float = 0.2
    """The standard deviation of the logarithm of a random duration.
    The 95% quantile of the duration is the conservative duration that the groups are planned for."""
    out: Path = Path("out/multiplex")
    """The folder that the figure and the numbers are written to."""


def main(options: Multiplex) -> None:
    """Group jobs, compare the groups with other ways to run the jobs, and write the figure and the numbers.

    It prints one table of the groups and one of the ways to run the jobs.

    Args:
        options: the jobs, the pools, the settings of the simulation, and the folder to write to.

    Raises:
        ValueError: if there are no jobs, they do not fit the pools, a number is out of its range, or ``out`` is not a
            folder and cannot be created as one. Nothing is written then.
    """
    existing = next(path for path in (options.out, *options.out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"out={options.out} must be a folder: {existing} is a file, not a folder")
    pools, console = options.nodes.pools(), Console()
    check_integer("steps", options.steps, least=1, most=MOST_STEPS)
    recorded, parked = _read_runs([path for path in options.paths if path.is_dir()])
    title, job_sets = _job_sets(options, recorded, parked)
    comparisons = [
        compare_ways(
            jobs,
            pools,
            recorded=recorded,
            rollout_speed=options.rollout_speed,
            steps=options.steps,
            spread=options.spread,
            seed=seed,
        )
        for seed, jobs in enumerate(job_sets)
    ]
    groups, ways = comparisons[0].groups, summary(comparisons)
    for job in job_sets[0]:
        if job.name in recorded:
            console.print(
                describe_run(job, recorded[job.name], parked.get(job.name)),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    first = title if len(job_sets) == 1 else f"{title}; groups of the first set"
    console.print(groups_table(groups, pools, first), crop=False, soft_wrap=True)
    count = sum(map(len, job_sets))
    console.print(ways_table(ways, count, title), crop=False, soft_wrap=True)
    for line in explain_ways(comparisons, ways, count, options.spread):
        console.print(line, highlight=False, soft_wrap=True)
    options.out.mkdir(parents=True, exist_ok=True)
    figure, numbers = options.out / "multiplex.png", options.out / "multiplex.json"
    draw_group(figure, max(groups, key=lambda group: len(group.jobs)), first)
    write_json(numbers, _numbers(title, pools, ways, comparisons))
    console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def _read_runs(folders: Sequence[Path]) -> tuple[dict[str, StepDurations], dict[str, Parking]]:
    """Read the durations of runs, and the moves of their states where they are measured, by the names of the folders.

    Where moves are measured, the durations include them.
    """
    recorded, parked = {}, {}
    for folder in folders:
        durations, parking = read_durations(folder), read_parking(folder)
        if parking is not None:
            parked[str(folder)], durations = parking, parking.added_to(durations)
        recorded[str(folder)] = durations
    return recorded, parked


def _job_sets(
    options: Multiplex, recorded: Mapping[str, StepDurations], parked: Mapping[str, Parking]
) -> tuple[str, list[list[Job]]]:
    """Read or draw the sets of jobs; return a title for them, and the sets."""
    if options.paths:
        if options.drawn is not None or options.seeds != 1:
            raise ValueError(
                f"drawn and seeds are for jobs drawn at random, but {len(options.paths)} paths are given"
            )
        jobs = [job for path in options.paths for job in _read(path, options.run, recorded, parked)]
        return f"jobs of {', '.join(map(str, options.paths))}", [jobs]
    count = 6 if options.drawn is None else options.drawn
    check_integer("drawn", count, least=1, most=MOST_DRAWN)
    check_integer("seeds", options.seeds, least=1, most=MOST_SEEDS)
    sets = [draw_jobs(count, seed=seed) for seed in range(options.seeds)]
    return f"{count} drawn jobs" + (f", {options.seeds} sets" if options.seeds > 1 else ""), sets


def _read(
    path: Path, run: RunJob, recorded: Mapping[str, StepDurations], parked: Mapping[str, Parking]
) -> list[Job]:
    name = str(path)
    if name in recorded:
        given = {field: value for field, value in dataclasses.asdict(run).items() if value is not None}
        if name in parked:
            given = parked[name].node_bytes(training_nodes=run.training_nodes) | given
        return [job_of_durations(name, recorded[name], **given)]
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a file of jobs or the folder of a run")
    return read_jobs(path)


def _numbers(title: str, pools: Pools, ways: Ways, comparisons: Sequence[Comparison]) -> dict[str, object]:
    """Return the contents of the JSON file."""
    return {
        "jobs": title,
        "pools": dataclasses.asdict(pools),
        "ways": ways,
        "executed_within_slo": sum(comparison.executed_within_slo for comparison in comparisons),
        "late_phases": sum(comparison.late_phases for comparison in comparisons),
        "phases": sum(comparison.phases for comparison in comparisons),
        "gaps": [comparison.gap(GROUPS) for comparison in comparisons] if OPTIMUM in ways else None,
        "sets": [[_group_numbers(group) for group in comparison.groups] for comparison in comparisons],
    }


def _group_numbers(group: Group) -> dict[str, object]:
    return {
        "jobs": [dataclasses.asdict(job) for job in group.jobs],
        "rollout_nodes": group.rollout_nodes,
        "training_nodes": group.training_nodes,
        "period": group.period,
        "slack": group.slack,
    }


if __name__ == "__main__":
    sys.exit(run_program(main, Multiplex))
