"""What the program prints of a layer: its operations, their parts, and measured times beside them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from experiments.layer_price.measured import MeasuredLayer
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.layer_operations import Operation

PARTS: Final[Mapping[str, str]] = {
    "attention": "attention",
    "experts": "experts",
    "links": "exchanges",
    "rows": "gathers and sums",
    "small": "gates, checks, choices",
    "replicas": "replicas, beside attention",
}
"""The parts of a layer in tables and figures."""
OUTSIDE: Final = ("rows", "small")
"""The parts that are neither products nor links."""


def milliseconds(operations: Iterable[Operation], cluster: Cluster, **chosen: str) -> float:
    """Return the milliseconds of the operations whose fields have the given values."""
    return 1e3 * sum(
        each.seconds(cluster)
        for each in operations
        if all(getattr(each, name) == value for name, value in chosen.items())
    )


def in_layer(operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations that take time in a layer: without preparation, and without replicas beside attention."""
    return [each for each in operations if each.during != "batch" and each.part != "replicas"]


def layer_table(
    operations: Sequence[Operation], cluster: Cluster, title: str, measured: MeasuredLayer | None
) -> Table:
    """Return the table of all operations of a layer.

    Args:
        operations: the operations.
        cluster: the cluster.
        title: what the layer is.
        measured: the measured times of a layer on one GPU; None leaves their column blank. That of the whole layer is
            left out if the layer sends rows, which one GPU does not.
    """
    table = Table(title=title, caption="MB of memory read and written, and sent on links, in both passes")
    for name in ("operation", "forward ms", "backward ms", "share", "memory", "inside", "across", "launches"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    table.add_column("measured ms", justify="right")
    total = milliseconds(in_layer(operations), cluster)
    known = _measured_cells(measured)
    if any(each.part == "links" for each in operations):
        known.pop("layer", None)

    def add(name: str, rows: Sequence[Operation], *, style: str | None = None, of_layer: bool = True) -> None:
        forward, backward = (milliseconds(rows, cluster, during=each) for each in ("forward", "backward"))
        once = milliseconds(rows, cluster, during="batch")
        sizes = (
            sum(each.read + each.written for each in rows),
            sum(each.inside for each in rows),
            sum(each.across for each in rows),
        )
        table.add_row(
            name,
            f"{forward or once:.3f}" if forward or once else "",
            f"{backward:.3f}" if backward else "",
            f"{(forward + backward) / total:.1%}" if of_layer else "",
            *(f"{size / 1e6:,.0f}" if size >= 5e5 else "" for size in sizes),
            str(sum(each.launches + each.collectives for each in rows)),
            known.get(name, ""),
            style=style,
        )

    for part, label in PARTS.items():
        rows = [each for each in operations if each.part == part and each.during != "batch"]
        names = list(dict.fromkeys(each.name for each in rows))
        if not rows:
            continue
        for name in names:
            add(name, [each for each in rows if each.name == name], of_layer=part != "replicas")
        if len(names) > 1:
            add(label, rows, style="bold", of_layer=part != "replicas")
    add("layer", in_layer(operations), style="bold")
    add("tables, once", [each for each in operations if each.during == "batch"], of_layer=False)
    return table


def _measured_cells(measured: MeasuredLayer | None) -> dict[str, str]:
    """Return the cells of the column of measured times, by operation: forward and backward."""
    if measured is None:
        return {}
    return {
        "expert products": f"{measured.experts_forward:.2f} + {measured.experts_backward:.2f}",
        "layer": f"{measured.forward:.2f} + {measured.backward:.2f}",
        "tables, once": f"{measured.tables:.2f}",
    }


def summary(operations: Sequence[Operation], cluster: Cluster) -> str:
    """Return one sentence about what is neither products nor links."""
    layer = in_layer(operations)
    outside = sum(milliseconds(layer, cluster, part=part) for part in OUTSIDE)
    total = milliseconds(layer, cluster)
    return f"neither products nor links: {outside:.2f} of {total:.2f} ms, {outside / total:.1%}"


def scope_table(operations: Sequence[Operation], cluster: Cluster, measured: MeasuredLayer) -> Table:
    """Return the modelled and the measured milliseconds of both passes by named scope."""
    table = Table(title="by named scope, ms of both passes")
    for name in ("scope", "modelled", "kernels measured on one GPU"):
        table.add_column(name, justify="left" if name == "scope" else "right")
    layer = in_layer(operations)
    for scope in dict.fromkeys([*(each.scope for each in layer), *measured.scopes]):
        known = measured.scopes.get(scope)
        modelled = milliseconds(layer, cluster, scope=scope)
        table.add_row(scope, f"{modelled:.2f}", "" if known is None else f"{known:.2f}")
    return table


def savings_table(savings: Mapping[str, float], operations: Sequence[Operation], cluster: Cluster) -> Table:
    """Return the table of what a layer would save without an operation."""
    total = milliseconds(in_layer(operations), cluster)
    table = Table(title="without an operation, both passes (experiments.layer_price.savings)")
    for name in ("change", "ms saved", "share"):
        table.add_column(name, justify="left" if name == "change" else "right")
    for name, saved in savings.items():
        table.add_row(name, f"{saved:.2f}", f"{saved / total:.1%}")
    return table


def layer_numbers(operations: Sequence[Operation], cluster: Cluster) -> dict[str, Any]:
    """Return the numbers of the table for a JSON file."""
    layer = in_layer(operations)
    return {
        "milliseconds": milliseconds(layer, cluster),
        "parts": {part: milliseconds(layer, cluster, part=part) for part in PARTS if part != "replicas"},
        "operations": [
            {**each._asdict(), "milliseconds": 1e3 * each.seconds(cluster)} for each in operations
        ],
    }
