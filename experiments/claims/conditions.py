"""``python -m experiments.claims.conditions [TRACE]``: where parts of ReLibra gain as much as its paper says.

It runs the sweeps of `experiments.claims.part_gains`, and writes their numbers, tables and a figure: the page
docs/evidence/parts.md.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import PercentFormatter
from rich.console import Console

from experiments.claims.part_gains import (
    BALANCED_HOMES,
    SKEWS,
    BalanceCell,
    HomesCell,
    read_loads,
    skewed_trace,
    sweep_balance,
    sweep_homes,
    waiting_share,
)
from experiments.claims.settings import PAPER_MODELS
from experiments.program import TraceName, run_program
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import GRID, INK, SERIES
from relibra_jax.support.atomic_write import write_atomically, write_json

SHARE_MODEL: Final = "qwen3-235b-a22b"
"""The model whose `waiting_share` the tables and the figure use."""
PUBLISHED: Final = {"splits, ": (0.09, 0.12), "even split, ": (0.12, 0.24), "homes": (0.05, 0.16)}
"""The least and the largest published gain over each kind of baseline, by the beginning of the names of its rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """Sweep the conditions under which parts of ReLibra gain what its paper says."""

    trace: TraceName = None
    """The recorded trace: a name or the path of an .npz file."""
    out: Path = Path("out/conditions")
    """The folder that the figure and the numbers are written to."""


def main(options: Conditions) -> None:
    """Run both sweeps, and write the numbers, the tables and a figure.

    Raises:
        ValueError: if the trace cannot be read, or is too short for the longest micro-batch.
        OSError: if the folder cannot be made.
    """
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    loads = read_loads(options.trace)
    cells: dict[str, list[Any]] = {"replication": [], "balanced_homes": [], "homes": []}
    sweeps: dict[str, Iterator[Any]] = {
        "replication": sweep_balance(loads),
        "balanced_homes": sweep_balance(loads, slots=(1,), rows=BALANCED_HOMES),
        "homes": sweep_homes([skewed_trace(skew) for skew in SKEWS[1:]]),
    }
    for name, sweep in sweeps.items():
        for cell in sweep:
            cells[name].append(cell)
            console.print(f"{name}: {' '.join(map(str, cell[:5]))}", soft_wrap=True)
        jax.clear_caches()
    shares, shares_of_experts = (
        {model: waiting_share(model, experts_alone=alone) for model in PAPER_MODELS}
        for alone in (False, True)
    )
    numbers = {name: [cell._asdict() for cell in each] for name, each in cells.items()}
    write_json(
        options.out / "conditions.json",
        {"waiting_share": shares, "experts_share": shares_of_experts, **numbers},
    )
    share = shares[SHARE_MODEL]
    tables = {
        "replication": replication_table(cells["replication"], share),
        "reached": reached_table(cells["replication"], (shares_of_experts[SHARE_MODEL], share, 1.0)),
        "homes": homes_table(cells["balanced_homes"], cells["homes"], share),
    }
    for name, table in tables.items():
        with write_atomically(options.out / f"{name}.md") as part:
            part.write_text(table)
    draw(options.out / "conditions.png", *cells.values(), share=share)
    console.print(f"tables, figure and numbers: {options.out}", soft_wrap=True)


def replication_table(cells: Sequence[BalanceCell], share: float) -> str:
    """Return the gains of joint replication as a table: the median and, in brackets, the largest of all settings.

    Args:
        cells: the settings.
        share: the share of the time that waits for the fullest rank.
    """
    slots, samples = (
        sorted({getattr(cell, name) for cell in cells}) for name in ("replica_slots", "samples")
    )
    lines = [
        ["slots", "over", *(f"{each} samples" for each in samples)],
        ["---", "---", *["---:"] * len(samples)],
    ]
    for count, rival in itertools.product(slots, list(cells[0].imbalance)[2:]):
        gains = [
            [
                cell.gain(rival, share=share)
                for cell in cells
                if (cell.replica_slots, cell.samples) == (count, each)
            ]
            for each in samples
        ]
        lines.append([str(count), rival, *(f"{np.median(each):.1%} ({max(each):.1%})" for each in gains)])
    return _markdown(lines)


def reached_table(cells: Sequence[BalanceCell], shares: Sequence[float]) -> str:
    """Return in how many settings joint replication gains at least the least published gain, as a table.

    Args:
        cells: the settings.
        shares: the shares of the time that wait for the fullest rank.
    """
    lines = [["over", *(f"{share:.0%} waits" for share in shares)], ["---", *["---:"] * len(shares)]]
    for rival in list(cells[0].imbalance)[2:]:
        least = next(gains[0] for kind, gains in PUBLISHED.items() if rival.startswith(kind))
        counts = [sum(cell.gain(rival, share=share) >= least for cell in cells) for share in shares]
        lines.append([rival, *(f"{count} of {len(cells)}" for count in counts)])
    return _markdown(lines)


