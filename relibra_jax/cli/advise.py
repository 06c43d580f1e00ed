"""``relibra advise``: which balancing strategy pays on a trace, in modelled time.

MoE-GPS (arXiv 2506.07366) asks which prediction of loads pays for copying experts: its accuracy, its overhead and its
gain. Here predictors are compared with routing replay, which gives the true loads before a batch runs. All times are
modelled.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from relibra_jax.cli.advice_figure import draw_advice
from relibra_jax.cli.group_table import COLUMNS as GROUP_COLUMNS
from relibra_jax.cli.group_table import fastest_groups, group_numbers, group_table
from relibra_jax.cli.options import TraceName
from relibra_jax.cli.predictor_table import (
    COLUMNS,
    Networks,
    best_with_replay,
    predictor_numbers,
    predictor_table,
    replica_slots_of,
    with_best,
)
from relibra_jax.cli.terminal import progress_bar, wide_table
from relibra_jax.contract.types import Topology
from relibra_jax.cost.memory import rank_memory
from relibra_jax.evaluation import Batching, Costs, Ranks, Setting, make_setting
from relibra_jax.evaluation.advice import STEPS, Advice, best_slots, over_skew, over_tokens, price
from relibra_jax.evaluation.group_sizes import (
    GroupPrice,
    group_setting,
    groups_without_samples,
    price_groups,
    smaller_groups,
    strategies_of,
)
from relibra_jax.evaluation.predictor_prices import PredictorPrice, price_predictors
from relibra_jax.evaluation.predictors import make_predictors
from relibra_jax.evaluation.strategies import strategies
from relibra_jax.evaluation.thresholds import EVEN_SHARES, PAYS, Point, route_some_evenly, threshold
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.counted import counted
from relibra_jax.support.limits import check_positive
from relibra_jax.support.output_paths import check_folder
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace

TABLE_WIDTH: Final = 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advise:
    """Find the balancing strategy that pays most on a trace, the sizes and skews from which balancing pays, whether
    groups of fewer nodes are faster, and what predictors of the loads gain against replay."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    nodes: int = 2
    """The number of nodes, N."""
    ranks_per_node: int = 4
    """The number of ranks on each node, G."""
    replica_slots: tuple[int, ...] = (1, 2)
    """Numbers to try: replica slots on each rank."""
    resident_slots: tuple[int, ...] = (1,)
    """Numbers to try: resident slots on each rank."""
    memory: Annotated[
        float | None, tyro.conf.arg(help_behavior_hint="(default: the memory of the cluster's ranks)")
    ] = None
    """The memory that weights and optimizer state may take on a rank, in GB."""
    batching: Annotated[Batching, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Batching)
    costs: Annotated[Costs, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Costs)
    networks: Annotated[Networks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Networks)
    out: Path = Path("out/advise")
    """The folder that the figure and the numbers are written to."""


def run_advise(options: Advise, console: Console) -> None:
    """Compute the modelled time of every strategy, print the results, and write the figure and the numbers.

    It prints a table of the strategies, the best one that fits the memory, and the thresholds where balancing pays;
    then a table of groups of fewer nodes, if there are any, and one of the predictors of loads.

    Args:
        options: the trace, the settings, the slots to try, and the folder to write to.
        console: the console that the table is printed on.

    Raises:
        ValueError: if the trace and the settings do not fit each other, an accuracy or cost of a predictor is out of
            its range, no strategy fits the memory, or the folder is a file. Nothing is written then.
    """
    check_folder(options.out, option="out")
    trace = read_trace(options.trace)
    advised = _advise(options, trace, console)
    title = (
        f"{trace.name} on {counted(options.nodes, 'node')} x {counted(options.ranks_per_node, 'rank')}:"
        f" {options.costs.model} on"
        f" {options.costs.cluster}, {options.costs.tokens_per_rank:g} tokens per rank and micro-batch"
    )
    _print_advised(advised, title, options, console)
    options.out.mkdir(parents=True, exist_ok=True)
    figure, numbers = options.out / "advise.png", options.out / "advise.json"
    draw_advice(figure, advised.advice, advised.sizes, advised.skews, advised.predictors, title)
    write_json(numbers, _report(advised, title))
    console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


