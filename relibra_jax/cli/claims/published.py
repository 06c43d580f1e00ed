"""Headline claims of ReLibra (arXiv 2605.08639) and ForeMoE (arXiv 2606.11867), and how ours are read from a cell.

Published figures were measured, on other traces, models and clusters; ours are modelled. A claim is blank where a cell
has no rows for it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from relibra_jax.cli.claims.cells import CellResult
from relibra_jax.cli.claims.rows import ASSIGNED, WITH_ALL, WITH_RESIDENTS

type Numbers = Mapping[str, Mapping[str, Any]]
"""The numbers of a cell by row."""


class Figure(NamedTuple):
    """One figure of ours."""

    value: float
    """The figure."""
    shown: str
    """The same as the report prints it."""


class Claim(NamedTuple):
    """One claim."""

    text: str
    """What is claimed."""
    published: str
    """The published figure."""
    least: float | None
    """The lower end of what is published: ours is behind if it is below. None if there is none to be behind of."""
    rows: tuple[str, ...]
    """The rows that ours is read from."""
    ours: Callable[[CellResult], Figure]
    """Reads ours from a cell that has the rows."""
    ran: tuple[str, str] | None = None
    """Two contenders of whole updates that were measured, the speed of the second over the first; None for none."""


def _gain(rows: Numbers, base: str, better: str) -> float:
    """How many times as fast a row is as another, in modelled time."""
    return rows[base]["modelled_seconds"] / rows[better]["modelled_seconds"]


def _times(base: str, better: str) -> Callable[[CellResult], Figure]:
    def ours(cell: CellResult) -> Figure:
        value = _gain(cell.rows, base, better)
        return Figure(value, f"{value:.2f}x")

    return ours


def _percent_more(base: str, better: str) -> Callable[[CellResult], Figure]:
    def ours(cell: CellResult) -> Figure:
        value = _gain(cell.rows, base, better) - 1
        return Figure(value, f"{value:+.1%}")

    return ours


def _of_balanced(row: str) -> Callable[[CellResult], Figure]:
    def ours(cell: CellResult) -> Figure:
        value = cell.rows[row]["share_of_balanced"]
        return Figure(value, f"{value:.1%}")

    return ours


def _over_plus(cell: CellResult) -> Figure:
    eplb, lplb = (_gain(cell.rows, name, "relibra") for name in ("eplb", "lplb"))
    return Figure(min(eplb, lplb), f"{eplb:.2f}x, {lplb:.2f}x")


def _imbalance(cell: CellResult) -> Figure:
    value = cell.rows["relibra"]["imbalance"]
    return Figure(-value, f"{value:.3f} (static {cell.rows['static']['imbalance']:.2f})")


def _reorder(cell: CellResult) -> Figure:
    row = cell.rows["relibra"]
    value = row["modelled_parts"]["reorder"] / row["modelled_seconds"]
    return Figure(-value, f"{value:.1%}")


def _replica_memory(cell: CellResult) -> Figure:
    value = cell.cell["replica_share"]
    return Figure(-value, f"{value:.2%}")


class Paper(NamedTuple):
    """What one source claims."""

    title: str
    """The source, and what its figures were measured on."""
    section: str
    """The section of cells that ours is read from."""
    claims: Sequence[Claim]
    """The claims."""


CLAIMS: Final[Sequence[Paper]] = (
    Paper(
        "ReLibra (arXiv 2605.08639): Qwen3-30B, GLM-4.5, Qwen3-235B on 160 Hopper GPUs",
        "headline",
        (
            Claim(
                "speed over Megatron-LM (static)",
                "1.21x to 1.58x",
                1.21,
                ("static", "relibra"),
                _times("static", "relibra"),
                ran=("static", "relibra"),
            ),
            Claim(
                "speed over EPLB+, LPLB+ (measured: EPLB+)",
                "1.06x to 1.21x",
                1.06,
                ("eplb", "lplb", "relibra"),
                _over_plus,
                ran=("eplb", "relibra"),
            ),
            Claim(
                "speed over PopFetcher",
                "1.17x to 1.27x",
                1.17,
                ("popfetcher", "relibra"),
                _times("popfetcher", "relibra"),
            ),
            Claim(
                "share of the balanced run",
                "90% to 94%",
                0.90,
                ("relibra",),
                _of_balanced("relibra"),
                ran=("balanced", "relibra"),
            ),
            Claim(
                "reordering alone, over static (Qwen3-235B, mixed data)",
                "1.15x",
                1.15,
                ("static", "+ reorder"),
                _times("static", "+ reorder"),
            ),
            Claim(
                "replication alone, over static",
                "",
                None,
                ("static", "+ replicate"),
                _times("static", "+ replicate"),
            ),
            Claim(
                "both, over static (Qwen3-235B, mixed data)",
                "1.39x",
                1.39,
                ("static", "relibra"),
                _times("static", "relibra"),
            ),
            Claim(
                "data locality alone (samples assigned), over static",
                "",
                None,
                ("static", "static + assign"),
                _times("static", "static + assign"),
            ),
            Claim(
                "annealed homes over greedy LPT",
                "+5% to +16%",
                0.05,
                ("place by lpt", "place for balance"),
                _percent_more("place by lpt", "place for balance"),
            ),
            Claim(
                "joint replication over placing alone",
                "+12% to +24%",
                0.12,
                ("places only", "relibra"),
                _percent_more("places only", "relibra"),
            ),
            Claim(
                "joint replication over splitting alone",
                "+9% to +12%",
                0.09,
                ("splits only", "relibra"),
                _percent_more("splits only", "relibra"),
            ),
            Claim("imbalance of ranks", "1.00 to 1.08", -1.08, ("static", "relibra"), _imbalance),
            Claim("reordering, of the batch's time", "1.4% to 2.1%", -0.021, ("relibra",), _reorder),
            Claim("memory of replicas, of the weights", "0.13% to 1.62%", -0.0162, (), _replica_memory),
        ),
    ),
    Paper(
        "ForeMoE (arXiv 2606.11867): recompute and update, 64 GPUs",
        "recompute",
        (
            Claim(
                "foremoe over static", "up to 1.45x", None, ("static", "foremoe"), _times("static", "foremoe")
            ),
            Claim("relibra over static", "", None, ("static", "relibra"), _times("static", "relibra")),
            Claim(
                "foremoe, share of the balanced run",
                "95% of an oracle",
                None,
                ("foremoe",),
                _of_balanced("foremoe"),
            ),
        ),
    ),
    Paper(
        "Other papers, on their own traces and clusters",
        "headline",
        (
            Claim(
                "UltraEP over static (arXiv 2606.04101)",
                "1.42x",
                None,
                ("static", "ultraep"),
                _times("static", "ultraep"),
            ),
            Claim("UltraEP, share of the balanced run", "94.3%", None, ("ultraep",), _of_balanced("ultraep")),
            Claim(
                "LAER-MoE over static (published: over its baselines, arXiv 2602.11686)",
                "up to 1.69x",
                None,
                ("static", "laer"),
                _times("static", "laer"),
            ),
            Claim("LLEP, share of the balanced run", "", None, ("llep",), _of_balanced("llep")),
            Claim("MoonEP, share of the balanced run", "", None, ("moonep",), _of_balanced("moonep")),
            Claim("FEPLB, share of the balanced run", "", None, ("feplb",), _of_balanced("feplb")),
        ),
    ),
    Paper(
        "Ours, beyond the papers",
        "headline",
        (
            Claim(
                "samples assigned: share of the balanced run", "", None, (ASSIGNED,), _of_balanced(ASSIGNED)
            ),
            Claim(
                "one resident a rank: share of the balanced run",
                "",
                None,
                (WITH_RESIDENTS,),
                _of_balanced(WITH_RESIDENTS),
                ran=("balanced", "relibra + residents"),
            ),
            Claim("both: share of the balanced run", "", None, (WITH_ALL,), _of_balanced(WITH_ALL)),
            Claim("both, over static", "", None, ("static", WITH_ALL), _times("static", WITH_ALL)),
        ),
    ),
)
"""The claims by the source that makes them."""


def ours_of(claim: Claim, cell: CellResult) -> Figure | str | None:
    """Our figure for a claim: None where the cell has no such rows, GB where a row does not fit a rank's memory."""
    if cell.skipped or not set(claim.rows) <= cell.rows.keys():
        return None
    for name in claim.rows:
        row = cell.rows[name]
        if not row["fits"]:
            return f"needs {row['rank_memory'] / 1e9:.0f} GB"
    return claim.ours(cell)
