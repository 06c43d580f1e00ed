"""The speedup of a recompute with hot ranks in float8, modelled.

A recompute is one forward pass over the micro-batches of a batch, under the plan of its updates. Every phase of a layer
waits for its slowest rank (`relibra_jax.cost.step_time`). The experts of hot ranks (`experiments.float8.hot_ranks`)
are priced at the rate of float8 products (`relibra_jax.cost.hardware`), and rounding at that of memory. All times
are modelled, not measured.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro
from jaxtyping import Bool, Float, Int
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.float8.hot_ranks import HotRanks, mark_hot_ranks
from experiments.program import TraceName
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import INK, planner_style
from relibra_jax.contract.types import Array, BatchPlan, Price, Topology
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.cost.cost_model import COMPUTE_BYTES, CostModel
from relibra_jax.cost.step_time import attention_time, layer_time, rank_time
from relibra_jax.evaluation import Batching, Costs, PlannedBatch, Ranks, make_setting, run_planner
from relibra_jax.evaluation.prices import count_visits
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.support.limits import check_integer, check_not_negative
from relibra_jax.traces.read import read_trace

PLANNED: Final = ("static", "eplb", "relibra")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Time:
    """Model the time of recomputes with and without ranks in float8.

    Raises:
        ValueError: if a threshold is negative, or ``min_rows`` is below 1.
    """

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    thresholds: tuple[float, ...] = (1.5, 1.25, 1.0, 0.0)
    """The thresholds: ranks with more rows than this multiple of the mean compute in float8. 0 marks all ranks."""
    min_rows: int = 2048
    """The smallest number of rows for which a rank computes in float8, at the size to which the trace is scaled."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    batching: Annotated[Batching, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Batching)
    costs: Annotated[Costs, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Costs)
    figure: Path | None = None
    """The PNG file to draw. None draws no figure."""

    def __post_init__(self) -> None:
        for threshold in self.thresholds:
            check_not_negative("thresholds", threshold)
        check_integer("min_rows", self.min_rows, least=1)


class Priced(NamedTuple):
    """The modelled time of a recompute, in milliseconds."""

    marked: float
    """The share of ranks in float8, over all layers and micro-batches."""
    compute: float
    """The milliseconds of expert compute."""
    total: float
    """The milliseconds of all phases."""


def price_recompute(
    batches: list[PlannedBatch],
    topology: Topology,
    cost_model: CostModel,
    rule: HotRanks | None,
) -> Priced:
    """Model the time of a recompute with the ranks in float8 that ``rule`` marks, as the mean over batches.

    Args:
        batches: the batches with their plans.
        topology: the expert-parallel group.
        cost_model: the cost model.
        rule: the rule that marks hot ranks, in rows of the trace. None marks no rank.
    """
    price = cost_model.price(topology, updates=0, recompute=True)
    recomputes = []
    for batch in batches:
        visits, lengths = count_visits(batch, topology, price), batch.lengths
        time = batch_time(
            batch.batch_plan, lengths, topology, price, visits=visits, sequence_length=batch.sequence_length
        )
        share, compute = 0.0, float(time.compute)
        if rule is not None:
            marks = mark_hot_ranks(batch.batch_plan.plan, rule)
            share = float(marks.mean())
            float8 = float8_price(cost_model, batch.batch_plan.plan.slot_expert.shape[-1])
            compute = float(
                _compute_seconds(batch.batch_plan, lengths, topology, price, marks, float8, visits)
            )
        recomputes.append((share, 1e3 * compute, 1e3 * (float(time.total) - float(time.compute) + compute)))
    return Priced(*map(float, np.mean(recomputes, axis=0)))


class Float8Price(NamedTuple):
    """The time of a rank's experts in float8."""

    products: float
    """The seconds of products, in multiples of those in bfloat16."""
    weights: float
    """The seconds of rounding the weights of all slots."""
    row: float
    """The seconds of rounding one row and its hidden numbers."""


