"""The report of the claims, as Markdown: where ours is behind comes first, recorded routing before synthetic."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from relibra_jax.cli.advise.thresholds import PAYS, Point, threshold
from relibra_jax.cli.claims.behind import behind
from relibra_jax.cli.claims.cells import CellResult
from relibra_jax.cli.claims.measured import WHOLE_UPDATES, Measurement
from relibra_jax.cli.claims.own_loads import OwnLoad
from relibra_jax.cli.claims.published import CLAIMS, Claim, Figure, ours_of
from relibra_jax.cli.claims.results import Results
from relibra_jax.cli.claims.rows import HEADLINE
from relibra_jax.cli.compare import is_reconstruction

TRANSFERS: Final = ("exposed", "push", "reorder")
"""The parts of a batch's modelled time in which experts travel and nothing else runs."""
HOW_LOOSE: Final = (
    "The lower bound (relibra_jax/cost/least_time.py) is over all homes, residents, replicas and assignments of whole"
    " samples. It is a relaxation, and loose for what crosses: the best plans known of the recorded trace are 18% (2"
    " nodes) to 70% (4 nodes, flat dispatch) above it, brute-forced optima of tiny instances 5% to 85%."
)
SWEEPS: Final = {
    "micro_batches": "micro-batches of a batch",
    "tokens_per_rank": "tokens of a rank in a micro-batch",
    "replica_slots": "replica slots of a rank",
    "resident_slots": "resident slots of a rank",
    "nodes": "nodes of 16 ranks",
}
"""What each sweep varies."""


def write_report(results: Results) -> str:
    """The report as Markdown.

    Args:
        results: what was run and read.
    """
    parts = [
        "# Claims",
        "Published figures were measured by their authors, on other traces, models and clusters. Ours are **modelled**"
        " on the routing that is named (relibra_jax/cost: constants with their sources, nothing hidden but replicas"
        " behind attention), except in the columns that say *measured*. A model's shapes are its widths; experts and"
        " top-k are those of the trace, but memory is that of the model itself. Nothing here was run on a GPU.",
        "## Where ours is behind",
        _bullets(behind(results)) or "Nowhere, in what was run.",
        "## Recorded routing",
        *(f"![{what}]({name})" for name, what in results.figures.items()),
        *_routing(results, synthetic=False),
    ]
    if results.measured:
        parts += ["### Measured", _measurements(results.measured)]
    if any(cell.synthetic for _, cell in results.cells):
        parts += [
            "## Synthetic routing",
            "Drawn by a generator that is calibrated on recorded routing and scaled to more experts, which is an"
            " assumption. No evidence for what real models do.",
            *_routing(results, synthetic=True),
        ]
    if results.own_loads:
        parts += [
            "## Rivals on the loads that they publish",
            "Largest over mean rank load unless told otherwise, the worst of the loads drawn as the source says.",
            _own_loads(results.own_loads),
        ]
    skipped = [
        f"{cell.trace}, {cell.model}, {cell.ranks}: {cell.skipped}"
        for _, cell in results.cells
        if cell.skipped
    ]
    if skipped:
        parts += ["## Not run", _bullets(skipped)]
    parts += ["## How this was made", _bullets(f"{name}: {value}" for name, value in results.about.items())]
    return "\n\n".join(parts) + "\n"


def _routing(results: Results, *, synthetic: bool) -> list[str]:
    """The parts of the report on one kind of routing."""
    parts = []
    for paper in CLAIMS:
        cells = [cell for cell in results.of(paper.section, synthetic=synthetic) if not cell.skipped]
        measured = () if synthetic or paper.section != "headline" else results.measured
        if cells:
            parts += [f"### {paper.title}", *_claims_tables(paper.claims, cells, measured)]
    for cell in results.of("headline", synthetic=synthetic):
        if len(cell.rows) > len(HEADLINE) and not cell.skipped:
            title = f"### Every row: {cell.trace}, {cell.model}'s shapes, {cell.ranks} ranks"
            parts += [title, _rows(cell), HOW_LOOSE]
    ranks = [cell for cell in results.of("ranks", synthetic=synthetic) if not cell.skipped]
    if ranks:
        parts += [
            f"### Imbalance over expert-parallel ranks: {ranks[0].trace}",
            "Published: 1.00 to 1.08 on 8 to 64 ranks, static placement above 2 on many.",
            _table(
                ["", *(cell.ranks for cell in ranks)],
                [["samples of a rank in a micro-batch", *(f"{_samples_of_rank(cell):.1f}" for cell in ranks)]]
                + [
                    [name, *(f"{cell.rows[name]['imbalance']:.3f}" for cell in ranks)]
                    for name in ("static", "relibra")
                ],
            ),
        ]
    for section, what in SWEEPS.items():
        cells = [cell for cell in results.of(section, synthetic=synthetic) if not cell.skipped]
        if cells:
            title = f"### Over {what}: {cells[0].trace}, {cells[0].model}'s shapes"
            parts += [title, _sweep(section, cells), *_where_it_pays(section, cells)]
    return parts


def _samples_of_rank(cell: CellResult) -> float:
    """How many samples a rank has in a micro-batch on average."""
    batching, ranks = cell.cell["batching"], cell.cell["ranks"]
    return batching["batch_size"] / (batching["micro_batches"] * ranks["nodes"] * ranks["ranks_per_node"])


