"""The tables of ``python -m experiments.beyond_balance``, and numbers that combine several of their rows."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from rich.table import Table

from experiments.beyond_balance.measures import micro_batches_to_pay
from experiments.claims.rivals import best_rival, best_rows

SHARES: Final = {
    "of_balanced": "of balanced",
    "overlapped": "overlapped",
    "as_needed": "as needed",
    "of_local": "of local",
}
"""The shares of the balanced run's speed, with their columns."""


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

    Every system of others is shown at its best, and the fastest of them once more, as the best rival.

    Args:
        rows: the plans.
        title: the title of the table.
        uniform: the crossings under uniform routing.
    """
    table = Table(title=title, title_justify="left")
    for column in ("planner", "residents", "samples", "homes"):
        table.add_column(column, no_wrap=True)
    for column in (
        "imbalance",
        "copies crossing",
        "tokens crossing",
        "busiest node",
        "busiest rank",
        *SHARES.values(),
    ):
        table.add_column(column, justify="right", min_width=max(map(len, column.split())))
    copies, tokens = uniform["copies_crossing"], f"{uniform['tokens_crossing']:.2f}"
    table.add_row(
        "balanced", "", "", "", "1.000", f"{copies:.3f}", tokens, tokens, tokens, *["100.0%"] * len(SHARES)
    )
    for name, row in _at_their_best(rows).items():
        one = row.measures
        table.add_row(
            name.partition(",")[0],
            str(row.residents),
            "assigned" if row.assigned else "packed",
            row.start,
            f"{one['imbalance']:.3f}",
            f"{one['copies_crossing']:.3f}",
            *(f"{one[name]:.2f}" for name in ("mean", "busiest_node", "busiest_rank")),
            *(f"{one[share]:.1%}" for share in SHARES),
        )
    return table


def _at_their_best(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the fastest row of every system of others, the fastest of them as best rival, and ReLibra's rows."""
    numbers = {
        row.planner: {"share_of_balanced": row.measures["of_balanced"], "fits": True}
        for row in rows
        if row.planner != "relibra"
    }
    rivals = {row.planner: row for row in rows if row.planner in best_rows(numbers).values()}
    best = best_rival(numbers)
    if best is not None:
        rivals[f"best rival: {best}"] = rivals[best]
    own = [row for row in rows if row.planner == "relibra"]
    return rivals | {f"relibra, {number}": row for number, row in enumerate(own)}


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
    names = ("resident_memory_bytes", "memory_bytes", "push_seconds")
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
            *(f"{one[name] / 1e9:.1f} GB" for name in ("resident_memory_bytes", "memory_bytes")),
            f"{one['push_seconds']:.3f}",
            f"{one['saved_seconds_a_micro_batch']:.4f} s",
            "never" if pays is None else f"{pays:.1f} micro-batches",
        )
    return table
