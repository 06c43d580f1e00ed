"""Runs of a planner over successive batches, as in training, with every plan checked and planning timed."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.cli.batching import Batches
from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import contiguous_homes, expert_totals
from relibra_jax.contract.planner import Transitions
from relibra_jax.contract.types import Array, BatchPlan, Price, RoutingReplay, Topology
from relibra_jax.planning.assignment import Assign
from relibra_jax.planning.baselines.forecasts import FORECASTS, expect_loads
from relibra_jax.planning.batch import Batch, count_batch
from relibra_jax.planning.metrics import forecast_error
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.support.limits import check_memory

TIMED_RUNS: Final = 5
"""The number of timed runs of planning, of which the median is reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of a comparison: a planner, and how samples are assigned to ranks for it."""

    entry: PlannerEntry
    """The planner's entry: the planner, and what to expect of its plans."""
    assign: Assign | None = None
    """The function that assigns samples to ranks and micro-batches. None keeps the assignment by lengths."""


def is_reconstruction(name: str) -> bool:
    """Return whether the planner of this name was implemented from its publication alone, without its source code."""
    return name in PLANNERS and PLANNERS[name].reconstruction


class PlannedBatch(NamedTuple):
    """One batch with its plan."""

    replay: RoutingReplay
    """The routing of the batch."""
    batch_plan: BatchPlan
    """The assignment of the batch's samples, their load, and the plan."""
    previous_home: Int[Array, "L E"]
    """The homes before the batch. A planner without foresight places homes for the first time in the second batch. For
    that batch these are the batch's own homes, so that the initial moves are not counted for any planner."""
    forecast_error: Float[Array, "M L"]
    """The error of the expected loads, by `relibra_jax.planning.metrics.forecast_error`; 0 with foresight."""


def run_contender(
    contender: Contender,
    batches: Batches,
    topology: Topology,
    *,
    cost: Price,
    seed: int,
    timed_runs: int = TIMED_RUNS,
) -> tuple[list[PlannedBatch], float]:
    """Plan every batch, each from the state that the batch before left, and check every plan.

    Batches are planned as a user plans them: `relibra_jax.planning.batch.count_batch` counts what can be known
    before a batch, which is not part of planning and not timed, and `plan_batch` plans from it. Random keys are drawn
    as in `relibra_jax.nnx.Balancer`, so that a Balancer with ``key=jax.random.key(seed)`` makes the same plans.

    Args:
        contender: the planner, and how samples are assigned.
        batches: the batches, in their order.
        topology: the expert-parallel group.
        cost: the price of the cluster and the model.
        seed: the seed of the random keys.
        timed_runs: how many times planning of the last batch is timed. 0 does not time it.

    Returns:
        The measured batches, and the median seconds of planning the last one after compilation (NaN if it is not
        timed).

    Raises:
        ValueError: if the planner rejects its input, a plan is not valid, or a plan does not fit this machine's memory.
    """
    planner = contender.entry.planner
    layers = batches.replays[0].expert_ids.shape[2]
    _check_plan_memory(batches.num_micro_batches, layers, topology)

    def plan(counts: Batch, state: Any, key: PRNGKeyArray) -> tuple[BatchPlan, Any]:
        return plan_batch(
            counts,
            planner,
            state,
            topology,
            stages=batches.num_micro_batches,
            assign=contender.assign,
            key=key,
            cost=cost,
        )

    planner_key, key = jax.random.split(jax.random.key(seed))
    state = planner.init(topology, layers, key=planner_key)
    home: Array = contiguous_homes(topology, layers)
    forecast_state = FORECASTS[contender.entry.forecast].init(topology, layers, key=planner_key)
    first_placed = 0 if contender.entry.foresight else 1
    planned = []
    for number, replay in enumerate(batches.replays):
        key, assign_key = jax.random.split(key)
        before, counts = state, count_batch(replay, topology, with_transitions=planner.uses_transitions)
        batch_plan, state = plan(counts, before, assign_key)
        try:
            check_plan(batch_plan.plan, batch_plan.load, topology, across_nodes=contender.entry.across_nodes)
        except ValueError as error:
            raise ValueError(
                f"the plan of {contender.entry.summary!r} for batch {number} is not valid: {error}"
            ) from error
        load_error, forecast_state = _expect(
            batch_plan.load, forecast_state, counts.transitions, entry=contender.entry
        )
        if (
            number == first_placed and number
        ):  # the initial moves happen once and are not a cost of this batch
            home = batch_plan.plan.home
        if number >= batches.history:
            planned.append(PlannedBatch(replay, batch_plan, home, load_error))
        home = batch_plan.plan.home
    return planned, _median_seconds(lambda: plan(counts, before, assign_key), timed_runs)


def _check_plan_memory(micro_batches: int, layers: int, topology: Topology) -> None:
    """Raise ValueError if the int32 arrays of a plan and its load do not fit this machine's memory."""
    ranks, slots = topology.num_ranks, topology.slots
    check_memory(
        f"a plan of {micro_batches} micro-batches x {layers} layers x {ranks} ranks x {slots} slots",
        4 * micro_batches * layers * ranks * (2 * slots + topology.num_experts),
    )


@functools.partial(jax.jit, static_argnames="entry")
def _expect(
    load: Int[Array, "M L N G E"], state: Any, transitions: Transitions | None, *, entry: PlannerEntry
) -> tuple[Float[Array, "M L"], Any]:
    """Run the planner's forecast beside it; return the error of the expected loads, and the forecast's next state."""
    load = expert_totals(load)
    if entry.foresight:
        return jnp.zeros(load.shape[:2], jnp.float32), state
    forecast = FORECASTS[entry.forecast]
    _, expected, state = expect_loads(forecast, load, state, scope=entry.scope, transitions=transitions)
    return forecast_error(expected, load), state


def _median_seconds(run: Callable[[], object], runs: int) -> float:
    """Return the median seconds of several calls, after one call that compiles."""
    if not runs:
        return float("nan")
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