def _claims_tables(
    claims: Sequence[Claim], cells: Sequence[CellResult], measured: Sequence[Measurement]
) -> list[str]:
    """One table of claims for each number of ranks."""
    parts = []
    for ranks in dict.fromkeys(cell.ranks for cell in cells):
        here = [cell for cell in cells if cell.ranks == ranks]
        lines = [
            [
                claim.text,
                claim.published,
                *(_shown(ours_of(claim, cell)) for cell in here),
                *([_ran(claim, measured)] if measured else []),
            ]
            for claim in claims
        ]
        lines = [line for line in lines if any(line[2:])]
        head = [f"{here[0].trace}, {ranks} ranks", "published, measured"]
        head += [f"ours, modelled: {cell.model}" for cell in here]
        head += [f"ours, measured: {WHOLE_UPDATES}, ranks 2x1"] * bool(measured)
        parts.append(_table(head, lines))
    return parts


def _shown(figure: Figure | str | None) -> str:
    if figure is None:
        return ""
    return figure if isinstance(figure, str) else figure.shown


def _ran(claim: Claim, measured: Sequence[Measurement]) -> str:
    """The range of measured speeds of a claim."""
    whole = [each for each in measured if each.where.startswith(WHOLE_UPDATES)]
    gains = [gain for each in whole if claim.ran and (gain := each.gain(*claim.ran)) is not None]
    if not gains:
        return ""
    return f"{min(gains):.2f}x to {max(gains):.2f}x" if len(gains) > 1 else f"{gains[0]:.2f}x"


def _measurements(measured: Sequence[Measurement]) -> str:
    names = list(dict.fromkeys(name for each in measured for name in each.seconds))
    lines = [
        [
            each.where,
            *(f"{each.seconds[name]:.2f}" if name in each.seconds else "" for name in names),
            each.file,
        ]
        for each in measured
    ]
    return _table(["seconds, medians of interleaved runs", *names, "kept in"], lines)


def _rows(cell: CellResult) -> str:
    """All numbers of a cell that tell planners apart."""
    lines = [
        [
            _labelled(name),
            f"{row['imbalance']:.3f}",
            f"{row['forecast_error']:.0%}",
            f"{row['crossings']:.2f}",
            f"{row['replicas']:.1f}",
            f"{row['rank_memory'] / 1e9:.1f}" + ("" if row["fits"] else ", does not fit"),
            f"{sum(row['modelled_parts'][part] for part in TRANSFERS):.2f}",
            f"{row['modelled_seconds']:.2f}",
            f"{row['share_of_balanced']:.1%}",
            f"{row['left']:.0%}",
            f"{row['plan_seconds'] * 1e3:.0f}",
        ]
        for name, row in cell.rows.items()
    ]
    head = [
        "",
        "imbalance",
        "error of expected loads",
        "crossings a token",
        "replicas a layer",
        "GB of a rank",
        "exposed transfers, s",
        "batch, s, modelled",
        "of balanced",
        "above the lower bound, at most",
        "plan, ms, measured",
    ]
    return _table(head, lines)


def _labelled(name: str) -> str:
    """The name of a row; what is our reading of a source says so."""
    return f"{name} (reconstruction)" if is_reconstruction(name) else name


def _sweep(section: str, cells: Sequence[CellResult]) -> str:
    names = list(cells[0].rows)
    lines = [
        [
            varied(section, cell),
            *(f"{row['imbalance']:.3f}" for row in cell.rows.values()),
            *(
                f"{cell.rows['static']['modelled_seconds'] / cell.rows[name]['modelled_seconds']:.2f}x"
                for name in names
                if name != "static"
            ),
            *(f"{row['share_of_balanced']:.1%}" for row in cell.rows.values()),
        ]
        for cell in cells
    ]
    head = [SWEEPS[section], *(f"imbalance, {name}" for name in names)]
    head += [f"{name} over static" for name in names if name != "static"] + [
        f"of balanced, {name}" for name in names
    ]
    return _table(head, lines)


def _where_it_pays(section: str, cells: Sequence[CellResult]) -> list[str]:
    """From how many tokens of a rank ReLibra's plans pay, or nothing for other sweeps."""
    if section != "tokens_per_rank":
        return []
    points = [
        Point(
            cell.cell["costs"][section],
            cell.rows["static"]["modelled_seconds"] / cell.rows["relibra"]["modelled_seconds"] - 1,
            "relibra",
        )
        for cell in cells
    ]
    start = threshold(points)
    where = "nowhere in this range" if start is None else f"from about {start:,.0f} tokens of a rank on"
    return [f"relibra gains {PAYS:.0%} and more over static placement {where}."]


def varied(section: str, cell: CellResult) -> str:
    """The value that a sweep has in a cell.

    Args:
        section: a key of `SWEEPS`.
        cell: a result of that sweep.
    """
    if section == "nodes":
        return f"{cell.ranks}"
    values: dict[str, Any] = cell.cell["ranks"] | cell.cell["batching"] | cell.cell["costs"]
    return f"{values[section]:g}"


def _own_loads(loads: Sequence[OwnLoad]) -> str:
    lines = [
        [load.planner, load.load, load.published, load.reached, load.relibra, load.source] for load in loads
    ]
    return _table(["rival", "load", "published", "its row here", "relibra", "source"], lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