def homes_table(balance: Sequence[BalanceCell], homes: Sequence[HomesCell], share: float) -> str:
    """Return the gains of annealed homes over LPT as a table: the least, the median and the largest of all settings.

    Args:
        balance: the settings of `BALANCED_HOMES`.
        homes: the settings of `HOMES`.
        share: the share of the time that waits for the fullest rank.
    """
    lines = [
        ["homes annealed for", "replicas", "setting", "least", "median", "largest"],
        ["---"] * 3 + ["---:"] * 3,
    ]

    def add(aim: str, replicas: str, setting: str, gains: list[float]) -> None:
        lines.append(
            [aim, replicas, setting, *(f"{each:+.1%}" for each in (min(gains), np.median(gains), max(gains)))]
        )

    for kind, samples in itertools.product(("joint", "alone"), sorted({cell.samples for cell in balance})):
        names = {"rival": f"LPT, {kind}", "own": f"annealed, {kind}"}
        gains = [cell.gain(**names, share=share) for cell in balance if cell.samples == samples]
        add("balance", {"joint": "joint", "alone": "none"}[kind], f"{samples} samples a micro-batch", gains)
    for nodes, samples in sorted({(cell.nodes, cell.samples) for cell in homes}):
        some = [cell for cell in homes if (cell.nodes, cell.samples) == (nodes, samples)]
        for as_needed, how in ((False, "as run"), (True, "only needed rows sent")):
            gains = [cell.gain(as_needed=as_needed) for cell in some]
            add("time", "joint", f"{nodes} nodes, {samples} samples a micro-batch, {how}", gains)
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(
    path: Path,
    cells: Sequence[BalanceCell],
    balance: Sequence[BalanceCell],
    homes: Sequence[HomesCell],
    *,
    share: float,
) -> None:
    """Draw the gains of joint replication with one slot, and those of annealed homes, beside the published ones.

    Args:
        path: the PNG file to write.
        cells, balance, homes, share: the arguments of `replication_table` and `homes_table`.
    """
    figure, panels = plt.subplots(1, 3, figsize=(12.6, 4.4), layout="constrained", sharey=True)
    one_slot = [cell for cell in cells if cell.replica_slots == min(each.replica_slots for each in cells)]
    samples = sorted({cell.samples for cell in one_slot})
    for axes, published in zip(panels, PUBLISHED.values(), strict=True):
        axes.axhspan(*published, color=GRID, label="published")
    for axes, prefix in zip(panels[:2], PUBLISHED, strict=False):
        rivals = [name for name in one_slot[0].imbalance if name.startswith(prefix)]
        for rival, colour, marker in zip(rivals, SERIES, "os^v", strict=False):
            gains = [
                [cell.gain(rival, share=share) for cell in one_slot if cell.samples == each]
                for each in samples
            ]
            axes.fill_between(
                samples, *np.quantile(gains, (0.25, 0.75), axis=1), color=colour, alpha=0.15, linewidth=0
            )
            axes.plot(
                samples,
                np.median(gains, axis=1),
                color=colour,
                marker=marker,
                label=rival.removeprefix(prefix),
            )
        title = "splitting alone" if prefix.startswith("splits") else "placing alone (even split)"
        axes.set_title(f"joint replication over {title}", fontsize=10, loc="left", color=INK)
    for ranks, colour in zip(sorted({cell.ranks for cell in balance}), SERIES, strict=False):
        gains = [
            [
                cell.gain("LPT, joint", "annealed, joint", share=share)
                for cell in balance
                if (cell.ranks, cell.samples) == (ranks, each)
            ]
            for each in samples
        ]
        panels[2].plot(samples, np.median(gains, axis=1), color=colour, label=f"for balance, {ranks} ranks")
    for nodes, marker in zip(sorted({cell.nodes for cell in homes}), "os", strict=False):
        points = [(cell.samples, cell.gain()) for cell in homes if cell.nodes == nodes]
        panels[2].plot(*zip(*points, strict=True), marker, color=SERIES[3], label=f"for time, {nodes} nodes")
    panels[2].set_title("annealed homes over LPT", fontsize=10, loc="left", color=INK)
    panels[0].set_ylim(-0.03, 0.4)
    panels[0].set_ylabel("gain in speed")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(samples, [str(each) for each in samples])
        axes.set_xlabel("samples of a micro-batch")
        bare(axes, "y")
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=7.5, frameon=False, loc="upper right")
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(run_program(main, Conditions))
