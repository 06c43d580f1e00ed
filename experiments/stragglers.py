"""``python -m experiments.stragglers``: each rank's expert compute timed alone, summed over the slowest ranks.

A step waits in every layer of every micro-batch for its slowest rank. Without the ranks' hardware each rank's work
can still be run: its rows, grouped as the plan groups them, forward and backward on one core with nothing else
running. The sum over layers and micro-batches of the slowest rank's time is what expert compute would take on as
many such cores. Exchanges, replica pushes and attention are not in it.
"""

import dataclasses
import datetime
import functools
import os
import platform
import sys
from collections.abc import Callable
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
from experiments.interleaving import interleaved
from experiments.synthetic_traces import synthetic_trace
from pallas_kernels import grouped_mlp
from relibra_jax.atomic_write import write_json
from relibra_jax.cli.options import TraceName
from relibra_jax.cli.parsing import run_program
from relibra_jax.traces.read import read_trace
from relibra_jax.types import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Time each rank's expert compute alone."""

    trace: TraceName = None
    """A trace by name or path (.npz); else the one that RELIBRA_TRACE gives, else the recorded one of this project."""
    ranks: tuple[str, ...] = ("2x4", "4x4")
    """Nodes x local ranks."""
    micro_batches: int = 4
    layers: int = 2
    samples_per_rank: int = 4
    width: int = 256
    hidden: int = 256
    repeats: int = 5
    out: Path | None = None
    """A file for the seconds as JSON, which ``relibra claims`` reads."""


def rank_calls(
    contender: ContenderBatch, topology: Topology, config: Stragglers
) -> dict[tuple[int, int], Callable[[], object]]:
    """The work of each rank in each layer of each micro-batch: ``(row, rank)`` to a call."""
    weights = expert_weights(topology.num_experts, config.width, config.hidden, 1)[0]
    buffers = tuple(jnp.asarray(weights[:slots]) for slots in (topology.home_slots, topology.replica_slots))
    rows = jnp.asarray(
        np.random.default_rng(0).normal(size=(contender.capacities.rows, config.width)), jnp.float32
    )

    @jax.jit
    def step(rows, buffers, sizes):
        def loss(rows, buffers):
            return (grouped_mlp(rows, buffers, sizes) ** 2).sum()

        return jax.grad(loss, (0, 1))(rows, buffers)

    quota = np.asarray(contender.batch_plan.plan.quota).reshape(-1, topology.num_ranks, topology.slots)
    return {
        (row, rank): functools.partial(step, rows, buffers, jnp.asarray(quota[row, rank]))
        for row, rank in np.ndindex(quota.shape[:2])
    }


def main(config: Stragglers) -> None:
    """Print a table for each number of ranks and each trace."""
    console, kept = Console(), []
    console.print(
        f"jax {jax.__version__}, one core, D={config.width}, F={config.hidden}, float32", highlight=False
    )
    for trace in (read_trace(config.trace), synthetic_trace()):
        for ranks in config.ranks:
            nodes, local = map(int, ranks.split("x"))
            topology = Topology(
                num_nodes=nodes, ranks_per_node=local, num_experts=trace.num_experts, replica_slots=2
            )
            by_name = contenders(
                trace,
                topology,
                micro_batches=config.micro_batches,
                samples_per_rank=config.samples_per_rank,
                layers=config.layers,
            )
            runs = {
                (name, *place): call
                for name, contender in by_name.items()
                for place, call in rank_calls(contender, topology, config).items()
            }
            slowest: dict[tuple[str, int], float] = {}
            for (name, row, _), value in interleaved(runs, repeats=config.repeats).items():
                slowest[name, row] = max(slowest.get((name, row), 0), value)
            seconds = {
                contender: sum(value for (name, _), value in slowest.items() if name == contender)
                for contender in by_name
            }
            table = Table(title=f"{trace.name} on {ranks} ranks", title_justify="left")
            for column in ("contender", "slowest ranks, s", "static / it", "of balanced", "rows imbalance"):
                table.add_column(column, justify="left" if column == "contender" else "right")
            for contender, value in seconds.items():
                load = by_name[contender].rank_load
                imbalance = load.max((2, 3)).sum() / load.mean((2, 3)).sum()
                table.add_row(
                    contender,
                    f"{value:.2f}",
                    f"{seconds['static'] / value:.2f}",
                    f"{seconds['balanced'] / value:.1%}",
                    f"{imbalance:.3f}",
                )
            console.print(table)
            kept.append(
                {"trace": trace.name, "synthetic": trace.synthetic, "ranks": ranks, "seconds": seconds}
            )
    if config.out:
        settings = {
            name: value for name, value in dataclasses.asdict(config).items() if name not in ("trace", "out")
        }
        about = {"date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(), "jax": jax.__version__}
        about["machine"] = f"one core ({platform.machine()})"
        write_json(config.out, {**about, "settings": settings, "tables": kept})


if __name__ == "__main__":
    sys.exit(run_program(main, Stragglers, description=__doc__))
