"""``python -m experiments.bench_warm_start [TRACE]``: compare searches for homes with and without a warm start.

Each draw splits the samples of a recorded trace into two batches. The plan of the first batch gives the previous homes.
The search for the second batch starts cold, from homes that were searched on its shortest samples, or from the homes of
the first batch, which need no counts. The shortest samples finish first: see `relibra_jax.planning.unfinished`. The
search then runs a number of rounds of assignment and placement. Imbalance and crossings are computed from the plans and
depend only on the seed; the milliseconds are measured on this machine.
"""

import functools
import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.program import run_program
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.planner import Placement
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import Topology
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.batch import Batch, fill_unfinished
from relibra_jax.planning.metrics import batch_imbalance, cross_node_load
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.relibra import relibra
from relibra_jax.support.limits import check_integer
from relibra_jax.traces.read import read_trace

FINISHED: Final = (0.25, 0.5, 0.75, 0.9)
ROUNDS: Final = (1, 2, 4)
PLANNER: Final = relibra()

type Measured = dict[tuple[str, int], list[list[float]]]
"""Imbalance, crossings, moves and milliseconds of every draw, keyed by the start and the rounds of the search."""


@dataclass(frozen=True, kw_only=True)
class BenchWarmStart:
    """Compare searches for homes from different starts."""

    trace: Annotated[Path | None, tyro.conf.Positional] = None
    """The path of a trace. Defaults to this project's recorded trace."""
    nodes: int = 2
    """The number of nodes."""
    ranks_per_node: int = 4
    """The number of ranks of a node."""
    micro_batches: int = 8
    """The number of micro-batches of a batch."""
    seeds: int = 4
    """The number of draws of the two batches; the table shows means over them."""


def main(config: BenchWarmStart) -> None:
    """Run the searches and print the table.

    Args:
        config: the settings.

    Raises:
        ValueError: if a number is below 1, or the trace has too few samples.
    """
    for name in ("nodes", "ranks_per_node", "micro_batches", "seeds"):
        check_integer(name, getattr(config, name), least=1)
    trace = read_trace(config.trace)
    topology = Topology(
        num_nodes=config.nodes,
        ranks_per_node=config.ranks_per_node,
        num_experts=trace.num_experts,
        replica_slots=2,
    )
    load = np.asarray(sample_load(trace.replay, num_experts=trace.num_experts))
    lengths = np.asarray(trace.replay.mask.sum(1))
    rows = topology.num_ranks * config.micro_batches
    size = len(lengths) // 2 // rows * rows
    if not size:
        raise ValueError(
            f"{trace.name} has {len(lengths)} samples, but two batches need at least two for each of"
            f" {topology.num_ranks} ranks x micro_batches={config.micro_batches}"
        )
    start = assign_in_order(size, topology, num_micro_batches=config.micro_batches)

    def plan(batch, state, key, home_start, *, rounds):
        (batch_plan,), state = plan_batch(
            batch,
            PLANNER,
            state,
            topology,
            stages=[Stage(config.micro_batches, start=start)],
            assign=assign_samples,
            key=key,
            rounds=rounds,
            start=home_start,
        )
        return batch_plan, state

    @jax.jit
    def measure(batch_plan, previous_home):
        plan = batch_plan.plan
        crossings = cross_node_load(batch_plan.layer_plans()).sum() / batch_plan.load.sum()
        return batch_imbalance(rank_load(plan)), crossings, (plan.home != previous_home).mean()

    measured: Measured = {}
    for seed in range(config.seeds):
        order = np.random.default_rng(seed).permutation(len(lengths))
        first, second = order[:size], order[size : 2 * size]
        keys = jax.random.split(jax.random.key(seed), 4)
        state = PLANNER.init(topology, load.shape[1], key=keys[0])
        _, state = plan(Batch(load[first], lengths[first]), state, keys[1], None, rounds=4)
        batch = Batch(load[second], lengths[second])
        starts = {"cold start": None, "previous batch": Placement.without_residents(state.home, topology)}
        for share in FINISHED:
            early, _ = plan(_finished(batch, share), state, keys[2], None, rounds=4)
            starts[f"{share:.0%} of the samples"] = Placement.without_residents(early.plan.home, topology)
        for (name, home_start), rounds in itertools.product(starts.items(), ROUNDS):
            run = functools.partial(plan, batch, state, keys[3], home_start, rounds=rounds)
            batch_plan, _ = jax.block_until_ready(run())
            clock = time.perf_counter()
            jax.block_until_ready(run())
            seconds = time.perf_counter() - clock
            measured.setdefault((name, rounds), []).append(
                [*map(float, measure(batch_plan, state.home)), 1e3 * seconds]
            )
    title = (
        f"{trace.name}: {size} samples in {config.micro_batches} micro-batches, {config.nodes} x"
        f" {config.ranks_per_node} ranks, 2 replica slots per rank; means of"
        f" {config.seeds} draws"
    )
    Console(width=120).print(_table(measured, title))


def _finished(batch: Batch, share: float) -> Batch:
    """Estimate the counts of a batch in which only a share of the samples, the shortest ones, have finished."""
    finished = np.zeros(len(batch.lengths), bool)
    finished[np.argsort(batch.lengths, kind="stable")[: int(share * len(finished))]] = True
    return fill_unfinished(batch, finished)


def _table(measured: Measured, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("start")
    for column in ("rounds", "imbalance", "copies crossing", "experts moved", "ms, median"):
        table.add_column(column, justify="right")
    for (name, rounds), draws in measured.items():
        imbalance, crossings, moved, _ = np.mean(draws, axis=0)
        milliseconds = statistics.median(draw[-1] for draw in draws)
        cells = (f"{imbalance:.4f}", f"{crossings:.3f}", f"{moved:.2f}", f"{milliseconds:.0f}")
        table.add_row(name, str(rounds), *cells)
    return table


if __name__ == "__main__":
    sys.exit(run_program(main, BenchWarmStart, description=__doc__))
