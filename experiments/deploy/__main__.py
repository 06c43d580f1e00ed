"""``relibra deploy``: the deployment search of MegaScale-Infer, with the expert loads of recorded routing.

Source of the search: MegaScale-Infer (arXiv 2504.02263), which assumes equally busy experts. All times are modelled.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.deploy.deployments import MEMORY_SHARE, Clusters, Grid, check_search
from experiments.deploy.figure import draw_deployment
from experiments.deploy.rows import InFlight, Row, Terms, make_rows, over_micro_batches
from experiments.program import TraceName
from relibra_jax.cli.modelled_time import find_cluster, find_model
from relibra_jax.cli.terminal import progress_bar, wide_table
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_seed
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace

TABLE_WIDTH: Final = 104
TOKENS: Final = 8192
"""The most tokens of the batch that are used to count how often a token has several experts in one group."""
_ORDERS: Final = {"given": "", "shuffled": " in shuffled order"}
PUBLISHED: Final = (
    "published gains: 1 to 2 x1.90, 2 to 3 x1.10 to x1.38 (MegaScale-Infer, arXiv 2504.02263, measured)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deploy:
    """Size a rollout that serves attention and experts on separate devices, from recorded routing."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file.
    Its first half determines the placement of the experts; the simulated step is drawn from its second half."""
    order: Literal["given", "shuffled"] = "given"
    """The order of the samples: as the trace has them, or shuffled with --seed.
    Shuffle a trace that is sorted by data set, since its halves are different domains otherwise."""
    model: str = "gpt-oss-20b"
    """The model whose sizes are modelled, with the trace's number of experts and top-k."""
    attention_cluster: str = "h100"
    """The cluster whose devices serve attention."""
    expert_cluster: str = "h100"
    """The cluster whose devices serve the experts."""
    attention_price: float = 1.0
    """The price of an attention device, in any unit."""
    expert_price: float = 1.0
    """The price of an expert device, in the same unit."""
    context: float = 4096.0
    """The mean number of tokens of a sequence in the key-value cache."""
    slo: float = 0.1
    """The most seconds between two tokens of a sequence."""
    memory_share: float = MEMORY_SHARE
    """The share of a device's memory that weights and caches may take. A serving engine needs the rest."""
    expert_groups: Annotated[
        tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: all divisors of the number of experts)")
    ] = ()
    """Numbers to try: groups of expert devices."""
    replica_slots: tuple[int, ...] = (0, 1)
    """Numbers to try: replica slots in each group of expert devices."""
    grid: Annotated[Grid, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Grid)
    seed: int = 0
    """The seed of the shuffled order, of the placement search, and of the simulated step."""
    out: Path = Path("out/deploy")
    """The folder that the figure and the numbers are written to."""


