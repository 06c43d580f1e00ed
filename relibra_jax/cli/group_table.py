"""The part of ``relibra advise`` about groups of fewer nodes: the table, and the numbers of the file."""

from collections.abc import Sequence
from typing import Any, Final

from rich.table import Table

from relibra_jax.cli.terminal import wide_table
from relibra_jax.evaluation.group_sizes import GroupPrice
from relibra_jax.support.counted import counted

COLUMNS: Final = """\
nodes, groups: the nodes of a group of ranks with all experts, and the number of groups, over which experts are sharded
gathered: when groups gather experts: in every micro-batch (the default), or once an update (gather_once)
fastest strategy: of those above, with the numbers of slots that are best for one group of all nodes
between: modelled time of a batch in which groups exchange weights and gradients, with nothing beside it
time: with that exchange, which the table above does not have; gain: how much faster than the first row"""


def group_table(groups: Sequence[GroupPrice], limit: float, *, width: int) -> Table:
    """Make a table with the fastest strategy of groups of each size.

    Args:
        groups: the fastest strategy of each size, first that of one group of all nodes.
        limit: the memory of a rank, in bytes.
        width: the width of the table, in characters.
    """
    table = wide_table("groups of each size, and data parallelism between them", width=width)
    for name in ("nodes", "groups"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("gathered", "fastest strategy"):
        table.add_column(name, no_wrap=True)
    for name in ("between", "time", "gain", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in groups:
        fits = each.memory <= limit
        table.add_row(
            str(each.nodes),
            str(each.groups),
            _gathered(each),
            each.strategy.label,
            f"{each.exchange:.2f}s",
            f"{each.seconds:.2f}s",
            f"{groups[0].seconds / each.seconds - 1:+.1%}",
            f"{each.memory / 1e9:.1f}" + ("" if fits else " too much"),
            style="" if fits else "dim",
        )
    return table


def fastest_groups(groups: Sequence[GroupPrice], limit: float) -> str:
    """Return one line that names the fastest groups that fit the memory; those of all nodes do."""
    best = min((each for each in groups if each.memory <= limit), key=lambda each: each.seconds)
    when = "once an update" if best.gather_once else "in every micro-batch"
    gathered = "" if best.groups == 1 else f", experts gathered {when}"
    size = counted(best.nodes, "node")
    return f"fastest within {limit / 1e9:g} GB per rank: groups of {size}{gathered}, {best.strategy.label}"


def group_numbers(groups: Sequence[GroupPrice]) -> list[dict[str, Any]]:
    """Return the numbers of the file."""
    return [each._asdict() | {"strategy": each.strategy.label} for each in groups]


def _gathered(group: GroupPrice) -> str:
    if group.groups == 1:
        return "-"
    return "once" if group.gather_once else "every micro-batch"
