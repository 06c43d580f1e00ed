"""Run planners over a trace, batch by batch as a trainer would, and measure what they do."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from experiments.configs import Batching
from experiments.traces import Trace
from relibra_jax.plan import check_plan, rank_load, replica_count
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.metrics import batch_imbalance, cross_node_load, imbalance, moved_experts
from relibra_jax.planning.planner import PlannerRow
from relibra_jax.replay import expert_load
from relibra_jax.types import Plan, RoutingReplay, Topology

TIMED_RUNS = 5


class Batches(NamedTuple):
    """The loads of a trace's batches: ``history`` is planned but not measured."""

    history: list[jax.Array]
    measured: list[jax.Array]
    samples_left: int
    """Samples at the end of the trace that do not fill a batch."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one planner made of a trace; everything but ``rank_load`` goes into the JSON."""

    planner: str
    imbalance: float
    """Over the measured batches: a layer's sum of maxima over its sum of means, averaged over layers."""
    imbalance_p95: float
    """95th percentile over layers and micro-batches."""
    imbalance_max: float
    cross_node_share: float
    """Share of token copies that leave their node at dispatch."""
    replicas: float
    """Replicas of one layer in one micro-batch, on average."""
    moved_experts: float | None
    """Experts of one layer that change rank between two batches, on average; None with one batch."""
    plan_seconds: float
    """Time of one batch's plan after compilation, the median of several runs."""
    rank_load: np.ndarray = dataclasses.field(repr=False)
    """Of the measured batches, one after another: ``[M L N G]``."""


def make_batches(trace: Trace, batching: Batching, topology: Topology) -> Batches:
    """Cut a trace into batches and count the load of each, samples in order over micro-batches and ranks.

    Raises:
        ValueError: sizes that do not fit each other or the trace.
    """
    samples, per_micro_batch, batch = len(trace.replay.mask), batching.micro_batch_size, batching.batch_size
    if per_micro_batch < 1:
        raise ValueError(f"micro_batch_size={per_micro_batch} must be at least 1")
    if batch is None:
        batch = max(1, samples // 2 // per_micro_batch) * per_micro_batch
    if batch < 1 or batch % per_micro_batch:
        raise ValueError(f"batch_size={batch} must be a multiple of micro_batch_size={per_micro_batch}")
    if batch > samples:
        raise ValueError(f"batch_size={batch} exceeds the {samples} samples of {trace.name}")
    order = np.arange(samples)
    if batching.order == "shuffled":
        order = np.random.default_rng(batching.seed).permutation(samples)
    assignment = assign_in_order(batch, topology, num_micro_batches=batch // per_micro_batch)
    count = jax.jit(expert_load, static_argnames="num_experts")
    loads = []
    for start in range(0, samples - batch + 1, batch):
        chosen = order[start : start + batch]
        part = RoutingReplay(trace.replay.expert_ids[chosen], trace.replay.mask[chosen])
        loads.append(count(part, assignment, num_experts=topology.num_experts))
    history = 1 if len(loads) > 1 else 0
    return Batches(loads[:history], loads[history:], samples - batch * len(loads))


def run_planner(row: PlannerRow, batches: Batches, topology: Topology, *, seed: int) -> Iterator[Plan]:
    """The plans of the measured batches, each judged before it is handed on."""
    update = jax.jit(row.planner.update)
    layers = batches.measured[0].shape[1]
    state = row.planner.init(topology, layers, key=jax.random.key(seed))
    for load in batches.history:
        _, state = update(load, state, topology)
    for load in batches.measured:
        plan, state = update(load, state, topology)
        check_plan(plan, load, topology, intra_node=row.intra_node)
        yield plan


def compare(
    planners: dict[str, PlannerRow],
    batches: Batches,
    topology: Topology,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Outcome]:
    """Run every planner over the same batches.

    Times are medians of runs that take turns, so that a busy moment of the machine touches all planners alike.
    ``progress`` is called with a planner's name each time that one has finished.
    """
    plans = {}
    for name, row in planners.items():
        plans[name] = list(run_planner(row, batches, topology, seed=seed))
        progress(name)
    seconds = _plan_seconds(planners, batches.measured[0], topology, seed=seed)
    return [_outcome(name, plans[name], batches.measured, topology, seconds[name]) for name in planners]


def _outcome(
    name: str, plans: list[Plan], loads: list[jax.Array], topology: Topology, seconds: float
) -> Outcome:
    by_rank = np.concatenate([np.asarray(rank_load(plan)) for plan in plans])
    each = np.asarray(imbalance(by_rank))
    crossing = sum(int(cross_node_load(plan, load).sum()) for plan, load in zip(plans, loads, strict=True))
    moved = [
        float(moved_experts(now.home, before.home, home_slots=topology.home_slots).mean())
        for before, now in itertools.pairwise(plans)
    ]
    return Outcome(
        planner=name,
        imbalance=float(batch_imbalance(by_rank)),
        imbalance_p95=float(np.percentile(each, 95)),
        imbalance_max=float(each.max()),
        cross_node_share=crossing / max(1, sum(int(load.sum()) for load in loads)),
        replicas=float(np.mean([replica_count(plan).mean() for plan in plans])),
        moved_experts=float(np.mean(moved)) if moved else None,
        plan_seconds=seconds,
        rank_load=by_rank,
    )


def _plan_seconds(
    planners: dict[str, PlannerRow], load: jax.Array, topology: Topology, *, seed: int
) -> dict[str, float]:
    runs = {}
    for name, row in planners.items():
        state = row.planner.init(topology, load.shape[1], key=jax.random.key(seed))
        runs[name] = (jax.jit(row.planner.update), state)
        jax.block_until_ready(runs[name][0](load, state, topology))
    times: dict[str, list[float]] = {name: [] for name in planners}
    for _ in range(TIMED_RUNS):
        for name, (update, state) in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(update(load, state, topology))
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}
