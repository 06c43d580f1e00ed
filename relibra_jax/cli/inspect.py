"""``relibra inspect``: the size of a trace, and how unevenly its experts are used."""

import dataclasses

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from relibra_jax.cli.options import TraceName
from relibra_jax.replay import sample_load
from relibra_jax.traces.read import read_trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe a trace: its size, and how unevenly its experts are used."""

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
    count = jax.jit(sample_load, static_argnames="num_experts")
    by_expert = np.asarray(count(trace.replay, num_experts=trace.num_experts)).sum(0)
    tokens, hottest = f"{lengths.sum()}", "none, there are no tokens"
    # Every layer routes every token: without tokens no layer has a mean.
    if lengths.any():
        top = by_expert.max(-1) / by_expert.mean(-1)
        tokens += f" ({lengths.min()} to {lengths.max()} a sample)"
        hottest = f"{top.min():.2f} to {top.max():.2f} by layer"
    unused = int((by_expert == 0).sum())
    table = Table(title=trace.name, title_justify="left", show_header=False)
    for name, value in (
        ("samples", f"{len(lengths)}"),
        ("tokens", tokens),
        ("MoE layers", f"{layers}"),
        ("experts", f"{trace.num_experts}, top-{top_k}"),
        ("hottest expert, times the mean", hottest),
        ("experts never used", f"{unused} of {by_expert.size} over all layers"),
        ("note", trace.note or "none"),
    ):
        table.add_row(name, value)
    console.print(table)
