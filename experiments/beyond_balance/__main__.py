"""``python -m experiments.beyond_balance TRACE``: plans beside the idealised balanced run, which some of them beat.

The balanced run has even ranks and routing that is uniform over experts: every copy crosses nodes as chance has it. A
plan that keeps tokens in their node can therefore take less time. Samples are drawn from the trace; homes were planned
before on those that are left over, by the same planner (steady), or are contiguous (cold). Moved experts, residents'
weights and gradients are in the time. The same is told of each half of the samples alone, in half as many
micro-batches: what an update takes once is spread over fewer, so the halves compare with each other, not with all.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.beyond_balance.measures import Setting, mean_over_seeds, measure_plan, uniform_crossings
from experiments.beyond_balance.tables import Row, plans_table, residents_cost, residents_table
from relibra_jax.atomic_write import write_json
from relibra_jax.cli.options import TraceName
from relibra_jax.cli.parsing import run_program
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.cost.unit_times import unit_times
from relibra_jax.limits import check_integer
from relibra_jax.plan import contiguous_homes
from relibra_jax.plan_check import check_plan
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace
from relibra_jax.types import Planner, RoutingReplay, Topology

BASELINES: Final = ("static", "eplb_repacked", "lplb_repacked")
HARDWARE, MODEL, CONTEXT, TOKENS_PER_RANK = "h100", "gpt-oss-20b", 4096.0, 16_384


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeyondBalance:
    """Compare plans with the idealised balanced run."""

    trace: TraceName = None
    """A trace by name or path (.npz); else the one that RELIBRA_TRACE gives, else the recorded one of this project."""
    record: Path | None = None
    """Where to write the numbers, as JSON."""
    ranks: tuple[str, ...] = ("2x4", "4x4")
    """Nodes x local ranks."""
    residents: tuple[int, ...] = (0, 1, 2)
    """Resident slots of a rank."""
    samples: int = 256
    """Samples of a batch; those that the trace has more are the batch before."""
    micro_batches: int = 8
    halves: bool = True
    """Whether each half of the samples is planned alone as well."""
    seeds: int = 1
    """How many seeds of the search the numbers are the mean of; cold starts and halves have one."""


class Draw(NamedTuple):
    """Samples of a trace: a batch, and the batch before it."""

    name: str
    batch: RoutingReplay
    before: RoutingReplay
    micro_batches: int
    micro_batches_before: int


class Report(NamedTuple):
    """What one draw on one topology has to tell."""

    tables: list[Table]
    numbers: dict[str, object]


def draw_samples(trace: Trace, config: BeyondBalance) -> list[Draw]:
    """All samples, then each half of them, from one permutation; the batch before is the same for all.

    Raises:
        ValueError: if the trace has no sample left for the batch before, or too few for the micro-batches.
    """
    held, half = len(trace.replay.mask), config.samples // 2
    check_integer("micro_batches", config.micro_batches, least=2)
    check_integer("seeds", config.seeds, least=1)
    check_integer("samples", config.samples, least=2 * config.micro_batches)
    fewer = config.micro_batches // 2
    if held < config.samples + fewer:
        raise ValueError(
            f"{trace.name} has {held} samples; samples={config.samples} leave fewer than {fewer} for the batch before"
        )
    order = np.random.default_rng(0).permutation(held)

    def pick(indices: np.ndarray) -> RoutingReplay:
        return RoutingReplay(*(np.asarray(leaf)[indices] for leaf in trace.replay))

    before = pick(order[config.samples :])
    parts = {
        "all": (order[: config.samples], config.micro_batches),
        "first half": (order[:half], fewer),
        "second half": (order[half : config.samples], fewer),
    }
    draws = [Draw(name, pick(rows), before, number, fewer) for name, (rows, number) in parts.items()]
    return draws if config.halves else draws[:1]


def make_topology(ranks: str, num_experts: int, *, resident_slots: int = 0) -> Topology:
    """The expert-parallel group that ``ranks`` tell, with one replica slot a rank.

    Raises:
        ValueError: if ``ranks`` are not two numbers, or as `Topology` says.
    """
    numbers = ranks.split("x")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"ranks={ranks!r} must be nodes x local ranks, for example 2x4")
    return Topology(
        num_nodes=int(numbers[0]),
        ranks_per_node=int(numbers[1]),
        num_experts=num_experts,
        replica_slots=1,
        resident_slots=resident_slots,
    )


def make_setting(trace: Trace, whole: Draw, topology: Topology) -> Setting:
    """The cost model, at which a micro-batch of all samples has as many tokens a rank as a real one, on average."""
    top_k = trace.replay.expert_ids.shape[-1]
    model = dataclasses.replace(MODELS[MODEL], num_experts=trace.num_experts, top_k=top_k)
    tokens = float(whole.batch.mask.sum()) / whole.micro_batches
    return Setting(CLUSTERS[HARDWARE], model, CONTEXT, TOKENS_PER_RANK * topology.num_ranks / tokens)


@functools.cache
def compiled_planner(name: str) -> Planner:
    """A planner of `PLANNERS`, compiled once for each shape of load."""
    planner = PLANNERS[name].planner
    return Planner(planner.init, jax.jit(planner.update))


def run_planner(
    planner: Planner, draw: Draw, topology: Topology, setting: Setting, *, seed: int, variants: Sequence
) -> Iterator[tuple[tuple[str, bool], dict[str, float]]]:
    """Plan and measure a draw from each start, with samples packed or assigned.

    Args:
        planner: the planner.
        draw: the samples.
        topology: the expert-parallel group.
        setting: the cost model's.
        seed: the seed of the searches.
        variants: pairs of a start, ``steady`` or ``cold``, and whether samples are assigned.
    """
    layers = draw.batch.expert_ids.shape[2]
    cost = unit_times(dispatch="hierarchical", **setting.arguments())
    plan = functools.partial(plan_batch, planner=planner, topology=topology, cost=cost)
    first = planner.init(topology, layers, key=jax.random.key(seed))
    contiguous = np.asarray(contiguous_homes(topology, layers))
    starts = {"cold": (first, contiguous)}
    if any(start == "steady" for start, _ in variants):
        before, state = plan(draw.before, state=first, num_micro_batches=draw.micro_batches_before)
        starts["steady"] = state, np.asarray(before.plan.home)
    assign = functools.partial(assign_samples, key=jax.random.key(seed))
    for start, assigned in variants:
        state, home = starts[start]
        chosen = assign if assigned else None
        batch_plan, _ = plan(draw.batch, state=state, num_micro_batches=draw.micro_batches, assign=chosen)
        check_plan(batch_plan.plan, batch_plan.load, topology)
        yield (start, assigned), measure_plan(draw.batch, batch_plan, home, topology, setting)


def compare_planners(trace: Trace, draw: Draw, whole: Draw, ranks: str, config: BeyondBalance) -> list[Row]:
    """All rows of one draw on one topology; of a half of ``whole`` those of steady homes."""
    full = draw is whole
    rows = []
    for name, residents in [*((name, 0) for name in BASELINES), *(("relibra", b) for b in config.residents)]:
        topology = make_topology(ranks, trace.num_experts, resident_slots=residents)
        setting = make_setting(trace, whole, topology)
        searched = name == "relibra"
        ways = (False, True) if searched else (False,)
        steady = list(itertools.product(["steady"], ways))
        cold = list(itertools.product(["cold"], ways)) if full else []
        found: dict[tuple[str, bool], list[dict[str, float]]] = {}
        for seed in range(config.seeds if searched and full else 1):
            variants = steady + (cold if seed == 0 else [])
            run = run_planner(compiled_planner(name), draw, topology, setting, seed=seed, variants=variants)
            for variant, measures in run:
                found.setdefault(variant, []).append(measures)
        rows += [
            Row(draw.name, ranks, name, residents, assigned, start, len(each), mean_over_seeds(each))
            for (start, assigned), each in found.items()
        ]
    return rows


def report_ranks(trace: Trace, draws: Sequence[Draw], ranks: str, config: BeyondBalance) -> list[Report]:
    """The tables of all draws on one topology, and their numbers."""
    topology = make_topology(ranks, trace.num_experts)
    uniform = {
        "copies_crossing": 1 - 1 / topology.num_nodes,
        "tokens_crossing": uniform_crossings(topology, trace.replay.expert_ids.shape[-1]),
    }
    reports = []
    for draw in draws:
        rows = compare_planners(trace, draw, draws[0], ranks, config)
        costs = residents_cost(rows)
        size = f"{len(draw.batch.mask)} samples in {draw.micro_batches} micro-batches"
        tables = [plans_table(rows, f"{trace.name} on {ranks} ranks, {draw.name}: {size}", uniform)]
        tables += [residents_table(costs)] if costs else []
        plans = [row._asdict() for row in rows]
        numbers = {"ranks": ranks, "samples": draw.name, "uniform": uniform, "plans": plans}
        reports.append(Report(tables, {**numbers, "residents_cost": costs}))
    return reports


def main(config: BeyondBalance) -> None:
    """Print the tables of every topology and draw, and record their numbers."""
    trace, console = read_trace(config.trace), Console(width=110)
    draws = draw_samples(trace, config)
    for ranks in config.ranks:
        make_topology(ranks, trace.num_experts)  # refused before anything runs
    # Most of the time programs are compiled, each on one core; topologies share none.
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(report_ranks, trace, draws, ranks, config) for ranks in config.ranks]
        reports = [report for job in jobs for report in job.result()]
    for table in itertools.chain(*(report.tables for report in reports)):
        console.print(table)
    if config.record is not None:
        about = {"trace": trace.name, "hardware": HARDWARE, "model": MODEL, "context": CONTEXT}
        about |= {"tokens_per_rank": TOKENS_PER_RANK, "seeds": config.seeds}
        write_json(config.record, {**about, "tables": [report.numbers for report in reports]})


if __name__ == "__main__":
    sys.exit(run_program(main, BeyondBalance, description=__doc__))