def run_deploy(options: Deploy, console: Console) -> None:
    """Search for the best deployments, print them, and write the figure and the numbers.

    It also prints how much throughput changes with the number of micro-batches in flight.

    Args:
        options: the trace, the model, the hardware, the constraints, and the folder to write to.
        console: the console that the table is printed on.

    Raises:
        ValueError: if the trace and the settings do not fit each other, or no deployment is feasible. Nothing is
            written then.
    """
    terms, trace = _terms(options), read_trace(options.trace)
    model = dataclasses.replace(
        terms.model, num_experts=trace.num_experts, top_k=trace.replay.expert_ids.shape[-1]
    )
    groups = options.expert_groups or _divisors(trace.num_experts)
    first_half, second_half = _halves(trace, options, model.moe_layers)
    load = np.asarray(sample_load(first_half, num_experts=trace.num_experts)).sum(0)
    routes = np.asarray(first_half.expert_ids)[np.asarray(first_half.mask)]
    with progress_bar(console, width=12) as bar:
        task = bar.add_task("placements", total=len(groups) * len(options.replica_slots))
        rows = make_rows(
            terms._replace(model=model),
            load,
            routes[:: -(-len(routes) // TOKENS)],
            second_half,
            groups=groups,
            replica_slots=options.replica_slots,
            progress=lambda: bar.update(task, advance=1),
        )
    planned = rows[-1]
    title = (
        f"{options.model} with {trace.num_experts} experts, routing of {trace.name}{_ORDERS[options.order]}: attention"
        f" on {options.attention_cluster}, experts on {options.expert_cluster}, {options.slo * 1e3:g} ms per token"
    )
    console.print(deployment_table(rows, title), crop=False, soft_wrap=True)
    in_flight = over_micro_batches(planned.search)
    for line in (*_simulated_lines(planned), *_in_flight_lines(in_flight), PUBLISHED, _MODELLED):
        console.print(line, highlight=False, soft_wrap=True)
    options.out.mkdir(parents=True, exist_ok=True)
    figure, numbers = options.out / "deploy.png", options.out / "deploy.json"
    draw_deployment(figure, in_flight, planned, title)
    report = {
        "setting": title,
        "rows": {row.experts: _numbers(row) for row in rows},
        "micro_batches": [point._asdict() for point in in_flight],
    }
    write_json(numbers, report)
    console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def deployment_table(rows: Sequence[Row], title: str) -> Table:
    """Make a table of the best deployments, one line for each assumption about the experts.

    Args:
        rows: the best deployments.
        title: the title of the table: the model, the trace and the clusters.
    """
    table = wide_table(title, width=TABLE_WIDTH)
    table.add_column("experts", no_wrap=True)
    names = ("attention", "groups", "slots", "m", "batch", "busiest", "ms/token", "per price", "simulated")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        best, score = row.search.best, row.search.score
        table.add_row(
            row.experts,
            f"{best.attention_copies} x {best.attention_devices}",
            f"{row.placement.groups} x {best.expert_devices}",
            str(row.placement.slots),
            str(best.micro_batches),
            f"{row.batch:,}",
            f"{_busiest(row):.2f} {row.simulated.busiest:.2f}",
            f"{1e3 * score.step:.1f}",
            f"{score.per_price:,.0f}",
            f"{row.simulated_per_price:,.0f}{'' if row.simulated_within_slo else ' !'}",
        )
    return table


_MODELLED = """\
attention, groups: copies of attention, or groups of expert devices, x the devices of each
slots: experts that a group holds; m: micro-batches in flight; batch: sequences in flight
busiest: load of the busiest group over the mean group's, at the loads planned from and in the simulated step
per price: tokens per second and unit of price, by the closed form
simulated: the same in a step simulated with routing that the search has not seen; !: this step takes longer than --slo
All numbers are modelled; nothing was measured."""


def _terms(options: Deploy) -> Terms:
    check_seed("seed", options.seed)
    if not options.replica_slots:
        raise ValueError("replica_slots must name at least one number of slots")
    clusters = Clusters(
        attention=find_cluster(options.attention_cluster),
        experts=find_cluster(options.expert_cluster),
        attention_price=options.attention_price,
        expert_price=options.expert_price,
    )
    limits = {"slo": options.slo, "context": options.context, "memory_share": options.memory_share}
    model = find_model(options.model)
    check_search(model, clusters, options.grid, **limits)
    return Terms(model, clusters, options.grid, **limits, seed=options.seed)


def _divisors(num_experts: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, num_experts + 1) if num_experts % each == 0)


def _halves(trace: Trace, options: Deploy, layers: int) -> tuple[RoutingReplay, RoutingReplay]:
    """Both halves of a trace, the first to place experts by and the second to simulate; at most the model's layers."""
    ids, mask = (np.asarray(each) for each in trace.replay)
    ids = ids[:, :, :layers]
    if options.order == "shuffled":
        order = np.random.default_rng(options.seed).permutation(len(mask))
        ids, mask = ids[order], mask[order]
    half = len(mask) // 2
    if not mask[:half].any() or not mask[half:].any():
        raise ValueError(
            f"{trace.name} has no tokens in one half of its {len(mask)} samples; both halves need tokens, since experts"
            " are placed by the first half and the simulated step is drawn from the second"
        )
    return RoutingReplay(ids[:half], mask[:half]), RoutingReplay(ids[half:], mask[half:])


def _busiest(row: Row) -> float:
    """Return the token copies of the busiest group over those of the mean group, at the loads of the plan."""
    return float(row.placement.groups * row.placement.hottest.mean())


def _simulated_lines(row: Row) -> list[str]:
    score, step = row.search.score, row.simulated
    seconds = float(step.schedule.seconds)
    return [
        f"planned row, times of a layer of a micro-batch: attention {1e6 * score.attention:.0f} us, experts"
        f" {1e6 * score.experts:.0f} us, transfer {1e6 * score.exchange:.0f} us each way",
        f"planned row, step simulated with routing of the second half: {1e3 * seconds:.2f} ms, closed form"
        f" {1e3 * score.step:.2f} ms (simulated {seconds / score.step - 1:+.1%}); idle: attention"
        f" {step.attention_idle:.0%}, all expert devices at once {step.expert_idle:.0%}, an expert device on average"
        f" {step.group_idle:.0%}",
    ]


def _in_flight_lines(points: Sequence[InFlight]) -> list[str]:
    pairs = list(itertools.pairwise(points))
    lines = []
    for name, assumption in (
        ("same", "the planned deployment with only m changed, whether it fits or not"),
        ("best", "the best deployment for each m"),
    ):
        gains = (
            f"{before.micro_batches} to {after.micro_batches} {_gain(getattr(before, name), getattr(after, name))}"
            for before, after in pairs
        )
        lines.append(f"gain of more micro-batches in flight, {assumption}: {', '.join(gains)}")
    return lines if pairs else []


def _gain(before: float | None, after: float | None) -> str:
    return "none fits" if before is None or after is None else f"x{after / before:.2f}"


def _numbers(row: Row) -> dict[str, object]:
    simulated = row.simulated
    return {
        **row.search.best._asdict(),
        "expert_groups": row.placement.groups,
        "slots": row.placement.slots,
        "batch": row.batch,
        "busiest_over_mean": _busiest(row),
        "simulated_busiest_over_mean": simulated.busiest,
        **{f"modelled_{name}": value for name, value in row.search.score._asdict().items()},
        "simulated_step": float(simulated.schedule.seconds),
        "simulated_within_slo": row.simulated_within_slo,
        "simulated_per_price": row.simulated_per_price,
        "attention_idle": simulated.attention_idle,
        "expert_idle": simulated.expert_idle,
        "group_idle": simulated.group_idle,
        "tried": int(row.search.feasible.size),
        "feasible": int(row.search.feasible.sum()),
    }
