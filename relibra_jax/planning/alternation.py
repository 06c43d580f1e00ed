"""Alternate sample assignment and expert placement over the stages of a batch.

Placement plans homes for the current assignment of samples; assignment then moves the samples to suit the current
homes. A stage runs all samples of the batch, or a range of them, in its own micro-batches; all stages share homes and
residents. The planner sees the micro-batches of all stages concatenated along M, and its plan is split along M again.
``assign`` sees the samples of one stage as a batch, so it cannot move a sample to another stage.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from relibra_jax.limits import check_integer, check_not_negative, check_positive
from relibra_jax.plan import resident_experts
from relibra_jax.plan_check import check_homes
from relibra_jax.planning.batch_counts import BatchCounts
from relibra_jax.planning.extra_args import accepted_arguments, with_extra_args
from relibra_jax.planning.placement import Placement
from relibra_jax.planning.token_sample import Routes, place_routes
from relibra_jax.replay import assigned_load
from relibra_jax.types import (
    EMPTY,
    Assignment,
    BatchPlan,
    Plan,
    Planner,
    TokenSample,
    Topology,
    UnitTimes,
    check_shape,
)

type Assign = Callable[..., Assignment]
"""``(sample_load[B L E], tokens[B], home[L E], topology, *, num_micro_batches) -> Assignment``. The
function also receives those of ``samples_per_rank``, ``routes``, ``resident``, ``cost`` and ``refine`` that it names as
parameters, as `relibra_jax.planning.assignment.assign_samples` does."""


def plan_alternating(
    counts: BatchCounts,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    starts: Sequence[Assignment],
    samples: Sequence[range],
    assign: Assign | None,
    rounds: int,
    costs: Sequence[UnitTimes] | None,
    warm_start: Placement | None,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch together: make a first plan, then alternate assignment and placement.

    Args:
        counts: the token counts of all samples, in int32.
        planner: any planner.
        state: the planner's state before the batch, from which every round plans.
        topology: the expert-parallel group.
        starts: the assignment of each stage's samples for the first plan.
        samples: the samples of each stage, as a range of consecutive samples of the batch.
        assign: the function that assigns the samples of one stage. None keeps the first assignments.
        rounds: the number of rounds of assignment and placement.
        costs: the unit times of each stage. None plans for balance.
        warm_start: the homes and residents to which the first round assigns samples, instead of making a first plan
            for ``starts``.

    Returns:
        The batch plan of each stage, and the planner's state after the batch.

    Raises:
        ValueError: if ``rounds`` is negative, if a unit time is negative or not finite, if the unit time ``copy`` is 0,
            if ``warm_start`` has a different topology or number of layers, or if the planner or ``assign`` rejects its
            input.
    """
    sample_load, tokens, routes, transitions = counts
    check_integer("rounds", rounds, least=0)
    if warm_start is not None:
        _check_warm_start(warm_start, sample_load.shape[1], topology)
    for times in costs or ():
        _check_unit_times(times)
    update = with_extra_args(planner).update
    cost = None if costs is None else _cost_of_batch(costs, samples)
    first_loads = tuple(assigned_load(sample_load, start) for start in starts)

    def plan_round(assignments, loads, start_home):
        token_sample = None if routes is None else _place_in_stages(routes, assignments, samples)
        load = loads[0] if len(loads) == 1 else jnp.concatenate(loads)
        plan, next_state = update(
            load, state, topology, tokens=token_sample, transitions=transitions, cost=cost, refine=start_home
        )
        plans = _split_plan(plan, [len(part) for part in loads])
        return tuple(map(BatchPlan, assignments, loads, plans)), next_state

    if assign is None or not rounds:
        return plan_round(tuple(starts), first_loads, None if warm_start is None else warm_start.home)
    no_homes = jnp.full((sample_load.shape[1], topology.num_experts), EMPTY, jnp.int32)

    def assign_round(home, resident, refine):
        assignments = []
        for stage, start in enumerate(starts):
            stage_range = samples[stage]
            micro_batches, *_, room = start.sample.shape
            extra = {
                "samples_per_rank": room,
                "routes": None if routes is None else _routes_of(routes, stage_range),
                "resident": resident,
                "cost": None if costs is None else costs[stage],
                "refine": shift_samples(refine[stage], -stage_range.start),
            }
            options = {"num_micro_batches": micro_batches, **accepted_arguments(assign, extra)}
            stage_counts = (
                sample_load[stage_range.start : stage_range.stop],
                tokens[stage_range.start : stage_range.stop],
            )
            assignments.append(
                shift_samples(assign(*stage_counts, home, topology, **options), stage_range.start)
            )
        return tuple(assignments), tuple(assigned_load(sample_load, each) for each in assignments)

    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((sample_load, tokens, state))):
        return _loop_rounds(
            plan_round,
            assign_round,
            tuple(starts),
            first_loads,
            no_homes,
            state,
            rounds,
            topology,
            warm_start,
        )
    placement = warm_start
    if placement is None:
        result = plan_round(tuple(starts), first_loads, no_homes)
        placement = _placement(result, topology)
    refine = _empty_assignments(starts)
    for _ in range(rounds):
        refine, loads = assign_round(*placement, refine)
        result = plan_round(refine, loads, placement.home)
        placement = _placement(result, topology)
    return result


def _placement(result: tuple[Sequence[BatchPlan], Any], topology: Topology) -> Placement:
    """Return the homes and residents that all stages share."""
    plan = result[0][0].plan
    return Placement(jnp.asarray(plan.home), jnp.asarray(resident_experts(plan, topology)))