class _Advised(NamedTuple):
    """What is advised on a trace."""

    limit: float
    """The memory of a rank, in bytes."""
    advice: Sequence[Advice]
    """The results of the strategies. The first one is the strategy that does nothing."""
    best: Advice
    """The fastest strategy that runs and fits the memory."""
    sizes: Sequence[Point]
    """The gain by the number of tokens of a rank."""
    skews: Sequence[Point]
    """The gain by the imbalance under static placement."""
    groups: Sequence[GroupPrice]
    """The results of groups of all nodes and of fewer."""
    too_many: Sequence[int]
    """The numbers of nodes of groups that are not priced."""
    slots: int
    """The replica slots of a rank for which predictors are priced."""
    predictors: Sequence[PredictorPrice]
    """The results of predictors, and of replay."""
    missing: Mapping[str, str]
    """The predictors that the trace does not allow, with the reason."""
    replayed: Advice
    """The strategy in the last row of the predictors."""


def _advise(options: Advise, trace: Trace, console: Console) -> _Advised:
    """Price the strategies, the sizes and skews, smaller groups and predictors, beside a bar of progress."""
    networks = options.networks.networks()
    topology = _topology(options, 0, 0, trace.num_experts)
    prepare = functools.partial(
        make_setting, topology=topology, batching=options.batching, cost=options.costs
    )
    setting = prepare(trace)
    tried = strategies(replica_slots=options.replica_slots, resident_slots=options.resident_slots)
    for strategy in tried:  # raises before anything runs if the slots do not fit
        _topology(options, strategy.replica_slots, strategy.resident_slots, trace.num_experts)
    limit = setting.cost_model.cluster.memory
    if options.memory is not None:
        check_positive("memory", options.memory)
        limit = options.memory * 1e9
    _check_limit(limit, setting)
    with progress_bar(console, width=12) as bar:
        task = bar.add_task("strategies", total=len(tried))

        def progress() -> None:
            bar.update(task, advance=1)

        advice = price(tried, setting, progress=progress)
        fitting = [each for each in advice if each.memory <= limit]
        candidates = best_slots([each for each in advice if each.memory <= limit or each is advice[0]])
        bar.reset(task, description="thresholds", total=(STEPS + len(EVEN_SHARES)) * len(candidates))
        sizes = over_tokens(candidates, setting, options.costs.tokens_per_rank, progress=progress)
        flatter = (route_some_evenly(trace, share, seed=options.batching.seed) for share in EVEN_SHARES)
        skews = over_skew(candidates, map(prepare, flatter), progress=progress)
        groups = price_groups(advice, setting, limit)
        for nodes in smaller_groups(setting):
            smaller = group_setting(
                trace, topology, options.batching, options.costs, whole=setting, nodes=nodes
            )
            in_group = strategies_of(candidates, nodes)
            bar.reset(task, description=counted(nodes, "node"), total=len(in_group))
            groups += price_groups(price(in_group, smaller, progress=progress), smaller, limit)
        predictors, missing = make_predictors(
            setting.batches, networks, num_experts=trace.num_experts, seed=options.batching.seed
        )
        bar.reset(task, description="predictors", total=len(predictors))
        slots = replica_slots_of(fitting)
        own = dataclasses.replace(setting, topology=dataclasses.replace(topology, replica_slots=slots))
        replayed = best_with_replay(fitting)
        prices = with_best(price_predictors(predictors, own, progress=progress), replayed)
    return _Advised(
        limit=limit,
        advice=advice,
        best=min((each for each in fitting if each.strategy.runs), key=lambda each: each.seconds),
        sizes=sizes,
        skews=skews,
        groups=groups,
        too_many=groups_without_samples(setting),
        slots=slots,
        predictors=prices,
        missing=missing,
        replayed=replayed,
    )


def _print_advised(advised: _Advised, title: str, options: Advise, console: Console) -> None:
    """Print the tables, each with the lines that explain it."""

    def print_table(table: Table, *lines: str) -> None:
        console.print(table, crop=False, soft_wrap=True)
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)

    limit, best, nodes = advised.limit, advised.best, counted(options.nodes, "node")
    print_table(
        advice_table(advised.advice, limit, title),
        f"best strategy within {limit / 1e9:g} GB per rank in {nodes}:"
        f" {best.strategy.label}, planned from {_LOADS_KNOWN[best.strategy.foresight]}",
        _pays("tokens per rank and micro-batch", advised.sizes, "{:,.0f}"),
        _pays("imbalance under static placement", advised.skews, "{:.2f}"),
        _COLUMNS,
    )
    if len(advised.groups) > 1:
        print_table(
            group_table(advised.groups, limit, width=TABLE_WIDTH),
            fastest_groups(advised.groups, limit),
            GROUP_COLUMNS,
        )
    if advised.too_many:
        console.print(
            f"groups of {', '.join(map(str, advised.too_many))} of {nodes} are not priced: they would"
            " have more micro-batches than a batch has samples",
            highlight=False,
            soft_wrap=True,
        )
    print_table(
        predictor_table(advised.predictors, replica_slots=advised.slots, width=TABLE_WIDTH),
        *(f"not available: {name}: {reason}" for name, reason in advised.missing.items()),
        f"replay, best strategy: {advised.replayed.strategy.label}",
        COLUMNS,
    )


