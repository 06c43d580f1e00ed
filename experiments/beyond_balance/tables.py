"""The tables of ``python -m experiments.beyond_balance``, and numbers that combine several of their rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from experiments.beyond_balance.measures import micro_batches_to_pay


class Row(NamedTuple):
    """One line of the table."""

    samples: str
    ranks: str
    planner: str
    residents: int
    assigned: bool
    start: str
    seeds: int
    measures: dict[str, float]


def plans_table(rows: Sequence[Row], title: str, uniform: Mapping[str, float]) -> Table:
    """Return the table of imbalance, crossings and throughput; its first row is the balanced run with uniform routing.

    Args:
        rows: the plans.
        title: the title of the table.
        uniform: the crossings under uniform routing.
    """
    table = Table(title=title, title_justify="left")
    for column in ("planner", "residents", "samples", "homes"):
        table.add_column(column)
    for column in (
        "imbalance",
        "copies crossing",
        "tokens crossing",
        "busiest node",
        "busiest rank",
        "of balanced",
    ):
        table.add_column(column, justify="right")
    copies, tokens = uniform["copies_crossing"], f"{uniform['tokens_crossing']:.2f}"
    table.add_row("balanced", "", "", "", "1.000", f"{copies:.3f}", tokens, tokens, tokens, "100.0%")
    for row in rows:
        one = row.measures
        table.add_row(
            row.planner,
            str(row.residents),
            "assigned" if row.assigned else "packed",
            row.start,
            f"{one['imbalance']:.3f}",
            f"{one['copies_crossing']:.3f}",
            *(f"{one[name]:.2f}" for name in ("mean", "busiest_node", "busiest_rank")),
            f"{one['of_balanced']:.1%}",
        )
    return table


def residents_cost(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare plans with residents with the same plans without them, from steady homes: costs and savings.

    Args:
        rows: the plans of one draw on one topology.
    """
    steady = {
        (row.residents, row.assigned): row
        for row in rows
        if (row.planner, row.start) == ("relibra", "steady")
    }
    names = ("resident_memory_bytes", "memory_bytes", "pushed_bytes", "returned_bytes", "push_seconds")
    return [
        {
            "residents": residents,
            "assigned": assigned,
            **{name: row.measures[name] for name in names},
            "saved_seconds_a_micro_batch": steady[0, assigned].measures["micro_batch_seconds"]
            - row.measures["micro_batch_seconds"],
            "micro_batches_to_pay": micro_batches_to_pay(row.measures, steady[0, assigned].measures),
        }
        for (residents, assigned), row in steady.items()
        if residents and (0, assigned) in steady
    ]


def residents_table(costs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the numbers of `residents_cost` as a table."""
    table = Table(title="Cost of residents per update", title_justify="left")
    for column in (
        "residents",
        "samples",
        "memory per rank",
        "total memory",
        "pushed",
        "returned",
        "seconds",
        "saved per micro-batch",
        "pays from",
    ):
        table.add_column(column, justify="right")
    for one in costs:
        pays = one["micro_batches_to_pay"]
        table.add_row(
            str(one["residents"]),
            "assigned" if one["assigned"] else "packed",
            *(
                f"{one[name] / 1e9:.1f} GB"
                for name in ("resident_memory_bytes", "memory_bytes", "pushed_bytes", "returned_bytes")
            ),
            f"{one['push_seconds']:.3f}",
            f"{one['saved_seconds_a_micro_batch']:.4f} s",
            "never" if pays is None else f"{pays:.1f} micro-batches",
        )
    return table