def _check_warm_start(warm_start: Placement, layers: int, topology: Topology) -> None:
    ranks = (topology.num_nodes, topology.ranks_per_node)
    if not isinstance(warm_start.home, jax.core.Tracer):
        check_homes(warm_start.home, topology.num_experts, "warm_start.home")
    check_shape("warm_start.home", warm_start.home.shape, (layers, topology.num_experts))
    check_shape("warm_start.resident", warm_start.resident.shape, (layers, *ranks, topology.resident_slots))


def _empty_assignments(starts: Sequence[Assignment]) -> tuple[Assignment, ...]:
    """Make assignments that hold no samples, so that the first round has nothing to refine."""
    return tuple(Assignment(jnp.full(start.sample.shape, EMPTY, jnp.int32)) for start in starts)


def _routes_of(routes: Routes, samples: range) -> Routes:
    """Number the samples of the routes from the start of a range, with EMPTY for samples outside the range."""
    sample = jnp.asarray(routes.sample)
    inside = (sample >= samples.start) & (sample < samples.stop)
    return routes._replace(sample=jnp.where(inside, sample - samples.start, EMPTY))


def shift_samples(assignment: Assignment, by: int) -> Assignment:
    """Add an offset to the sample numbers of an assignment; EMPTY stays EMPTY.

    Args:
        assignment: the assignment.
        by: the offset, which may be negative.

    Returns:
        The assignment with shifted sample numbers.

    >>> shift_samples(Assignment(jnp.array([[[[0, EMPTY]]]])), 16).sample.tolist()
    [[[[16, -1]]]]
    """
    sample = assignment.sample
    return assignment if not by else Assignment(jnp.where(sample == EMPTY, EMPTY, sample + by))


def _loop_rounds(
    plan_round, assign_round, starts, first_loads, no_homes, state, rounds, topology: Topology, warm_start
):
    """Run all rounds as one loop, so that jit compiles placement and each stage's assignment only once."""

    def keep_starts(*_):
        return starts, first_loads

    def body(number, carry):
        _, placement, refine = carry
        assignments, loads = jax.lax.cond(number == 0, keep_starts, assign_round, *placement, refine)
        refine = jax.tree.map(lambda new, old: jnp.where(number == 0, old, new), assignments, refine)
        result = plan_round(assignments, loads, placement.home)
        return result, _placement(result, topology), refine

    starts = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), starts)
    stages, _ = jax.eval_shape(plan_round, starts, first_loads, no_homes)
    blank = jax.tree.map(jnp.zeros_like, stages)
    first, placement = 1, warm_start
    if placement is None:
        blank_resident = jnp.asarray(resident_experts(blank[0].plan, topology))
        first, placement = 0, Placement(no_homes, blank_resident)
    return jax.lax.fori_loop(
        first, rounds + 1, body, ((blank, state), placement, _empty_assignments(starts))
    )[0]


def _check_unit_times(cost: UnitTimes) -> None:
    """Raise ValueError if a unit time is negative or not finite, or ``copy`` is 0; traced values are not checked."""
    for field in dataclasses.fields(cost):
        value = getattr(cost, field.name)
        if isinstance(value, jax.core.Tracer | bool):
            continue
        check_not_negative(f"cost.{field.name}", float(value))
        if field.name == "copy":
            check_positive("cost.copy", float(value))


def _cost_of_batch(costs: Sequence[UnitTimes], samples: Sequence[range]) -> UnitTimes:
    """Average the unit times over the samples of all stages; the push times add up, as residents serve all stages."""
    total = sum(map(len, samples))
    parts = [len(stage_range) / total for stage_range in samples]
    mean = jax.tree.map(lambda *times: sum(map(operator.mul, times, parts)), *costs)
    return dataclasses.replace(mean, push=sum(cost.push for cost in costs))


def _place_in_stages(
    routes: Routes, assignments: Sequence[Assignment], samples: Sequence[range]
) -> TokenSample:
    """Place the sampled tokens in every stage, with micro-batches numbered consecutively over the stages.

    Consecutive stages that have no sample in common share one copy of the tokens.
    """
    first = 0
    passes: list[TokenSample] = []
    ranges: list[range] = []
    for assignment, stage_range in zip(assignments, samples, strict=True):
        tokens = place_routes(routes, assignment)
        in_stage = tokens.micro_batch != EMPTY
        tokens = tokens._replace(micro_batch=jnp.where(in_stage, tokens.micro_batch + first, EMPTY))
        if passes and all(
            stage_range.stop <= other.start or other.stop <= stage_range.start for other in ranges
        ):
            previous = passes.pop()
            tokens = tokens._replace(
                micro_batch=jnp.where(in_stage, tokens.micro_batch, previous.micro_batch),
                rank=jnp.where(in_stage, tokens.rank, previous.rank),
            )
        else:
            ranges = []
        passes.append(tokens)
        ranges.append(stage_range)
        first += len(assignment.sample)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *passes)


def _split_plan(plan: Plan, sizes: Sequence[int]) -> list[Plan]:
    """Split a plan along M into runs of the given sizes, all with the same homes."""
    ends = itertools.accumulate(sizes)
    return [
        Plan(plan.slot_expert[end - size : end], plan.home, plan.quota[end - size : end])
        for end, size in zip(ends, sizes, strict=True)
    ]
