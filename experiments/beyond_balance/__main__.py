"""``python -m experiments.beyond_balance TRACE``: compare plans with the idealised balanced run.

The balanced run has even rank loads and routing that is uniform over experts, so token copies cross nodes at random. A
plan that keeps tokens in their node can therefore take less time. Its share is shown as exchanges run, if every
exchange overlapped the compute of its layer in both runs (overlapped), if exchanges sent only needed rows (as needed),
and of a balanced run that has as many crossings as the same samples at contiguous homes (of local). Systems of others
are shown at their best.

Samples are drawn from the trace. The previous homes are those that the same planner chose for the remaining samples
(steady), or contiguous (cold). The modelled time includes moving experts, and sending residents' weights and gradients.

The same comparison is made for each half of the samples, with half as many micro-batches. The costs of an update are
then spread over fewer micro-batches, so the halves can be compared with each other but not with all samples.
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

from experiments.beyond_balance.measures import mean_over_seeds, measure_plan, uniform_crossings
from experiments.beyond_balance.tables import Row, plans_table, residents_cost, residents_table
from experiments.program import TraceName, run_program, topology_of
from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation import Batches, Batching, Costs, Outcome, PlannedBatch, Setting, make_setting
from relibra_jax.evaluation.replica_nodes import with_replica_nodes
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace, make_trace, some_layers

RIVALS: Final = ("static", "eplb", "eplb_repacked", "lplb", "lplb_repacked", "ultraep", "moonep", "laer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeyondBalance:
    """Compare plans with the idealised balanced run."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    record: Path | None = None
    """The JSON file for the numbers. None writes no file."""
    ranks: tuple[str, ...] = ("2x4", "4x4")
    """The topologies, each as nodes x local ranks."""
    residents: tuple[int, ...] = (0, 1, 2)
    """The numbers of resident slots of a rank to compare."""
    model: str = "gpt-oss-20b"
    """The model whose sizes are priced."""
    shards: int = 1
    """The number of data-parallel groups that share the optimizer state. Residents must fit the memory that is left."""
    layers: int = 24
    """The most layers of the trace to plan, evenly spaced."""
    rivals: tuple[str, ...] = RIVALS
    """The planners of others to compare; of every system the fastest is shown."""
    samples: int = 256
    """The number of samples of a batch. The remaining samples of the trace are the previous batch."""
    micro_batches: int = 8
    """The number of micro-batches of a batch; halves have half as many."""
    halves: bool = True
    """Whether to plan each half of the samples alone as well."""
    seeds: int = 1
    """The number of search seeds over which the numbers are averaged. Cold starts and halves use one."""


class Draw(NamedTuple):
    """A batch of samples of a trace, and the previous batch."""

    name: str
    batch: RoutingReplay
    before: RoutingReplay
    micro_batches: int
    micro_batches_before: int


class Report(NamedTuple):
    """The results of one draw on one topology."""

    tables: list[Table]
    numbers: dict[str, object]


def draw_samples(trace: Trace, config: BeyondBalance) -> list[Draw]:
    """Draw all samples of a batch, and then each half of them, from one permutation; all have the same previous batch.

    Args:
        trace: the recorded routing.
        config: the settings.

    Raises:
        ValueError: if a setting is too small, or the trace has too few samples for the batch and the previous batch.
    """
    num_samples, half = len(trace.replay.mask), config.samples // 2
    check_integer("micro_batches", config.micro_batches, least=2)
    check_integer("seeds", config.seeds, least=1)
    check_integer("samples", config.samples, least=2 * config.micro_batches)
    fewer = config.micro_batches // 2
    if num_samples < config.samples + fewer:
        raise ValueError(
            f"{trace.name} has {num_samples} samples; samples={config.samples} leaves fewer than {fewer} for the"
            " previous batch"
        )
    order = np.random.default_rng(0).permutation(num_samples)

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


def costs_of(config: BeyondBalance) -> Costs:
    """Return the priced settings: those of `Costs`, but for the model and its shards."""
    return Costs(model=config.model, shards=config.shards)


def make_cost_model(trace: Trace, whole: Draw, topology: Topology, config: BeyondBalance) -> CostModel:
    """Return the cost model of what layers run by default; a mean micro-batch of all samples is as large as a real one.

    Args:
        trace: the recorded routing.
        whole: the draw of all samples.
        topology: the expert-parallel group.
        config: the settings, of which the model and the number of shards are priced.

    Raises:
        ValueError: if the residents of the topology do not fit the memory of a rank.
    """
    drawn = make_trace(whole.batch, trace.num_experts, trace.name)
    batching = Batching(batch_size=len(whole.batch.mask), micro_batches=whole.micro_batches)
    return make_setting(drawn, topology, batching=batching, cost=costs_of(config)).cost_model