def float8_price(cost_model: CostModel, slots: int) -> Float8Price:
    """Return the price of float8 on a rank, forward.

    Rounding is limited by memory: bfloat16 numbers are read twice, for the largest of a block and for its quotients,
    and written once as float8. Of the hidden numbers, gate and up are read twice, and their product is written.

    Args:
        cost_model: the cost model.
        slots: the number of slots of a rank.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> price = float8_price(CostModel(cluster=CLUSTERS["h100"], model=MODELS["qwen3-235b-a22b"]), slots=18)
    >>> f"{price.products:.2f} {1e3 * price.weights:.2f} ms {1e9 * price.row:.0f} ns"
    '0.71 0.63 ms 13 ns'
    """
    rates, model = cost_model.cluster.rates, cost_model.model
    number = (2 * COMPUTE_BYTES + 1) / rates.memory
    hidden = (4 * COMPUTE_BYTES + 1) / rates.memory
    return Float8Price(
        rates.flops / cost_model.cluster.float8_rate,
        number * slots * model.expert_params,
        cost_model.scale * (number * model.width + hidden * model.expert_width),
    )


@functools.partial(jax.jit, static_argnames="topology")
def _compute_seconds(
    batch_plan: BatchPlan,
    lengths: Int[Array, " B"],
    topology: Topology,
    price: Price,
    marks: Bool[Array, "M L N G"],
    float8: Float8Price,
    visits: Int[Array, "M L P V"] | None,
) -> Float[jax.Array, ""]:
    """Return the seconds of expert compute in all layers, if the experts of marked ranks are in float8."""
    attention, _ = attention_time(batch_plan.assignment, lengths, price)
    ranks = rank_time(batch_plan.layer_plans(), attention, topology, price, visits=visits)
    rows = jnp.asarray(batch_plan.plan.quota, jnp.float32).sum(-1)
    seconds = ranks.compute * float8.products + float8.weights + rows * float8.row
    return layer_time(ranks._replace(compute=jnp.where(marks, seconds, ranks.compute)), price).compute.sum()


def model_times(config: Float8Time, console: Console) -> None:
    """Plan the batches, model their recomputes, and print the table.

    Args:
        config: the settings.
        console: the console that the table is printed on.
    """
    trace = read_trace(config.trace)
    topology = config.ranks.topology(trace.num_experts)
    setting = make_setting(trace, topology, batching=config.batching, cost=config.costs)
    batches, cost = setting.batches, setting.cost_model
    floor = math.ceil(config.min_rows / cost.scale)
    rules = [None, *(HotRanks(threshold=threshold, min_rows=floor) for threshold in config.thresholds)]
    priced: dict[str, list[Priced]] = {}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("planner")
    for column in ("float8 above", "ranks", "experts, ms", "recompute, ms", "speedup"):
        table.add_column(column, justify="right")
    for name in PLANNED:
        planned = run_planner(name, PLANNERS[name], setting, timed_runs=0).batches
        exact, *marked = priced[name] = [price_recompute(planned, topology, cost, rule) for rule in rules]
        table.add_row(name, "-", "0%", f"{exact.compute:.1f}", f"{exact.total:.1f}", "1.00x")
        for threshold, float8 in zip(config.thresholds, marked, strict=True):
            numbers = f"{float8.marked:.0%}", f"{float8.compute:.1f}", f"{float8.total:.1f}"
            table.add_row("", f"{threshold:g} x mean", *numbers, f"{exact.total / float8.total:.2f}x")
        table.add_section()
    title = (
        f"{trace.name} as {config.costs.model} on {config.costs.cluster}, {config.ranks.nodes} x"
        f" {config.ranks.ranks_per_node} ranks, {batches.num_micro_batches} micro-batches of"
        f" {config.costs.tokens_per_rank:g} tokens per rank; modelled, not measured"
    )
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
    if config.figure is not None:
        draw(config.figure, priced, title)


def draw(path: Path, priced: Mapping[str, Sequence[Priced]], title: str) -> None:
    """Draw the modelled time of a recompute over the share of ranks in float8.

    Args:
        path: the PNG file to write.
        priced: the modelled points, by the name of the planner.
        title: the title of the figure, which names the setting.
    """
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    figure.suptitle(title, color=INK, fontsize=9, x=0.01, ha="left", parse_math=False)
    for name, points in priced.items():
        ordered, style = sorted(points), planner_style(name)
        axes.plot(
            [100 * point.marked for point in ordered],
            [point.total for point in ordered],
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            linewidth=1.8,
            label=name,
        )
    axes.set_xlabel("ranks in float8, % of all layers and micro-batches")
    axes.set_ylabel("recompute, modelled ms")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    bare(axes, "y")
    save_figure(figure, path)
