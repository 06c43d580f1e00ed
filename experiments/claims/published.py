"""Headline claims of ReLibra (arXiv 2605.08639), ForeMoE (arXiv 2606.11867) and others, and their figures in a cell.

Published figures were measured, on other traces, models and clusters. The figures of relibra_jax are modelled. A claim
has no figure in a cell that lacks one of its rows. Systems of others are at their best: a claim about EPLB is about the
fastest of its rows (`experiments.claims.rivals`).
"""

import itertools
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


RIVAL: Final = "best rival"
"""The name that stands for the fastest row of all systems of others; ``best eplb`` stands for the fastest of EPLB."""


def _row_of(rows: Numbers, name: str) -> str:
    """Return the name of a row: ``name`` itself, or the row that it stands for."""
    if name == RIVAL:
        rival = best_rival(rows)
        assert rival is not None
        return rival
    return best_rows(rows)[name.removeprefix("best ")] if name.startswith("best ") else name


def _needed(*names: str) -> tuple[str, ...]:
    """Return the rows that a cell must have for a figure of these names."""
    rows = (("static", "eplb") if name == RIVAL else (name.removeprefix("best "),) for name in names)
    return tuple(itertools.chain(*rows))


def _gain(rows: Numbers, base: str, better: str) -> float:
    """Return the speed of the row ``better`` divided by that of the row ``base``, in modelled time."""
    base, better = _row_of(rows, base), _row_of(rows, better)
    return rows[base]["modelled_seconds"] / rows[better]["modelled_seconds"]


def _speed(
    text: str,
    base: str,
    better: str,
    published: str = "",
    least: float | None = None,
    *,
    measured: tuple[str, str] | None = None,
) -> Claim:
    """Make a claim about the speed of a row over another one, for example 1.21x."""

    def figure(cell: CellResult) -> Figure:
        value = _gain(cell.rows, base, better)
        return Figure(value, f"{value:.2f}x")

    return Claim(text, published, least, _needed(base, better), figure, measured)


def _gained(text: str, base: str, better: str, published: str = "", least: float | None = None) -> Claim:
    """Make a claim about the gain in speed of a row over another one, for example +5.0%."""

    def figure(cell: CellResult) -> Figure:
        value = _gain(cell.rows, base, better) - 1
        return Figure(value, f"{value:+.1%}")

    return Claim(text, published, least, _needed(base, better), figure)


def _share(
    text: str,
    name: str,
    published: str = "",
    least: float | None = None,
    *,
    in_full: bool = False,
    measured: tuple[str, str] | None = None,
) -> Claim:
    """Make a claim about the share of the balanced run's speed, ``in_full`` with the same under other terms."""

    def figure(cell: CellResult) -> Figure:
        row = _row_of(cell.rows, name)
        numbers, remark = cell.rows[row], f" ({row})" * (name == RIVAL)
        if in_full:
            remark = (
                " (overlapped {share_overlapped:.1%}, as needed {share_as_needed:.1%},"
                " of local {share_of_local:.1%})"
            )
        value = numbers["share_of_balanced"]
        return Figure(value, f"{value:.1%}{remark.format_map(numbers)}")

    return Claim(
        f"{text}share of the balanced run's speed", published, least, _needed(name), figure, measured
    )


def _over_plus(cell: CellResult) -> Figure:
    eplb, lplb = (_gain(cell.rows, f"best {name}", "relibra") for name in ("eplb", "lplb"))
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
    """The claims of one source."""

    title: str
    """The source, and the conditions of its measurements."""
    section: str
    """The section of the cells that the figures of relibra_jax are computed from."""
    claims: Sequence[Claim]
    """The claims of this source."""


