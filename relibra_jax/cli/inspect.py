"""``relibra inspect``: the size of a trace, how unevenly its experts are used, and how fast that changes."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.table import Table

from relibra_jax.cli.options import TraceName
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.statistics import (
    contiguous_imbalance,
    count_load,
    hot_expert_churn,
    hottest_expert,
    load_spread,
    micro_batch_load,
    neighbour_correlation,
    pair_lift,
)
from relibra_jax.traces.trace import Trace

RANKS: Final = 8
"""The ranks whose imbalance is told."""
MICRO_BATCHES: Final = (1, 4, 16)
"""The numbers of micro-batches for which it is told; the last is that whose neighbours are compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe a trace: its size, how unevenly its experts are used, and how fast that changes."""

    trace: TraceName = None
    """A trace by name or path (.npz); else what RELIBRA_TRACE gives, else the recorded one of the package."""


def run_inspect(options: Inspect, console: Console) -> None:
    """Print a table of what a trace holds.

    Args:
        options: the trace.
        console: the console for the table.

    Raises:
        ValueError: if the trace is missing or malformed.
    """
    trace = read_trace(options.trace)
    lengths = trace.replay.mask.sum(1)
    layers, top_k = trace.replay.expert_ids.shape[2:]
    load = count_load(trace.replay, trace.num_experts)
    by_expert = load.sum(0)
    unused = int((by_expert == 0).sum())
    table = Table(title=trace.name, title_justify="left", show_header=False)
    for name, value in (
        ("samples", f"{len(lengths)}"),
        ("domains", _domains(trace)),
        (
            "tokens",
            f"{lengths.sum()}" + (f" ({lengths.min()} to {lengths.max()} a sample)" if lengths.any() else ""),
        ),
        ("MoE layers", f"{layers}"),
        ("experts", f"{trace.num_experts}, top-{top_k}"),
        # Every layer routes every token: without tokens no layer has a mean.
        ("hottest expert, times the mean", _by_layer(hottest_expert, by_expert)),
        ("experts never used", f"{unused} of {by_expert.size} over all layers"),
        *(_balance(trace, load) if lengths.any() else ()),
        ("note", trace.note or "none"),
    ):
        table.add_row(name, value)
    console.print(table)


def _balance(trace: Trace, load: Int[np.ndarray, "B L E"]) -> Iterator[tuple[str, str]]:
    """What is told of a trace that has tokens."""
    yield "spread of experts' loads", f"{_by_layer(load_spread, load.sum(0))} (standard deviation / mean)"
    if trace.replay.expert_ids.shape[-1] > 1:
        lift = pair_lift(trace.replay, trace.num_experts)
        times = f"{lift.mean.mean():.2f} times chance on the mean, at most {lift.largest.max():.1f}"
        yield "experts that tokens use together", times
    *few, most = sorted({min(number, len(load)) for number in MICRO_BATCHES})
    name, said = f"imbalance of {RANKS} contiguous ranks", f"{trace.num_experts} experts do not divide"
    if not trace.num_experts % RANKS:
        parts = [(number, micro_batch_load(load, number)) for number in (*few, most)]
        said = ", ".join(f"{contiguous_imbalance(part, RANKS):.2f} in {number}" for number, part in parts)
        said += " micro-batches of the whole trace"
    yield name, said
    if few:
        shifting = micro_batch_load(load, most)
        new = f"{hot_expert_churn(shifting):.0%} of the hottest eighth are new in the next of {most} micro-batches"
        yield "hot experts that change", new
        yield "loads of neighbouring micro-batches", f"correlate by {neighbour_correlation(shifting):.2f}"


def _by_layer(measure: Callable[[np.ndarray], np.ndarray], load: Int[np.ndarray, "L E"]) -> str:
    if not load.any():
        return "none, there are no tokens"
    values = measure(load)
    return f"{values.min():.2f} to {values.max():.2f} by layer, median {np.median(values):.2f}"


def _domains(trace: Trace) -> str:
    if len(trace.domains) < 2:
        return "not known"
    sizes = np.bincount(trace.domain)
    return f"{len(sizes)}, of {sizes.min()} to {sizes.max()} samples"
