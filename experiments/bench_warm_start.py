"""``python -m experiments.bench_warm_start [TRACE]``: compare searches for homes with and without a warm start.

Each draw splits the samples of a recorded trace into two batches. The plan of the first batch gives the previous homes.
The search for the second batch starts cold, from homes that were searched on its shortest samples, or from the homes of
the first batch, which need no counts. The shortest samples finish first: see
`relibra_jax.planning.batch.fill_unfinished`. The search then runs a number of rounds of assignment and placement.
Imbalance and crossings are computed from the plans and depend only on the seed; the milliseconds are measured on this
machine.
"""

import functools
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray
from rich.console import Console
from rich.table import Table

from experiments.interleaving import interleaved
from experiments.program import TraceName, run_program
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.planner import Placement
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import Array, Assignment, BatchPlan, Topology
from relibra_jax.evaluation import Ranks
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

type Key = tuple[str, int]
"""The start and the number of rounds of a search."""


@dataclass(frozen=True, kw_only=True)
class BenchWarmStart:
    """Compare searches for homes from different starts."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
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
    topology = Ranks(nodes=config.nodes, ranks_per_node=config.ranks_per_node).topology(trace.num_experts)
    counts = Batch(
        np.asarray(sample_load(trace.replay, num_experts=trace.num_experts)),
        np.asarray(trace.replay.mask.sum(1)),
    )
    rows = topology.num_ranks * config.micro_batches
    size = len(counts.lengths) // 2 // rows * rows
    if not size:
        raise ValueError(
            f"{trace.name} has {len(counts.lengths)} samples, but two batches need at least two for each of"
            f" {topology.num_ranks} ranks x micro_batches={config.micro_batches}"
        )
    start = assign_in_order(size, topology, num_micro_batches=config.micro_batches)
    draws = [measure_draw(counts, start, topology, seed=seed) for seed in range(config.seeds)]
    title = (
        f"{trace.name}: {size} samples in {config.micro_batches} micro-batches, {config.nodes} x"
        f" {config.ranks_per_node} ranks, 2 replica slots per rank; means of {config.seeds} draws"
    )
    Console(width=120).print(_table(draws, title))


def measure_draw(
    counts: Batch, start: Assignment, topology: Topology, *, seed: int
) -> dict[Key, list[float]]:
    """Draw two batches, and search homes for the second one from every start.

    Args:
        counts: the counts of all samples.
        start: the initial assignment of a batch's samples.
        topology: the expert-parallel group.
        seed: the seed of the draw and of the searches.

    Returns:
        The imbalance, crossings, moves and milliseconds of each search.
    """
    order, size = np.random.default_rng(seed).permutation(len(counts.lengths)), int((start.sample >= 0).sum())
    first, second = (
        Batch(counts.sample_load[part], counts.lengths[part])
        for part in (order[:size], order[size : 2 * size])
    )
    plan = functools.partial(_plan, topology=topology, stage=Stage(len(start.sample), start=start))
    keys = jax.random.split(jax.random.key(seed), 4)
    _, state = plan(first, PLANNER.init(topology, counts.sample_load.shape[1], key=keys[0]), keys[1])
    starts = {"cold start": None, "previous batch": Placement.without_residents(state.home, topology)}
    for share in FINISHED:
        early, _ = plan(_finished(second, share), state, keys[2])
        starts[f"{share:.0%} of the samples"] = Placement.without_residents(early.plan.home, topology)
    measured = {}
    for (name, home_start), rounds in itertools.product(starts.items(), ROUNDS):
        run = functools.partial(plan, second, state, keys[3], start=home_start, rounds=rounds)
        (seconds,) = interleaved({name: run}, repeats=1).values()
        measured[name, rounds] = [*map(float, _measure(run()[0], state.home)), 1e3 * seconds]
    return measured


def _plan(
    batch: Batch,
    state: Any,
    key: PRNGKeyArray,
    *,
    topology: Topology,
    stage: Stage,
    start: Placement | None = None,
    rounds: int = 4,
) -> tuple[BatchPlan, Any]:
    (batch_plan,), state = plan_batch(
        batch,
        PLANNER,
        state,
        topology,
        stages=[stage],
        assign=assign_samples,
        key=key,
        rounds=rounds,
        start=start,
    )
    return batch_plan, state


@jax.jit
def _measure(batch_plan: BatchPlan, previous_home: Int[Array, "L E"]) -> tuple[jax.Array, ...]:
    """Return the imbalance of a plan, the share of token copies that cross nodes, and that of experts that move."""
    plan = batch_plan.plan
    crossings = cross_node_load(batch_plan.layer_plans()).sum() / batch_plan.load.sum()
    return batch_imbalance(rank_load(plan)), crossings, (plan.home != previous_home).mean()


def _finished(batch: Batch, share: float) -> Batch:
    """Estimate the counts of a batch in which only a share of the samples, the shortest ones, have finished."""
    finished = np.zeros(len(batch.lengths), bool)
    finished[np.argsort(batch.lengths, kind="stable")[: int(share * len(finished))]] = True
    return fill_unfinished(batch, finished)


def _table(draws: Sequence[dict[Key, list[float]]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("start")
    for column in ("rounds", "imbalance", "copies crossing", "experts moved", "ms, median"):
        table.add_column(column, justify="right")
    for name, rounds in draws[0]:
        numbers = [draw[name, rounds] for draw in draws]
        imbalance, crossings, moved, _ = np.mean(numbers, axis=0)
        milliseconds = statistics.median(each[-1] for each in numbers)
        cells = (f"{imbalance:.4f}", f"{crossings:.3f}", f"{moved:.2f}", f"{milliseconds:.0f}")
        table.add_row(name, str(rounds), *cells)
    return table


if __name__ == "__main__":
    sys.exit(run_program(main, BenchWarmStart, description=__doc__))