def run_variants(
    name: str, draw: Draw, topology: Topology, cost_model: CostModel, *, seed: int, variants: Sequence
) -> Iterator[tuple[tuple[str, bool], dict[str, float]]]:
    """Plan and measure a draw from each start, with samples packed or assigned.

    Args:
        name: the name of the planner.
        draw: the samples.
        topology: the expert-parallel group.
        cost_model: the cost model.
        seed: the seed of the searches.
        variants: pairs of a start, ``steady`` or ``cold``, and whether samples are assigned.

    Yields:
        Each variant with the numbers of its plan.
    """
    entry, layers = PLANNERS[name], draw.batch.expert_ids.shape[2]
    before = Setting(Batches([draw.before], draw.micro_batches_before, 0, 0), topology, cost_model, seed)
    cost_model = with_replica_nodes(entry, before).cost_model
    setting = Setting(Batches([draw.batch], draw.micro_batches, 0, 0), topology, cost_model, seed)
    cost = cost_model.price(topology)
    plan = functools.partial(plan_batch, planner=entry.planner, topology=topology, cost=cost)
    first = entry.planner.init(topology, layers, key=jax.random.key(seed))
    starts = {"cold": (first, np.asarray(contiguous_homes(topology, layers)))}
    if any(start == "steady" for start, _ in variants):
        previous, state = plan(draw.before, state=first, stages=draw.micro_batches_before)
        starts["steady"] = state, np.asarray(previous.plan.home)
    for start, assigned in variants:
        state, home = starts[start]
        assign = assign_samples if assigned else None
        batch_plan, _ = plan(
            draw.batch, state=state, stages=draw.micro_batches, assign=assign, key=jax.random.key(seed)
        )
        check_plan(
            batch_plan.plan,
            batch_plan.load,
            topology,
            across_nodes=bool(entry.across_nodes or cost.across_nodes),
        )
        no_errors = np.zeros(batch_plan.load.shape[:2], np.float32)
        planned = PlannedBatch(draw.batch, batch_plan, home, no_errors)
        yield (start, assigned), measure_plan(Outcome(name, entry, setting, [planned]))


def compare_planners(trace: Trace, draw: Draw, whole: Draw, ranks: str, config: BeyondBalance) -> list[Row]:
    """Return the table rows of one draw on one topology. Cold starts are for ReLibra on all samples only.

    Args:
        trace: the recorded routing.
        draw: the samples to plan.
        whole: the draw of all samples, which determines the scale of the cost model.
        ranks: nodes x local ranks.
        config: the settings.
    """
    full = draw is whole
    rows = []
    for name, residents in [
        *((name, 0) for name in config.rivals),
        *(("relibra", b) for b in config.residents),
    ]:
        topology = topology_of(ranks, trace.num_experts, replica_slots=1, resident_slots=residents)
        cost_model = make_cost_model(trace, whole, topology, config)
        is_search = name == "relibra"
        assign_options = (False, True) if is_search else (False,)
        steady = list(itertools.product(["steady"], assign_options))
        cold = list(itertools.product(["cold"], assign_options)) if full and is_search else []
        measures_of: dict[tuple[str, bool], list[dict[str, float]]] = {}
        for seed in range(config.seeds if is_search and full else 1):
            variants = steady + (cold if seed == 0 else [])
            run = run_variants(name, draw, topology, cost_model, seed=seed, variants=variants)
            for variant, measures in run:
                measures_of.setdefault(variant, []).append(measures)
        rows += [
            Row(draw.name, ranks, name, residents, assigned, start, len(each), mean_over_seeds(each))
            for (start, assigned), each in measures_of.items()
        ]
    return rows


def report_ranks(trace: Trace, draws: Sequence[Draw], ranks: str, config: BeyondBalance) -> list[Report]:
    """Return the tables of all draws on one topology, and their numbers.

    Args:
        trace: the recorded routing.
        draws: the draws; the first one has all samples.
        ranks: nodes x local ranks.
        config: the settings.
    """
    topology = topology_of(ranks, trace.num_experts, replica_slots=1)
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
    """Print the tables of every topology and draw, and write their numbers.

    Args:
        config: the settings.
    """
    trace, console = some_layers(read_trace(config.trace), config.layers), Console(width=160)
    look_up("model=", config.model, MODELS)  # raises an error before anything runs
    check_integer("layers", config.layers, least=1)
    draws = draw_samples(trace, config)
    for name in config.rivals:
        look_up("rivals: ", name, PLANNERS)
    for ranks, residents in itertools.product(config.ranks, config.residents):
        topology = topology_of(ranks, trace.num_experts, replica_slots=1, resident_slots=residents)
        make_cost_model(trace, draws[0], topology, config)  # raises an error before anything runs
    # Most of the time is compilation, which uses one core per program; topologies share no programs.
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(report_ranks, trace, draws, ranks, config) for ranks in config.ranks]
        reports = [report for job in jobs for report in job.result()]
    for table in itertools.chain(*(report.tables for report in reports)):
        console.print(table)
    if config.record is not None:
        about = {"trace": trace.name, "seeds": config.seeds, "layers": config.layers}
        about |= dataclasses.asdict(costs_of(config))
        write_json(config.record, {**about, "tables": [report.numbers for report in reports]})


if __name__ == "__main__":
    sys.exit(run_program(main, BeyondBalance, description=__doc__))
