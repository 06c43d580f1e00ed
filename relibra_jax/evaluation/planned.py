"""Runs of a planner over successive batches, as in training, with every plan checked and planning timed."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import contiguous_homes, expert_totals
from relibra_jax.contract.replay import rank_tokens
from relibra_jax.contract.types import Array, BatchPlan, Price, RoutingReplay, Topology
from relibra_jax.evaluation.setting import Setting
from relibra_jax.planning.baselines.forecasts import FORECASTS, expect_loads
from relibra_jax.planning.batch import Batch, count_for_planner
from relibra_jax.planning.metrics import forecast_error
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.planning.stage_requests import predicted_loads
from relibra_jax.routing.striping import with_striped_load
from relibra_jax.support.limits import check_memory


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

    @property
    def lengths(self) -> Int[jax.Array, " B"]:
        """The number of tokens of each sample."""
        return jnp.asarray(self.replay.mask).sum(1, dtype=jnp.int32)

    @property
    def rank_tokens(self) -> Int[np.ndarray, "M N G"]:
        """The number of tokens that each rank holds."""
        return rank_tokens(self.batch_plan.assignment, self.lengths)

    @property
    def sequence_length(self) -> float:
        """The number of positions of a padded sequence."""
        return float(self.replay.mask.shape[1])


def plan_in_turn(
    name: str, entry: PlannerEntry, setting: Setting, *, timed_runs: int
) -> tuple[list[PlannedBatch], list[float]]:
    """Plan every batch, each from the state that the batch before left, and check every plan.

    Batches are planned as a user plans them: `relibra_jax.planning.batch.count_for_planner` counts what can be known
    before a batch, which is not part of planning and not timed, and `plan_batch` plans from it. Random keys are drawn
    as in `relibra_jax.nnx.Balancer`, so that a Balancer with ``key=jax.random.key(seed)`` makes the same plans.

    Args:
        name: the name of the planner, for error messages.
        entry: the planner, and how samples are assigned for it.
        setting: the batches, ranks and costs.
        timed_runs: how many times planning of the last batch is timed.

    Returns:
        The measured batches, and the seconds of planning the last one after compilation, for each timed run.

    Raises:
        ValueError: if the planner rejects its input, a plan is not valid, or a plan does not fit this machine's memory.
    """
    batches, topology, planner = setting.batches, setting.topology, entry.planner
    cost = setting.cost_model.price(topology)
    layers = batches.replays[0].expert_ids.shape[2]
    _check_plan_memory(batches.num_micro_batches, layers, topology)
    planner_key, key = jax.random.split(jax.random.key(setting.seed))
    state = planner.init(topology, layers, key=planner_key)
    home: Array = contiguous_homes(topology, layers)
    forecast_state = FORECASTS[entry.forecast].init(topology, layers, key=planner_key)
    first_placed = 0 if entry.foresight else 1
    planned = []
    for number, replay in enumerate(batches.replays):
        key, assign_key = jax.random.split(key)
        batch = count_for_planner(replay, planner, topology, [cost])
        if batches.predicted is not None:
            batch = batch._replace(predicted_load=batches.predicted[number])
        plan = functools.partial(_plan, batch, entry, state, setting, cost=cost, key=assign_key)
        batch_plan, state = plan()
        if cost.striped:
            batch_plan = with_striped_load(batch_plan, replay, topology)
        try:
            across_nodes = entry.across_nodes or cost.across_nodes
            check_plan(batch_plan.plan, batch_plan.load, topology, across_nodes=bool(across_nodes))
        except ValueError as error:
            raise ValueError(f"the plan of {name!r} for batch {number} is not valid: {error}") from error
        load_error, forecast_state = _expect(batch_plan, forecast_state, batch, entry=entry)
        if number == first_placed and number:  # the initial moves happen once, and are no cost of this batch
            home = batch_plan.plan.home
        if number >= batches.history:
            planned.append(PlannedBatch(replay, batch_plan, home, load_error))
        home = batch_plan.plan.home
    return planned, _time_runs(plan, timed_runs)


def _plan(
    batch: Batch, entry: PlannerEntry, state: Any, setting: Setting, *, cost: Price, key: PRNGKeyArray
) -> tuple[BatchPlan, Any]:
    """Plan one batch; the only call of planning in the evaluation."""
    return plan_batch(
        batch,
        entry.planner,
        state,
        setting.topology,
        stages=setting.batches.num_micro_batches,
        assign=entry.assign,
        key=key,
        cost=cost,
    )


def _check_plan_memory(micro_batches: int, layers: int, topology: Topology) -> None:
    """Raise ValueError if the int32 arrays of a plan and its load do not fit this machine's memory."""
    ranks, slots = topology.num_ranks, topology.slots
    check_memory(
        f"a plan of {micro_batches} micro-batches x {layers} layers x {ranks} ranks x {slots} slots",
        4 * micro_batches * layers * ranks * (2 * slots + topology.num_experts),
    )


@functools.partial(jax.jit, static_argnames="entry")
def _expect(
    batch_plan: BatchPlan, state: Any, batch: Batch, *, entry: PlannerEntry
) -> tuple[Float[Array, "M L"], Any]:
    """Run the planner's forecast beside it; return the error of the expected loads, and the forecast's next state."""
    load = expert_totals(batch_plan.load)
    predicted = predicted_loads(batch, [batch_plan.assignment])
    if entry.foresight:
        return jnp.zeros(load.shape[:2], jnp.float32), state
    forecast = FORECASTS[entry.forecast]
    known = load if predicted is None else predicted
    _, expected, state = expect_loads(
        forecast, known, state, scope=entry.scope, transitions=batch.transitions
    )
    return forecast_error(expected, load), state


def _time_runs(run: Callable[[], object], runs: int) -> list[float]:
    """Return the seconds of some calls, after one call that compiles."""
    times: list[float] = []
    for number in range(runs + 1 if runs else 0):
        start = time.perf_counter()
        jax.block_until_ready(run())
        if number:
            times.append(time.perf_counter() - start)
    return times
