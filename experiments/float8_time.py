"""``python -m experiments.float8_time [TRACE]``: what hot ranks in float8 may gain a recompute at most, modelled.

A recompute is one forward pass over the micro-batches of a batch, under the plan of its updates. Every phase of a layer
waits for its slowest rank (`relibra_jax.cost.step_time`); the experts of hot ranks (`relibra_jax.hot_ranks`) are priced
at the cluster's peak of float8 products, and rounding at nothing. No time here was measured.
"""

import dataclasses
import math
import sys
from typing import Annotated, Final, NamedTuple

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from relibra_jax.cli.batching import make_batches
from relibra_jax.cli.modelled_time import CostModel, make_cost_model
from relibra_jax.cli.options import Batching, Costs, Ranks, TraceName
from relibra_jax.cli.parsing import run_program
from relibra_jax.cli.planner_runs import Contender, PlannedBatch, run_contender
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.hot_ranks import HotRanks, mark_hot_ranks
from relibra_jax.limits import check_integer, check_not_negative
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.traces.read import read_trace
from relibra_jax.types import Topology

PLANNED: Final = ("static", "eplb", "relibra")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Time:
    """Price recomputes with and without marks.

    Raises:
        ValueError: if a number is out of its range.
    """

    trace: TraceName = None
    thresholds: tuple[float, ...] = (1.5, 1.25, 1.0, 0.0)
    """Ranks above so many times the mean compute in float8; 0 for all."""
    min_rows: int = 2048
    """The fewest rows of a rank in float8, at the size to which the trace is scaled."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    batching: Annotated[Batching, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Batching)
    costs: Annotated[Costs, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Costs)

    def __post_init__(self) -> None:
        for threshold in self.thresholds:
            check_not_negative("thresholds", threshold)
        check_integer("min_rows", self.min_rows, least=1)


class Priced(NamedTuple):
    """Modelled milliseconds of a recompute."""

    marked: float
    """The share of ranks in float8, over all layers and micro-batches."""
    compute: float
    """The experts."""
    total: float
    """All phases."""


def price(batches: list[PlannedBatch], topology: Topology, cost: CostModel, rule: HotRanks | None) -> Priced:
    """The mean over batches of what their recompute takes, with the ranks in float8 that ``rule`` marks.

    Args:
        batches: the batches with their plans.
        topology: the expert-parallel group.
        cost: cluster, model and scale.
        rule: what makes a rank hot, in rows of the trace; None for no marks.
    """
    rows = []
    for batch in batches:
        marks = None if rule is None else mark_hot_ranks(batch.batch_plan.plan, rule)
        time = batch_time(
            *(batch.batch_plan, topology),
            visits=cost.visits(batch, topology),
            updates=0,
            recompute=True,
            float8=marks,
            **cost.setting(),
        )
        share = 0.0 if marks is None else float(marks.mean())
        rows.append((share, 1e3 * float(time.compute), 1e3 * float(time.total)))
    return Priced(*map(float, np.mean(rows, axis=0)))


def main(config: Float8Time) -> None:
    """Plan, price, and print the table."""
    trace = read_trace(config.trace)
    topology = config.ranks.topology(trace.num_experts)
    batches = make_batches(trace, config.batching, topology)
    cost = make_cost_model(config.costs, trace, batches, topology)
    floor = math.ceil(config.min_rows / cost.scale)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("plan")
    for column in ("float8 above", "ranks", "experts, ms", "recompute, ms", "gain"):
        table.add_column(column, justify="right")
    for name in PLANNED:
        planned, _ = run_contender(
            *(Contender(entry=PLANNERS[name]), batches, topology),
            cost=cost.unit_times(),
            seed=config.batching.seed,
            timed_runs=0,
        )
        exact = price(planned, topology, cost, None)
        table.add_row(name, "-", "0%", f"{exact.compute:.1f}", f"{exact.total:.1f}", "1.00x")
        for threshold in config.thresholds:
            found = price(planned, topology, cost, HotRanks(threshold=threshold, min_rows=floor))
            numbers = f"{found.marked:.0%}", f"{found.compute:.1f}", f"{found.total:.1f}"
            table.add_row("", f"{threshold:g} x mean", *numbers, f"{exact.total / found.total:.2f}x")
        table.add_section()
    console = Console()
    console.print(
        f"{trace.name} as {config.costs.model} on {config.costs.cluster}, {config.ranks.nodes} x"
        f" {config.ranks.ranks_per_node} ranks, {batches.num_micro_batches} micro-batches of"
        f" {config.costs.tokens_per_rank:g} tokens a rank; modelled, not measured",
        highlight=False,
    )
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, Float8Time, description=__doc__))
