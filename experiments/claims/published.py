"""Headline claims of ReLibra (arXiv 2605.08639), ForeMoE (arXiv 2606.11867) and others, and their figures in a cell.

Published figures were measured, on other traces, models and clusters. The figures of relibra_jax are modelled. A claim
has no figure in a cell that lacks one of its rows. Systems of others are at their best: a claim about EPLB is about the
fastest of its rows (`experiments.claims.rivals`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from experiments.claims.cells import CellResult
from experiments.claims.rivals import best_rival, best_rows
from experiments.claims.rows import ASSIGNED, WITH_ALL, WITH_RESIDENTS

type Numbers = Mapping[str, Mapping[str, Any]]
"""The numbers of a cell, by row."""


class Figure(NamedTuple):
    """One figure of relibra_jax for a claim."""

    value: float
    """The figure, negated where a smaller figure is better."""
    shown: str
    """The figure as the report prints it."""


class Claim(NamedTuple):
    """One claim of a paper, or one additional figure of the report."""

    text: str
    """The claim in words."""
    published: str
    """The published figure; empty if nothing was published."""
    least: float | None
    """The smallest published value, on the scale of `Figure.value`; relibra_jax is behind if its figure is smaller.
    None if there is nothing to compare with."""
    rows: tuple[str, ...]
    """The rows that the figure is computed from."""
    compute: Callable[[CellResult], Figure]
    """The function that computes the figure from a cell with these rows."""
    measured_pair: tuple[str, str] | None = None
    """The two planners whose measured updates give the speed of the second over the first; None if not measured."""


def _gain(rows: Numbers, base: str, better: str) -> float:
    """Return the speed of the row ``better`` divided by that of the row ``base``, in modelled time."""
    return rows[base]["modelled_seconds"] / rows[better]["modelled_seconds"]


def _times(base: str, better: str) -> Callable[[CellResult], Figure]:
    def figure(cell: CellResult) -> Figure:
        value = _gain(cell.rows, base, better)
        return Figure(value, f"{value:.2f}x")

    return figure


def _percent_more(base: str, better: str) -> Callable[[CellResult], Figure]:
    def figure(cell: CellResult) -> Figure:
        value = _gain(cell.rows, base, better) - 1
        return Figure(value, f"{value:+.1%}")

    return figure


def _of_balanced(row: str) -> Callable[[CellResult], Figure]:
    def figure(cell: CellResult) -> Figure:
        value = cell.rows[row]["share_of_balanced"]
        return Figure(value, f"{value:.1%}")

    return figure


def _in_full(row: str) -> Callable[[CellResult], Figure]:
    """Show the share of the balanced run's speed with what becomes of it under other terms."""

    def figure(cell: CellResult) -> Figure:
        numbers = cell.rows[row]
        value = numbers["share_of_balanced"]
        others = {
            "overlapped": numbers["share_overlapped"],
            "as needed": numbers["share_as_needed"],
            "of local": numbers["share_of_local"],
        }
        shown = ", ".join(f"{name} {share:.1%}" for name, share in others.items())
        return Figure(value, f"{value:.1%} ({shown})")

    return figure


def _system_over_static(system: str) -> Callable[[CellResult], Figure]:
    def figure(cell: CellResult) -> Figure:
        value = _gain(cell.rows, "static", best_rows(cell.rows)[system])
        return Figure(value, f"{value:.2f}x")

    return figure


def _system_of_balanced(system: str) -> Callable[[CellResult], Figure]:
    def figure(cell: CellResult) -> Figure:
        return _of_balanced(best_rows(cell.rows)[system])(cell)

    return figure


def _over_plus(cell: CellResult) -> Figure:
    best = best_rows(cell.rows)
    eplb, lplb = (_gain(cell.rows, best[name], "relibra") for name in ("eplb", "lplb"))
    return Figure(min(eplb, lplb), f"{eplb:.2f}x, {lplb:.2f}x")


def _best_rival(cell: CellResult) -> Figure:
    name = best_rival(cell.rows)
    assert name is not None
    value = cell.rows[name]["share_of_balanced"]
    return Figure(value, f"{value:.1%} ({name})")


