"""A planner run over batches one after the other, as a trainer would, its plans checked and its time measured."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.cli.batching import Batches
from relibra_jax.limits import check_memory
from relibra_jax.plan_check import check_plan
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.planning.turns import Assign
from relibra_jax.replay import expert_load
from relibra_jax.types import Array, BatchPlan, RoutingReplay, Topology

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
    """The homes before the batch."""


def run_contender(
    contender: Contender, batches: Batches, topology: Topology, *, seed: int
) -> tuple[list[PlannedBatch], float]:
    """Plan every batch from the state that the one before has left, and check each plan.

    Where samples stay as they are packed, counting their load is not part of planning; where they are assigned, it is.

    Args:
        contender: the planner, and how samples are assigned.
        batches: the batches in their order.
        topology: the expert-parallel group.
        seed: the seed of the planner's random key.

    Returns:
        The measured batches, and the median seconds of several times planning the last one, after compilation.

    Raises:
        ValueError: if the planner refuses its input, a plan is not valid, or it does not fit this machine's memory.
    """
    planner, assign = contender.entry.planner, contender.assign
    layers = batches.replays[0].expert_ids.shape[2]
    _check_plan_memory(batches.num_micro_batches, layers, topology)
    update = jax.jit(planner.update)
    plan_jointly = jax.jit(
        functools.partial(plan_batch, assign=assign, num_micro_batches=batches.num_micro_batches),
        static_argnums=(1, 3),
    )

    state = planner.init(topology, layers, key=jax.random.key(seed))
    home: Array = jnp.tile(jnp.arange(topology.num_experts)[None], (layers, 1))
    planned = []
    for number, (replay, packed) in enumerate(zip(batches.replays, batches.packed, strict=True)):
        before = state
        if assign is None:
            load = _count_load(replay, packed, num_experts=topology.num_experts)
            plan, state = update(load, state, topology)
            batch_plan = BatchPlan(packed, load, plan)
        else:
            batch_plan, state = plan_jointly(replay, planner, state, topology, start=packed)
        check_plan(batch_plan.plan, batch_plan.load, topology, across_nodes=contender.entry.across_nodes)
        if number >= batches.history:
            planned.append(PlannedBatch(replay, batch_plan, home))
        home = batch_plan.plan.home
    if assign is None:
        return planned, _median_seconds(lambda: update(load, before, topology))
    return planned, _median_seconds(lambda: plan_jointly(replay, planner, before, topology, start=packed))


def _check_plan_memory(micro_batches: int, layers: int, topology: Topology) -> None:
    """Raise ValueError if the int32 arrays of a plan, and the load that it is made for, are too large for memory."""
    ranks, slots = topology.num_ranks, topology.slots
    check_memory(
        f"a plan of {micro_batches} micro-batches x {layers} layers x {ranks} ranks x {slots} slots",
        4 * micro_batches * layers * ranks * (2 * slots + topology.num_experts),
    )


_count_load = jax.jit(expert_load, static_argnames="num_experts")


def _median_seconds(run: Callable[[], object]) -> float:
    """The median of several calls, after one that compiles."""
    times = []
    for _ in range(TIMED_RUNS + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
