"""The report of the claims as Markdown: where relibra_jax is behind, then recorded routing, then synthetic routing."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from experiments.claims.behind import behind
from experiments.claims.cells import CellResult
from experiments.claims.measured import WHOLE_UPDATES, Measurement
from experiments.claims.own_loads import OwnLoad
from experiments.claims.published import CLAIMS, Claim, Figure, figure_of
from experiments.claims.results import Results
from experiments.claims.rivals import best_rival
from experiments.claims.rows import HEADLINE, is_reconstruction
from relibra_jax.evaluation.advice import TRANSFERS
from relibra_jax.evaluation.thresholds import PAYS, Point, threshold

HOW_LOOSE: Final = (
    "The lower bound (relibra_jax/cost/least_time.py) covers all homes, residents, replicas and assignments of whole"
    " samples. It is a relaxation, which is loose for crossings."
)
BEYOND: Final = (
    "The balanced run has even loads and routing that is uniform over experts, so a plan that keeps tokens in their"
    " node can take less time, and its share is then above 100%. The shares in brackets say what becomes of that under"
    " other terms. *Overlapped*: every exchange overlaps the compute of its layer, in both runs, which nothing runs"
    " today. *As needed*: exchanges send only the rows that are needed, without padding. *Of local*: the balanced run"
    " has as many crossings as the same samples have at contiguous homes."
)
SHARES: Final = {
    "share_of_balanced": "share of the balanced run's speed",
    "share_overlapped": "overlapped",
    "share_as_needed": "as needed",
    "share_of_local": "of local",
}
"""The shares of the balanced run's speed, as the report names them."""
SWEEPS: Final = {
    "micro_batches": "micro-batches per batch",
    "tokens_per_rank": "tokens per rank and micro-batch",
    "replica_slots": "replica slots per rank",
    "resident_slots": "resident slots per rank",
    "nodes": "nodes x ranks per node, 16 ranks",
}
"""The quantity that each sweep varies, as the report names it."""