def _over_best_rival(row: str) -> Callable[[CellResult], Figure]:
    def figure(cell: CellResult) -> Figure:
        name = best_rival(cell.rows)
        assert name is not None
        value = _gain(cell.rows, name, row)
        return Figure(value, f"{value:.2f}x")

    return figure


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
    """The claims of one source."""

    title: str
    """The source, and the conditions of its measurements."""
    section: str
    """The section of the cells that the figures of relibra_jax are computed from."""
    claims: Sequence[Claim]
    """The claims of this source."""


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
                measured_pair=("static", "relibra"),
            ),
            Claim(
                "speed over EPLB+ and over LPLB+ (measured: over EPLB+)",
                "1.06x to 1.21x",
                1.06,
                ("eplb", "lplb", "relibra"),
                _over_plus,
                measured_pair=("eplb", "relibra"),
            ),
            Claim(
                "speed over PopFetcher",
                "1.17x to 1.27x",
                1.17,
                ("popfetcher", "relibra"),
                _times("popfetcher", "relibra"),
            ),
            Claim(
                "share of the balanced run's speed",
                "90% to 94%",
                0.90,
                ("relibra",),
                _of_balanced("relibra"),
                measured_pair=("balanced", "relibra"),
            ),
            Claim(
                "speed of reordering alone over static (paper: Qwen3-235B, mixed data)",
                "1.15x",
                1.15,
                ("static", "+ reorder"),
                _times("static", "+ reorder"),
            ),
            Claim(
                "speed of replication alone over static",
                "",
                None,
                ("static", "+ replicate"),
                _times("static", "+ replicate"),
            ),
            Claim(
                "speed of reordering and replication over static (paper: Qwen3-235B, mixed data)",
                "1.39x",
                1.39,
                ("static", "relibra"),
                _times("static", "relibra"),
            ),
            Claim(
                "speed of data locality alone (samples assigned to ranks) over static",
                "",
                None,
                ("static", "static + assign"),
                _times("static", "static + assign"),
            ),
            Claim(
                "gain of annealed homes over greedy LPT",
                "+5% to +16%",
                0.05,
                ("place by lpt", "place for balance"),
                _percent_more("place by lpt", "place for balance"),
            ),
            Claim(
                "gain of joint replication over placing replicas alone (tokens split evenly)",
                "+12% to +24%",
                0.12,
                ("places only", "relibra"),
                _percent_more("places only", "relibra"),
            ),
            Claim(
                "gain of joint replication over splitting tokens alone (EPLB's replicas)",
                "+9% to +12%",
                0.09,
                ("splits only", "relibra"),
                _percent_more("splits only", "relibra"),
            ),
            Claim("imbalance of rank load", "1.00 to 1.08", -1.08, ("static", "relibra"), _imbalance),
            Claim(
                "reordering as a share of the batch's time", "1.4% to 2.1%", -0.021, ("relibra",), _reorder
            ),
            Claim(
                "memory of replicas as a share of the weights", "0.13% to 1.62%", -0.0162, (), _replica_memory
            ),
        ),
    ),
    Paper(
        "ForeMoE (arXiv 2606.11867): recompute and update, 64 GPUs",
        "recompute",
        (
            Claim(
                "speed of foremoe over static",
                "up to 1.45x",
                None,
                ("static", "foremoe"),
                _times("static", "foremoe"),
            ),
            Claim(
                "speed of relibra over static", "", None, ("static", "relibra"), _times("static", "relibra")
            ),
            Claim(
                "foremoe: share of the balanced run's speed",
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
                "speed of UltraEP over static (arXiv 2606.04101)",
                "1.42x",
                None,
                ("static", "ultraep"),
                _system_over_static("ultraep"),
            ),
            Claim(
                "UltraEP: share of the balanced run's speed",
                "94.3%",
                None,
                ("ultraep",),
                _system_of_balanced("ultraep"),
            ),
            Claim(
                "speed of LAER-MoE over static (published: over its baselines, arXiv 2602.11686)",
                "up to 1.69x",
                None,
                ("static", "laer"),
                _system_over_static("laer"),
            ),
            Claim(
                "LLEP: share of the balanced run's speed", "", None, ("llep",), _system_of_balanced("llep")
            ),
            Claim(
                "MoonEP: share of the balanced run's speed",
                "",
                None,
                ("moonep",),
                _system_of_balanced("moonep"),
            ),
            Claim(
                "FEPLB: share of the balanced run's speed", "", None, ("feplb",), _system_of_balanced("feplb")
            ),
        ),
    ),
    Paper(
        "Beyond the papers",
        "headline",
        (
            Claim(
                "best rival (the fastest of all systems of others): share of the balanced run's speed",
                "",
                None,
                ("static", "eplb"),
                _best_rival,
            ),
            Claim(
                "ReLibra: share of the balanced run's speed",
                "",
                None,
                ("relibra",),
                _in_full("relibra"),
            ),
            Claim(
                "speed of ReLibra over the best rival",
                "",
                None,
                ("static", "eplb", "relibra"),
                _over_best_rival("relibra"),
            ),
            Claim(
                "samples assigned: share of the balanced run's speed",
                "",
                None,
                (ASSIGNED,),
                _in_full(ASSIGNED),
            ),
            Claim(
                "one resident per rank: share of the balanced run's speed",
                "",
                None,
                (WITH_RESIDENTS,),
                _in_full(WITH_RESIDENTS),
                measured_pair=("balanced", "relibra + residents"),
            ),
            Claim(
                "samples assigned and one resident per rank: share of the balanced run's speed",
                "",
                None,
                (WITH_ALL,),
                _in_full(WITH_ALL),
            ),
            Claim(
                "speed with samples assigned and one resident per rank, over static",
                "",
                None,
                ("static", WITH_ALL),
                _times("static", WITH_ALL),
            ),
            Claim(
                "speed with samples assigned and one resident per rank, over the best rival",
                "",
                None,
                ("static", "eplb", WITH_ALL),
                _over_best_rival(WITH_ALL),
            ),
        ),
    ),
)
"""The claims, by their sources."""


def figure_of(claim: Claim, cell: CellResult) -> Figure | str | None:
    """Compute the figure of relibra_jax for a claim.

    Args:
        claim: the claim.
        cell: the results of a cell.

    Returns:
        The figure; None if the cell lacks one of the claim's rows; or, if a row does not fit the memory of a rank, a
        string that names the memory it needs.
    """
    if cell.skipped or not set(claim.rows) <= cell.rows.keys():
        return None
    for name in claim.rows:
        row = cell.rows[name]
        if not row["fits"]:
            return f"needs {row['rank_memory'] / 1e9:.0f} GB"
    return claim.compute(cell)
