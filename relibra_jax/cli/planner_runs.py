"""A planner run over batches one after the other, as a trainer would, its plans checked and its time measured."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.cli.batching import Batches
from relibra_jax.limits import check_memory
from relibra_jax.plan import contiguous_homes, expert_totals
from relibra_jax.plan_check import check_plan
from relibra_jax.planning.baselines.forecasts import FORECASTS, expect_loads
from relibra_jax.planning.metrics import forecast_error
from relibra_jax.planning.plan_batch import plan_loads
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.planning.token_sample import Routes, sample_routes
from relibra_jax.planning.transitions import transitions_for
from relibra_jax.planning.turns import Assign
from relibra_jax.replay import sample_load
from relibra_jax.types import (
    Array,
    Assignment,
    BatchPlan,
    Planner,
    RoutingReplay,
    Topology,
    Transitions,
    UnitTimes,
)

TIMED_RUNS: Final = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A planner, and how samples are assigned for it."""

    entry: PlannerEntry
    """The planner, and what may be expected of its plans."""
    assign: Assign | None = None
    """Assigns samples to ranks and micro-batches anew; None keeps them as they are packed."""


class PlannedBatch(NamedTuple):
    """One batch with the plan that a contender made for it."""

    replay: RoutingReplay
    """The routing of the batch."""
    batch_plan: BatchPlan
    """The assignment of its samples, their load, and the plan."""
    previous_home: Int[Array, "L E"]
    """The homes before the batch. Where a planner without foresight places homes for the first time, which is in the
    second batch, those of the batch itself: what others moved in the first batch is not counted either."""
    forecast_error: Float[Array, "M L"]
    """How far the loads that the planner expected are from the true ones; 0 with foresight."""


def run_contender(
    contender: Contender,
    batches: Batches,
    topology: Topology,
    *,
    cost: UnitTimes,
    seed: int,
    timed_runs: int = TIMED_RUNS,
) -> tuple[list[PlannedBatch], float]:
    """Plan every batch from the state that the one before has left, and check each plan.

    Planners are given what may be known before a batch: unit times, and some of its tokens. Counting the load of
    samples, taking tokens of them and counting transitions is not part of planning, and not timed.

    Args:
        contender: the planner, and how samples are assigned.
        batches: the batches in their order.
        topology: the expert-parallel group.
        cost: the unit times of the cluster and the model.
        seed: the seed of the planner's random key.
        timed_runs: how often planning the last batch is timed; 0 for not at all.

    Returns:
        The measured batches, and the median seconds of planning the last one, after compilation; NaN if it is not
        timed.

    Raises:
        ValueError: if the planner refuses its input, a plan is not valid, or it does not fit this machine's memory.
    """
    planner = contender.entry.planner
    layers = batches.replays[0].expert_ids.shape[2]
    _check_plan_memory(batches.num_micro_batches, layers, topology)

    plan = functools.partial(
        _plan,
        cost=cost,
        planner=planner,
        topology=topology,
        num_micro_batches=batches.num_micro_batches,
        assign=contender.assign,
    )

    state = planner.init(topology, layers, key=jax.random.key(seed))
    home: Array = contiguous_homes(topology, layers)
    seen = FORECASTS[contender.entry.forecast].init(topology, layers)
    first_known = 0 if contender.entry.foresight else 1
    planned = []
    for number, (replay, packed) in enumerate(zip(batches.replays, batches.packed, strict=True)):
        before, counts = state, _count(replay, num_experts=topology.num_experts)
        transitions = transitions_for(planner, replay, num_experts=topology.num_experts)
        batch_plan, state = plan(counts, transitions, packed, before)
        try:
            check_plan(batch_plan.plan, batch_plan.load, topology, across_nodes=contender.entry.across_nodes)
        except ValueError as broken:
            raise ValueError(
                f"the plan of {contender.entry.summary!r} for batch {number}: {broken}"
            ) from broken
        error, seen = _expect(batch_plan.load, seen, transitions, entry=contender.entry)
        if number == first_known and number:  # what a planner pays once, when it starts, is not of this batch
            home = batch_plan.plan.home
        if number >= batches.history:
            planned.append(PlannedBatch(replay, batch_plan, home, error))
        home = batch_plan.plan.home
    return planned, _median_seconds(lambda: plan(counts, transitions, packed, before), timed_runs)


def _check_plan_memory(micro_batches: int, layers: int, topology: Topology) -> None:
    """Raise ValueError if the int32 arrays of a plan, and the load that it is made for, are too large for memory."""
    ranks, slots = topology.num_ranks, topology.slots
    check_memory(
        f"a plan of {micro_batches} micro-batches x {layers} layers x {ranks} ranks x {slots} slots",
        4 * micro_batches * layers * ranks * (2 * slots + topology.num_experts),
    )


class _Counts(NamedTuple):
    """What planning a batch starts from."""

    sample_load: Int[Array, "B L E"]
    tokens: Int[Array, " B"]
    routes: Routes


@functools.partial(jax.jit, static_argnames="num_experts")
def _count(replay: RoutingReplay, *, num_experts: int) -> _Counts:
    tokens = replay.mask.sum(1, dtype=jnp.int32)
    return _Counts(sample_load(replay, num_experts=num_experts), tokens, sample_routes(replay))


@functools.partial(jax.jit, static_argnames="entry")
def _expect(
    load: Int[Array, "M L N G E"], seen: Any, transitions: Transitions | None, *, entry: PlannerEntry
) -> tuple[Float[Array, "M L"], Any]:
    """The error of what a planner expects of a batch, by its forecast run beside it; and the forecast's next state."""
    load = expert_totals(load)
    if entry.foresight:
        return jnp.zeros(load.shape[:2], jnp.float32), seen
    forecast = FORECASTS[entry.forecast]
    _, expected, seen = expect_loads(forecast, load, seen, scope=entry.scope, transitions=transitions)
    return forecast_error(expected, load), seen


@functools.partial(jax.jit, static_argnames=("planner", "topology", "num_micro_batches", "assign"))
def _plan(
    counts: _Counts,
    transitions: Transitions | None,
    packed: Assignment,
    state: Any,
    *,
    cost: UnitTimes,
    planner: Planner,
    topology: Topology,
    num_micro_batches: int,
    assign: Assign | None,
) -> tuple[BatchPlan, Any]:
    """`plan_loads`, compiled once for all batches and unit times."""
    return plan_loads(
        counts.sample_load,
        counts.tokens,
        planner,
        state,
        topology,
        num_micro_batches=num_micro_batches,
        start=packed,
        assign=assign,
        cost=cost,
        routes=counts.routes,
        transitions=transitions,
    )


def _median_seconds(run: Callable[[], object], runs: int) -> float:
    """The median of several calls, after one that compiles."""
    if not runs:
        return float("nan")
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