_RELIBRA: Final = (
    _speed(
        "speed over Megatron-LM (static)",
        "static",
        "relibra",
        "1.21x to 1.58x",
        1.21,
        measured=("static", "relibra"),
    ),
    Claim(
        "speed over EPLB+ and over LPLB+ (measured: over EPLB+)",
        "1.06x to 1.21x",
        1.06,
        ("eplb", "lplb", "relibra"),
        _over_plus,
        measured_pair=("eplb", "relibra"),
    ),
    _speed("speed over PopFetcher", "best popfetcher", "relibra", "1.17x to 1.27x", 1.17),
    _share("", "relibra", "90% to 94%", 0.90, measured=("balanced", "relibra")),
    _speed(
        "speed of reordering alone over static (paper: Qwen3-235B, mixed data)",
        "static",
        "+ reorder",
        "1.15x",
        1.15,
    ),
    _speed("speed of replication alone over static", "static", "+ replicate"),
    _speed(
        "speed of reordering and replication over static (paper: Qwen3-235B, mixed data)",
        "static",
        "relibra",
        "1.39x",
        1.39,
    ),
    _speed(
        "speed of data locality alone (samples assigned to ranks) over static", "static", "static + assign"
    ),
    _gained(
        "gain of annealed homes over greedy LPT (for compute and communication, as in the paper)",
        "place by lpt",
        "relibra",
        "+5% to +16%",
        0.05,
    ),
    _gained("gain of homes annealed for balance alone over greedy LPT", "place by lpt", "place for balance"),
    _gained(
        "gain of joint replication over placing replicas alone (tokens split evenly)",
        "places only",
        "relibra",
        "+12% to +24%",
        0.12,
    ),
    _gained(
        "gain of joint replication over splitting tokens alone (EPLB's replicas of the batch)",
        "splits over fixed places",
        "relibra",
        "+9% to +12%",
        0.09,
    ),
    _gained(
        "gain of joint replication over splitting tokens alone (EPLB's replicas of each micro-batch)",
        "splits only",
        "relibra",
    ),
    Claim("imbalance of rank load", "1.00 to 1.08", -1.08, ("static", "relibra"), _imbalance),
    Claim("reordering as a share of the batch's time", "1.4% to 2.1%", -0.021, ("relibra",), _reorder),
    Claim("memory of replicas as a share of the weights", "0.13% to 1.62%", -0.0162, (), _replica_memory),
)
_FOREMOE: Final = (
    _speed("speed of foremoe over static", "static", "foremoe", "up to 1.45x"),
    _speed("speed of relibra over static", "static", "relibra"),
    _share("foremoe: ", "foremoe", "95% of an oracle"),
)
_OTHERS: Final = (
    _speed("speed of UltraEP over static (arXiv 2606.04101)", "static", "best ultraep", "1.42x"),
    _share("UltraEP: ", "best ultraep", "94.3%"),
    _speed(
        "speed of LAER-MoE over static (published: over its baselines, arXiv 2602.11686)",
        "static",
        "best laer",
        "up to 1.69x",
    ),
    _share("LLEP: ", "best llep"),
    _share("MoonEP: ", "best moonep"),
    _share("FEPLB: ", "best feplb"),
)
_BEYOND: Final = (
    _share("best rival (the fastest of all systems of others): ", RIVAL),
    _share("ReLibra: ", "relibra", in_full=True),
    _speed("speed of ReLibra over the best rival", RIVAL, "relibra"),
    _share("samples assigned: ", ASSIGNED, in_full=True),
    _share(
        "one resident per rank: ", WITH_RESIDENTS, in_full=True, measured=("balanced", "relibra + residents")
    ),
    _share("samples assigned and one resident per rank: ", WITH_ALL, in_full=True),
    _speed("speed with samples assigned and one resident per rank, over static", "static", WITH_ALL),
    _speed("speed with samples assigned and one resident per rank, over the best rival", RIVAL, WITH_ALL),
)

CLAIMS: Final = (
    Paper(
        "ReLibra (arXiv 2605.08639): Qwen3-30B, GLM-4.5, Qwen3-235B on 160 Hopper GPUs", "headline", _RELIBRA
    ),
    Paper("ForeMoE (arXiv 2606.11867): recompute and update, 64 GPUs", "recompute", _FOREMOE),
    Paper("Other papers, on their own traces and clusters", "headline", _OTHERS),
    Paper("Beyond the papers", "headline", _BEYOND),
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