def write_report(results: Results) -> str:
    """Write the report of the claims.

    Args:
        results: everything that was run or read.

    Returns:
        The report as Markdown.
    """
    parts = [
        "# Claims",
        "Published figures were measured by their authors, on other traces, models and clusters. The figures of"
        " relibra_jax are **modelled** for the routing that each table names, except in columns marked *measured*. The"
        " model (relibra_jax/cost) states the source of every constant. It prices what layers run on GPUs by"
        " default: fitted exchanges, whose buffers have spare room, and hops one after the other. It hides no"
        " transfer except that of replicas, behind attention, and takes planning to be hidden. The shapes of a model"
        " are its widths; the number of experts and top-k are the trace's, but memory is that of the model with its"
        " own experts. No cluster of GPUs has run any of it.",
        BEYOND,
        "## Where relibra_jax is behind",
        _bullets(behind(results)) or "Nowhere in this run.",
        "## Recorded routing",
        *(f"![{caption}]({name})" for name, caption in results.figures.items()),
        *_routing(results, synthetic=False),
    ]
    if results.measured:
        parts += ["### Measured", _measurements(results.measured)]
    if any(cell.synthetic for _, cell in results.cells):
        parts += [
            "## Synthetic routing",
            "This routing is drawn by a generator that is calibrated on recorded routing. Scaling it to more experts is"
            " an assumption, so these results are no evidence for what real models do.",
            *_routing(results, synthetic=True),
        ]
    if results.own_loads:
        parts += [
            "## Baselines on the loads of their own publications",
            "Figures are the largest over the mean rank load, unless the load's description says otherwise. Loads are"
            " drawn as the source describes, and the worst one counts.",
            _own_loads(results.own_loads),
        ]
    skipped = [
        f"{cell.trace}, {cell.model}, {cell.ranks}: {cell.skipped}"
        for _, cell in results.cells
        if cell.skipped
    ]
    if skipped:
        parts += ["## Not run", _bullets(skipped)]
    parts += [
        "## How to reproduce this report",
        _bullets(f"{name}: {value}" for name, value in results.about.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _routing(results: Results, *, synthetic: bool) -> list[str]:
    """Return the paragraphs of the report on recorded or on synthetic routing."""
    parts = []
    for paper in CLAIMS:
        cells = [cell for cell in results.of(paper.section, synthetic=synthetic) if not cell.skipped]
        measured = () if synthetic or paper.section != "headline" else results.measured
        if cells:
            parts += [f"### {paper.title}", *_claims_tables(paper.claims, cells, measured)]
    for cell in results.of("headline", synthetic=synthetic):
        if len(cell.rows) > len(HEADLINE) and not cell.skipped:
            title = f"### Every row: {cell.routing}, {cell.model}'s shapes, {cell.ranks} ranks"
            parts += [title, _rows(cell), HOW_LOOSE]
    ranks = [cell for cell in results.of("ranks", synthetic=synthetic) if not cell.skipped]
    if ranks:
        parts += [
            f"### Imbalance over expert-parallel ranks: {ranks[0].routing}",
            "Published: 1.00 to 1.08 on 8 to 64 ranks; static placement is above 2 on many ranks.",
            _table(
                ["", *(cell.ranks for cell in ranks)],
                [["samples per rank and micro-batch", *(f"{_samples_of_rank(cell):.1f}" for cell in ranks)]]
                + [
                    [name, *(f"{cell.rows[name]['imbalance']:.3f}" for cell in ranks)]
                    for name in ("static", "relibra")
                ],
            ),
        ]
    for section, quantity in SWEEPS.items():
        cells = [cell for cell in results.of(section, synthetic=synthetic) if not cell.skipped]
        if cells:
            title = f"### Sweep of {quantity}: {cells[0].routing}, {cells[0].model}'s shapes"
            parts += [title, _sweep(section, cells), *_where_it_pays(section, cells)]
    return parts


def _samples_of_rank(cell: CellResult) -> float:
    """Return the mean number of samples of a rank in a micro-batch."""
    batching, ranks = cell.cell["batching"], cell.cell["ranks"]
    return batching["batch_size"] / (batching["micro_batches"] * ranks["nodes"] * ranks["ranks_per_node"])


def _claims_tables(
    claims: Sequence[Claim], cells: Sequence[CellResult], measured: Sequence[Measurement]
) -> list[str]:
    """Return one table of claims for each number of ranks."""
    parts = []
    for ranks in dict.fromkeys(cell.ranks for cell in cells):
        cells_of_ranks = [cell for cell in cells if cell.ranks == ranks]
        lines = [
            [
                claim.text,
                claim.published,
                *(_shown(figure_of(claim, cell)) for cell in cells_of_ranks),
                *([_measured_range(claim, measured)] if measured else []),
            ]
            for claim in claims
        ]
        lines = [line for line in lines if any(line[2:])]
        head = [f"{cells_of_ranks[0].routing}, {ranks} ranks", "published, measured"]
        head += [f"relibra_jax, modelled: {cell.model}" for cell in cells_of_ranks]
        head += [f"relibra_jax, measured: {WHOLE_UPDATES}"] * bool(measured)
        parts.append(_table(head, lines))
    return parts


def _shown(figure: Figure | str | None) -> str:
    if figure is None:
        return ""
    return figure if isinstance(figure, str) else figure.shown


def _measured_range(claim: Claim, measured: Sequence[Measurement]) -> str:
    """Return the range of the measured speeds of a claim; empty if it was not measured."""
    whole = [each for each in measured if each.where.startswith(WHOLE_UPDATES)]
    gains = [
        gain
        for each in whole
        if claim.measured_pair and (gain := each.gain(*claim.measured_pair)) is not None
    ]
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
    return _table(["median seconds of interleaved runs", *names, "file"], lines)


def _rows(cell: CellResult) -> str:
    """Return the table of a cell with the numbers in which planners differ, and the best rival in its last line."""
    rival = best_rival(cell.rows)
    named = {_labelled(name): row for name, row in cell.rows.items()}
    if rival is not None:
        named[f"best rival: {_labelled(rival)}"] = cell.rows[rival]
    lines = [
        [
            name,
            f"{row['imbalance']:.3f}",
            f"{row['forecast_error']:.0%}",
            f"{row['crossings']:.2f}",
            f"{row['replicas']:.1f}",
            f"{row['rank_memory'] / 1e9:.1f}" + ("" if row["fits"] else ", does not fit"),
            f"{sum(row['modelled_parts'][part] for part in TRANSFERS):.2f}",
            f"{row['modelled_seconds']:.2f}",
            *(f"{row[share]:.1%}" for share in SHARES),
            f"{row['left']:.0%}",
            f"{row['plan_seconds'] * 1e3:.0f}",
        ]
        for name, row in named.items()
    ]
    head = [
        "",
        "imbalance",
        "error of expected loads",
        "crossings per token",
        "replicas per layer",
        "memory per rank, GB",
        "exposed transfers, s, modelled",
        "time per batch, s, modelled",
        *SHARES.values(),
        "time above the lower bound",
        "planning, ms, measured",
    ]
    return _table(head, lines)


def _labelled(name: str) -> str:
    """Return the name of a row, marked if the planner is a reconstruction from its source's text."""
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
    head += [f"speed over static, {name}" for name in names if name != "static"] + [
        f"share of balanced speed, {name}" for name in names
    ]
    return _table(head, lines)


def _where_it_pays(section: str, cells: Sequence[CellResult]) -> list[str]:
    """Describe the number of tokens from which ReLibra pays, for the sweep of tokens; return [] for other sweeps."""
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
    where = "nowhere in this range" if start is None else f"from about {start:,.0f} tokens per rank on"
    return [f"relibra gains {PAYS:.0%} or more over static placement {where}."]


def varied(section: str, cell: CellResult) -> str:
    """Return the value of the varied quantity in a cell of a sweep, as a string.

    Args:
        section: the sweep, a key of `SWEEPS`.
        cell: the result of a cell of that sweep.
    """
    if section == "nodes":
        return f"{cell.ranks}"
    values: dict[str, Any] = cell.cell["ranks"] | cell.cell["batching"] | cell.cell["costs"]
    return f"{values[section]:g}"


def _own_loads(loads: Sequence[OwnLoad]) -> str:
    lines = [
        [load.planner, load.load, load.published, load.reached, load.relibra, load.source] for load in loads
    ]
    return _table(["baseline", "load", "published", "its planner here", "relibra", "source"], lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
