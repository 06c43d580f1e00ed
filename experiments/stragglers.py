"""``python -m experiments.stragglers``: time each rank's expert compute alone, and sum the times of the slowest ranks.

One core runs every rank's rows, forward and backward, with nothing else running (`experiments.rank_times`).
"""

import dataclasses
import datetime
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":  # before JAX is imported
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.contenders import ContenderBatch, contenders, expert_weights
from experiments.program import TraceName, run_program, topology_of
from experiments.rank_times import imbalance_over_stages, quotas_of_ranks, rank_seconds, slowest_seconds
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.contract.types import Topology
from relibra_jax.support.atomic_write import write_json
from relibra_jax.traces.read import read_trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Time each rank's expert compute alone."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    ranks: tuple[str, ...] = ("2x4", "4x4")
    """The topologies, each as nodes x local ranks."""
    micro_batches: int = 4
    """The number of micro-batches."""
    layers: int = 2
    """The number of layers."""
    samples_per_rank: int = 4
    """The mean number of samples of a rank in a micro-batch."""
    width: int = 256
    """The model width D."""
    hidden: int = 256
    """The expert width F."""
    repeats: int = 5
    """The number of timed runs of each rank's work; the table uses medians."""
    out: Path | None = None
    """The JSON file for the measured seconds, which ``python -m experiments.claims`` reads. None writes no file."""


def time_slowest_ranks(
    by_name: Mapping[str, ContenderBatch], topology: Topology, config: Stragglers
) -> dict[str, float]:
    """Time every rank's expert compute, and sum the seconds of the slowest ranks.

    Args:
        by_name: the batch with each planner's plan.
        topology: the expert-parallel group.
        config: the settings.

    Returns:
        The sum over layers and micro-batches of the slowest rank's seconds, for each planner.
    """
    weights = expert_weights(topology.num_experts, config.width, config.hidden, 1)[0]
    buffers = [jnp.asarray(weights[:slots]) for slots in (topology.home_slots, topology.replica_slots)]
    most_rows = max(batch.capacities.rows for batch in by_name.values())
    rows = np.random.default_rng(0).normal(size=(most_rows, config.width))
    quotas = {name: quotas_of_ranks(batch.batch_plan.plan.quota) for name, batch in by_name.items()}
    seconds = rank_seconds(quotas, jnp.asarray(rows, jnp.float32), buffers, repeats=config.repeats)
    return {name: slowest_seconds(values) for name, values in seconds.items()}


def seconds_table(title: str, seconds: Mapping[str, float], by_name: Mapping[str, ContenderBatch]) -> Table:
    """Return a table of the seconds of `time_slowest_ranks`, beside the imbalance of each plan."""
    table = Table(title=title, title_justify="left")
    for column in ("planner", "slowest ranks, s", "speed / static", "of balanced", "imbalance"):
        table.add_column(column, justify="left" if column == "planner" else "right")
    for name, value in seconds.items():
        imbalance = imbalance_over_stages(quotas_of_ranks(by_name[name].batch_plan.plan.quota).sum(-1))
        shares = f"{seconds['static'] / value:.2f}", f"{seconds['balanced'] / value:.1%}"
        table.add_row(name, f"{value:.2f}", *shares, f"{imbalance:.3f}")
    return table


def main(config: Stragglers) -> None:
    """Time the ranks, and print a table for each trace and topology.

    Args:
        config: the settings.
    """
    console, tables = Console(), []
    console.print(
        f"jax {jax.__version__}, one core, D={config.width}, F={config.hidden}, float32", highlight=False
    )
    for trace in (read_trace(config.trace), synthetic_trace()):
        for ranks in config.ranks:
            topology = topology_of(ranks, trace.num_experts, replica_slots=2)
            by_name = contenders(
                trace,
                topology,
                micro_batches=config.micro_batches,
                samples_per_rank=config.samples_per_rank,
                layers=config.layers,
            )
            seconds = time_slowest_ranks(by_name, topology, config)
            console.print(seconds_table(f"{trace.name} on {ranks} ranks", seconds, by_name))
            about = {"trace": trace.name, "synthetic": trace.synthetic, "ranks": ranks}
            tables.append({**about, "seconds": seconds})
    if config.out:
        settings = dataclasses.asdict(config)
        about = {"date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(), "jax": jax.__version__}
        about["machine"] = f"one core ({platform.machine()})"
        settings = {name: value for name, value in settings.items() if name not in ("trace", "out")}
        write_json(config.out, {**about, "settings": settings, "tables": tables})


if __name__ == "__main__":
    sys.exit(run_program(main, Stragglers, description=__doc__))