def _report(advised: _Advised, title: str) -> dict[str, object]:
    """Return the numbers of the file."""
    return {
        "setting": title,
        "memory_limit": advised.limit,
        "strategies": [_numbers(each) for each in advised.advice],
        "best": advised.best.strategy.label,
        "tokens": [point._asdict() for point in advised.sizes],
        "tokens_from_which_it_pays": threshold(advised.sizes),
        "skew": [point._asdict() for point in advised.skews],
        "imbalance_from_which_it_pays": threshold(advised.skews),
        "groups": group_numbers(advised.groups),
        "predictors": predictor_numbers(
            advised.predictors, advised.missing, advised.replayed, replica_slots=advised.slots
        ),
    }


_LOADS_KNOWN: Final = {
    "none": "no loads",
    "history": "the loads of earlier batches",
    "batch": "the true loads of the batch",
    "micro-batch": "the true loads of every micro-batch",
}
_COLUMNS: Final = """\
foresight: the loads that the strategy plans from: none, earlier batches', the batch's, or every micro-batch's
R, B: replica slots and resident slots on each rank
imbalance: max / mean of rank load over the batch
exposed: modelled time of a batch in which experts are transferred and nothing else runs
time: modelled time of a batch; gain: how much faster than the first row
GB: modelled memory of a rank; "too much": more than --memory, or than the cluster has"""


def advice_table(advice: Sequence[Advice], limit: float, title: str) -> Table:
    """Make a table with one line for each strategy.

    Args:
        advice: the results of the strategies. The first one is the strategy that does nothing.
        limit: the memory of a rank, in bytes.
        title: the title of the table: the trace, the ranks and the costs.
    """
    table = wide_table(title, width=TABLE_WIDTH)
    for name in ("strategy", "foresight"):
        table.add_column(name, no_wrap=True)
    for name in ("R", "B", "imbalance", "exposed", "time", "gain", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in advice:
        fits = each.memory <= limit
        table.add_row(
            each.strategy.name,
            each.strategy.foresight,
            str(each.strategy.replica_slots),
            str(each.strategy.resident_slots),
            f"{each.imbalance:.3f}",
            f"{each.transfers:.2f}s",
            f"{each.seconds:.2f}s",
            f"{advice[0].seconds / each.seconds - 1:+.1%}",
            f"{each.memory / 1e9:.1f}" + ("" if fits else " too much"),
            style="" if fits else "dim",
        )
    return table


def _topology(options: Advise, replica_slots: int, resident_slots: int, num_experts: int) -> Topology:
    return Ranks(
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        replica_slots=replica_slots,
        resident_slots=resident_slots,
    ).topology(num_experts)


def _check_limit(limit: float, setting: Setting) -> None:
    """Raise unless the memory of a rank suffices without slots, as every strategy needs at least that."""
    cost_model = setting.cost_model
    least = rank_memory(setting.topology, cost_model.model, shards=cost_model.shards).total
    if least > limit:
        raise ValueError(
            f"memory={limit / 1e9:.1f} GB is too little: every strategy needs at least {least / 1e9:.1f} GB per rank;"
            " use more ranks or shards"
        )


def _pays(quantity: str, points: Sequence[Point], number: str) -> str:
    """Return one line that says from which value on balancing pays."""
    tried = f"tried from {number.format(points[0].at)} to {number.format(points[-1].at)}"
    start = threshold(points)
    if start is None:
        return f"{quantity}: no strategy gains {PAYS:.0%} ({tried})"
    if start == points[0].at:
        return f"{quantity}: balancing gains {PAYS:.0%} or more at every value ({tried})"
    return f"{quantity}: balancing gains {PAYS:.0%} or more from about {number.format(start)} on ({tried})"


def _numbers(advice: Advice) -> dict[str, object]:
    numbers = advice.strategy._asdict() | advice._asdict()
    return {name: value for name, value in numbers.items() if name not in ("strategy", "entry")}
