"""What the program reports of the best deployments: a table, sentences under it, and numbers for the JSON file."""

import itertools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rich.table import Table

from experiments.deploy.best_deployments import BestDeployment, InFlight
from relibra_jax.cli.terminal import wide_table

TABLE_WIDTH: Final = 104
PUBLISHED: Final = (
    "published gains: 1 to 2 x1.90, 2 to 3 x1.10 to x1.38 (MegaScale-Infer, arXiv 2504.02263, measured)"
)


class Column(NamedTuple):
    """A column of the table."""

    name: str
    """The head of the column."""
    meaning: str | None
    """What the note under the table says about the column; None for nothing."""
    cell: Callable[[BestDeployment], str]
    """The text of the column's cell for a deployment."""


COLUMNS: Final = (
    Column("experts", None, lambda row: row.experts),
    Column(
        "attention",
        "copies of attention x the devices of each",
        lambda row: f"{row.search.best.attention_copies} x {row.search.best.attention_devices}",
    ),
    Column(
        "groups",
        "groups of expert devices x the devices of each",
        lambda row: f"{row.placement.groups} x {row.search.best.expert_devices}",
    ),
    Column("slots", "experts that a group holds", lambda row: str(row.placement.slots)),
    Column("m", "micro-batches in flight", lambda row: str(row.search.best.micro_batches)),
    Column("batch", "sequences in flight", lambda row: f"{row.batch:,}"),
    Column(
        "busiest",
        "load of the busiest group over the mean group's, at the loads planned from and in the simulated step",
        lambda row: f"{row.busiest:.2f} {row.simulated.busiest:.2f}",
    ),
    Column("ms/token", None, lambda row: f"{1e3 * row.search.score.step:.1f}"),
    Column(
        "per price",
        "tokens per second and unit of price, by the closed form",
        lambda row: f"{row.search.score.per_price:,.0f}",
    ),
    Column(
        "simulated",
        "the same in a step simulated with routing that the search has not seen; !: this step takes longer than --slo",
        lambda row: f"{row.simulated_per_price:,.0f}{'' if row.simulated_within_slo else ' !'}",
    ),
)
"""The columns of the table."""


def deployment_table(found: Sequence[BestDeployment], title: str) -> Table:
    """Make a table of the best deployments, one line for each assumption about the experts.

    Args:
        found: the best deployments.
        title: the title of the table: the model, the trace and the clusters.
    """
    table = wide_table(title, width=TABLE_WIDTH)
    for column in COLUMNS:
        table.add_column(column.name, justify="left" if column is COLUMNS[0] else "right", no_wrap=True)
    for deployment in found:
        table.add_row(*(column.cell(deployment) for column in COLUMNS))
    return table


def explain(planned: BestDeployment, in_flight: Sequence[InFlight]) -> list[str]:
    """Return the lines under the table: times of the planned deployment, gains of micro-batches, and the columns.

    Args:
        planned: the best deployment with planned experts.
        in_flight: its throughput with each number of micro-batches in flight.
    """
    score, step = planned.search.score, planned.simulated
    seconds = float(step.schedule.seconds)
    lines = [
        f"planned row, times of a layer of a micro-batch: attention {1e6 * score.attention:.0f} us, experts"
        f" {1e6 * score.experts:.0f} us, transfer {1e6 * score.exchange:.0f} us each way",
        f"planned row, step simulated with routing of the second half: {1e3 * seconds:.2f} ms, closed form"
        f" {1e3 * score.step:.2f} ms (simulated {seconds / score.step - 1:+.1%}); idle: attention"
        f" {step.attention_idle:.0%}, all expert devices at once {step.expert_idle:.0%}, an expert device on average"
        f" {step.group_idle:.0%}",
    ]
    if len(in_flight) > 1:
        lines += [
            _gains("the planned deployment with only m changed, whether it fits or not", "same", in_flight),
            _gains("the best deployment for each m", "best", in_flight),
        ]
    columns = [f"{column.name}: {column.meaning}" for column in COLUMNS if column.meaning]
    return [*lines, PUBLISHED, *columns, "All numbers are modelled; nothing was measured."]


def _gains(assumption: str, field: str, points: Sequence[InFlight]) -> str:
    gains = []
    for first, second in itertools.pairwise(points):
        slower, faster = getattr(first, field), getattr(second, field)
        gain = "none fits" if slower is None or faster is None else f"x{faster / slower:.2f}"
        gains.append(f"{first.micro_batches} to {second.micro_batches} {gain}")
    return f"gain of more micro-batches in flight, {assumption}: {', '.join(gains)}"


def deployment_numbers(found: BestDeployment) -> dict[str, object]:
    """Return the numbers of a deployment for the JSON file.

    Args:
        found: the best deployment under one assumption.
    """
    simulated = found.simulated
    return {
        **found.search.best._asdict(),
        "expert_groups": found.placement.groups,
        "slots": found.placement.slots,
        "batch": found.batch,
        "busiest_over_mean": found.busiest,
        "simulated_busiest_over_mean": simulated.busiest,
        **{f"modelled_{name}": value for name, value in found.search.score._asdict().items()},
        "simulated_step": float(simulated.schedule.seconds),
        "simulated_within_slo": found.simulated_within_slo,
        "simulated_per_price": found.simulated_per_price,
        "attention_idle": simulated.attention_idle,
        "expert_idle": simulated.expert_idle,
        "group_idle": simulated.group_idle,
        "tried": int(found.search.feasible.size),
        "feasible": int(found.search.feasible.sum()),
    }
