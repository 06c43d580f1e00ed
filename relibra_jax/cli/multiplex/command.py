"""``relibra multiplex``: which jobs share pools, what that saves, and how far it is from the optimum.

After RollMux (arXiv 2512.11306). All of it is planned from durations and modelled: no cluster runs anything.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import tyro
from rich.console import Console

from relibra_jax.atomic_write import write_json
from relibra_jax.cli.multiplex.comparison import GROUPS, OPTIMUM, compare_ways, summary
from relibra_jax.cli.multiplex.figure import draw_group
from relibra_jax.cli.multiplex.tables import groups_table, run_in_words, told_in_words, ways_table
from relibra_jax.limits import check_integer
from relibra_jax.sharing.drawn import draw_jobs
from relibra_jax.sharing.groups import Group
from relibra_jax.sharing.job_files import read_jobs
from relibra_jax.sharing.jobs import Job, Pool, Pools, check_factor
from relibra_jax.sharing.run_metrics import StepDurations, job_of_durations, read_durations

MOST_DRAWN: Final = 256
MOST_SEEDS: Final = 1000
MOST_STEPS: Final = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunJob:
    """What the metrics of a run do not say of the job that a folder stands for."""

    rollout_nodes: int = 1
    """The rollout nodes that the job of a run needs."""
    training_nodes: int = 1
    """The training nodes that the job of a run needs."""
    tail_share: float = 1.0
    """The share of its rollouts that more nodes do not shorten."""
    slo: float = 1.5
    """How many times its time alone a step of it may take."""
    rollout_bytes: int = 0
    """The bytes that it keeps in the host memory of each rollout node."""
    training_bytes: int = 0
    """The bytes that it keeps in the host memory of each training node."""
    quantile: float = 0.95
    """The share of a run's steps that do not exceed the conservative duration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of both pools."""

    rollout_price: float = 2.0
    """The price of a device of the rollout pool for an hour (assumed)."""
    training_price: float = 5.0
    """The price of a device of the training pool for an hour (assumed)."""
    devices_per_node: int = 8
    """The devices of a node."""
    host_gigabytes: int = 1000
    """The GB of a node's host memory that states may take."""
    max_nodes: int = 16
    """The most nodes of each pool that a group may take."""

    def pools(self) -> Pools:
        """The pools of these nodes."""
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
    """Say which training jobs should take turns on shared pools, and what that saves."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Files of jobs (.json) and folders of training runs, in the order in which the jobs come; else jobs are drawn."""
    drawn: int | None = None
    """The number of jobs to draw where no paths are given; 6 when not given."""
    seeds: int = 1
    """The number of sets of jobs to draw, from seed 0 on."""
    run: Annotated[RunJob, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RunJob)
    nodes: Annotated[Nodes, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Nodes)
    rollout_speed: float = 0.84
    """How fast a training node generates where phases share it, a rollout node being 1; by memory bandwidth, an H800's
    3.35 TB/s over an H20's 4.0."""
    steps: int = 100
    """The steps of each job when the groups are executed: with a run's recorded steps, else with drawn durations."""
    spread: float = 0.2
    """The standard deviation of the logarithm of a drawn duration, whose 95% quantile is the conservative one."""
    out: Path = Path("out/multiplex")
    """The folder for the figure and the numbers."""


def run_multiplex(options: Multiplex, console: Console) -> None:
    """Group jobs, compare with other ways to run them, print both tables, and write the figure and the numbers.

    Args:
        options: the jobs, the pools, the execution, and the folder for what is written.
        console: the console for the tables.

    Raises:
        ValueError: if there are no jobs, they do not fit the pools, a number is out of its range, or ``out`` is no
            folder and cannot become one; nothing is written then.
    """
    there = next(path for path in (options.out, *options.out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"out={options.out}: {there} is a file, not a folder")
    pools = options.nodes.pools()
    check_integer("steps", options.steps, least=1, most=MOST_STEPS)
    recorded = {str(path): read_durations(path) for path in options.paths if path.is_dir()}
    title, job_sets = _job_sets(options, recorded)
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
    groups, told = comparisons[0].groups, summary(comparisons)
    for job in job_sets[0]:
        if job.name in recorded:
            console.print(
                run_in_words(job, recorded[job.name]), markup=False, highlight=False, soft_wrap=True
            )
    first = title if len(job_sets) == 1 else f"{title}; the groups of the first"
    console.print(groups_table(groups, pools, first), crop=False, soft_wrap=True)
    count = sum(map(len, job_sets))
    console.print(ways_table(told, count, title), crop=False, soft_wrap=True)
    for line in told_in_words(comparisons, told, count, options.spread):
        console.print(line, highlight=False, soft_wrap=True)
    options.out.mkdir(parents=True, exist_ok=True)
    figure, numbers = options.out / "multiplex.png", options.out / "multiplex.json"
    draw_group(figure, max(groups, key=lambda group: len(group.jobs)), first)
    write_json(
        numbers,
        {
            "jobs": title,
            "pools": dataclasses.asdict(pools),
            "ways": told,
            "executed_within_slo": sum(each.executed_within_slo for each in comparisons),
            "late_phases": sum(each.late_phases for each in comparisons),
            "phases": sum(each.phases for each in comparisons),
            "gaps": [each.gap(GROUPS) for each in comparisons] if OPTIMUM in told else None,
            "sets": [[_group_numbers(group) for group in each.groups] for each in comparisons],
        },
    )
    console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def _job_sets(options: Multiplex, recorded: Mapping[str, StepDurations]) -> tuple[str, list[list[Job]]]:
    """Sets of jobs, and what they are in words."""
    if options.paths:
        if options.drawn is not None or options.seeds != 1:
            raise ValueError(
                f"{len(options.paths)} paths: drawn and seeds are for jobs that no path describes"
            )
        jobs = [job for path in options.paths for job in _read(path, options.run, recorded)]
        return f"jobs of {', '.join(map(str, options.paths))}", [jobs]
    count = 6 if options.drawn is None else options.drawn
    check_integer("drawn", count, least=1, most=MOST_DRAWN)
    check_integer("seeds", options.seeds, least=1, most=MOST_SEEDS)
    sets = [draw_jobs(count, seed=seed) for seed in range(options.seeds)]
    return f"{count} drawn jobs" + (f", {options.seeds} sets" if options.seeds > 1 else ""), sets


def _read(path: Path, run: RunJob, recorded: Mapping[str, StepDurations]) -> list[Job]:
    if str(path) in recorded:
        return [job_of_durations(str(path), recorded[str(path)], **dataclasses.asdict(run))]
    if not path.exists():
        raise ValueError(f"{path}: no such file of jobs or folder of a run")
    return read_jobs(path)


def _group_numbers(group: Group) -> dict[str, object]:
    return {
        "jobs": [dataclasses.asdict(job) for job in group.jobs],
        "rollout_nodes": group.rollout_nodes,
        "training_nodes": group.training_nodes,
        "period": group.period,
        "slack": group.slack,
    }
