"""Assignment and placement take turns, over the stages of a batch.

Each takes the other as given: homes are planned for samples where they are, and samples are assigned to homes as they
are. A stage runs samples of the batch, all of them or neighbours, in micro-batches of its own, over homes and residents
that all stages share. To a planner the micro-batches of all stages are entries of M, one stage after the other; its
plan is cut along M. To ``assign`` the samples of a stage are a batch, so that none of them comes to another stage.
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
from relibra_jax.planning.extra_args import taken_by, with_extra_args
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
"""``(sample_load[B L E], tokens[B], home[L E], topology, *, num_micro_batches) -> Assignment``; it is also given
``samples_per_rank``, ``routes``, ``resident``, ``cost`` and ``refine`` if it names them, as `assign_samples` does."""


def plan_in_turns(
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
    """Plan the stages of a batch by one search: a first plan, then ``rounds`` of assignment and another plan.

    Args:
        counts: the counts of all samples, in int32.
        planner: any planner.
        state: the planner's state before the batch, from which every turn plans.
        topology: the expert-parallel group.
        starts: the assignment of each stage that the first plan is for, of the samples of the stage.
        samples: the samples of each stage, neighbours in the batch.
        assign: assigns the samples of one stage; None keeps the first assignments.
        rounds: turns of assignment and placement.
        costs: the unit times of each stage.
        warm_start: homes and residents that samples are assigned to in the first turn, in place of a first plan for
            ``starts``.

    Returns:
        The batch plan of each stage, and the planner's state after the batch.

    Raises:
        ValueError: if ``rounds`` is negative, a unit time is not finite and at least 0, ``copy`` is 0, ``warm_start``
            is of another topology or number of layers, or as the planner and ``assign`` say.
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

    def turn(assignments, loads, home):
        placed = None if routes is None else _place_in_stages(routes, assignments, samples)
        load = loads[0] if len(loads) == 1 else jnp.concatenate(loads)
        plan, after = update(
            load, state, topology, tokens=placed, transitions=transitions, cost=cost, refine=home
        )
        plans = _cut(plan, [len(part) for part in loads])
        return tuple(map(BatchPlan, assignments, loads, plans)), after

    if assign is None or not rounds:
        return turn(tuple(starts), first_loads, None if warm_start is None else warm_start.home)
    nowhere = jnp.full((sample_load.shape[1], topology.num_experts), EMPTY, jnp.int32)

    def assigned(home, resident, refine):
        assignments = []
        for stage, start in enumerate(starts):
            own = samples[stage]
            micro_batches, *_, room = start.sample.shape
            extra = {
                "samples_per_rank": room,
                "routes": None if routes is None else _routes_of(routes, own),
                "resident": resident,
                "cost": None if costs is None else costs[stage],
                "refine": shift_samples(refine[stage], -own.start),
            }
            knobs = {"num_micro_batches": micro_batches, **taken_by(assign, extra)}
            of_stage = sample_load[own.start : own.stop], tokens[own.start : own.stop]
            assignments.append(shift_samples(assign(*of_stage, home, topology, **knobs), own.start))
        return tuple(assignments), tuple(assigned_load(sample_load, each) for each in assignments)

    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((sample_load, tokens, state))):
        return _loop_turns(
            turn, assigned, tuple(starts), first_loads, nowhere, state, rounds, topology, warm_start
        )
    placed = warm_start
    if placed is None:
        result = turn(tuple(starts), first_loads, nowhere)
        placed = _placement(result, topology)
    refine = _nobody(starts)
    for _ in range(rounds):
        refine, loads = assigned(*placed, refine)
        result = turn(refine, loads, placed.home)
        placed = _placement(result, topology)
    return result


def _placement(result: tuple[Sequence[BatchPlan], Any], topology: Topology) -> Placement:
    """The homes and residents that all stages share."""
    plan = result[0][0].plan
    return Placement(jnp.asarray(plan.home), jnp.asarray(resident_experts(plan, topology)))


def _check_warm_start(placed: Placement, layers: int, topology: Topology) -> None:
    ranks = (topology.num_nodes, topology.ranks_per_node)
    if not isinstance(placed.home, jax.core.Tracer):
        check_homes(placed.home, topology.num_experts, "warm_start.home")
    check_shape("warm_start.home", placed.home.shape, (layers, topology.num_experts))
    check_shape("warm_start.resident", placed.resident.shape, (layers, *ranks, topology.resident_slots))


def _nobody(starts: Sequence[Assignment]) -> tuple[Assignment, ...]:
    """Assignments without samples, which nothing refines."""
    return tuple(Assignment(jnp.full(start.sample.shape, EMPTY, jnp.int32)) for start in starts)


def _routes_of(routes: Routes, samples: range) -> Routes:
    """The sampled tokens of some samples, these counted from 0; EMPTY for the samples of all others."""
    sample = jnp.asarray(routes.sample)
    inside = (sample >= samples.start) & (sample < samples.stop)
    return routes._replace(sample=jnp.where(inside, sample - samples.start, EMPTY))


def shift_samples(assignment: Assignment, by: int) -> Assignment:
    """An assignment whose samples are numbered from elsewhere; EMPTY stays EMPTY.

    >>> shift_samples(Assignment(jnp.array([[[[0, EMPTY]]]])), 16).sample.tolist()
    [[[[16, -1]]]]
    """
    sample = assignment.sample
    return assignment if not by else Assignment(jnp.where(sample == EMPTY, EMPTY, sample + by))


def _loop_turns(turn, assigned, starts, first_loads, nowhere, state, rounds, topology: Topology, warm_start):
    """All turns as one loop, so that under jit each stage's assignment, and placement, are compiled once."""

    def at_first(*_):
        return starts, first_loads

    def body(number, carry):
        _, placed, refine = carry
        assignments, loads = jax.lax.cond(number == 0, at_first, assigned, *placed, refine)
        refine = jax.tree.map(lambda now, none: jnp.where(number == 0, none, now), assignments, refine)
        result = turn(assignments, loads, placed.home)
        return result, _placement(result, topology), refine

    starts = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), starts)
    stages, _ = jax.eval_shape(turn, starts, first_loads, nowhere)
    blank = jax.tree.map(jnp.zeros_like, stages)
    first, placed = 1, warm_start
    if placed is None:
        nobody = jnp.asarray(resident_experts(blank[0].plan, topology))
        first, placed = 0, Placement(nowhere, nobody)
    return jax.lax.fori_loop(first, rounds + 1, body, ((blank, state), placed, _nobody(starts)))[0]


def _check_unit_times(cost: UnitTimes) -> None:
    """Raise ValueError unless times can be weighed. Under a trace they are not known, and not checked."""
    for field in dataclasses.fields(cost):
        value = getattr(cost, field.name)
        if isinstance(value, jax.core.Tracer | bool):
            continue
        check_not_negative(f"cost.{field.name}", float(value))
        if field.name == "copy":
            check_positive("cost.copy", float(value))


def _cost_of_batch(costs: Sequence[UnitTimes], samples: Sequence[range]) -> UnitTimes:
    """What one unit costs on average over the samples of all stages; residents serve all stages."""
    total = sum(map(len, samples))
    parts = [len(own) / total for own in samples]
    mean = jax.tree.map(lambda *times: sum(map(operator.mul, times, parts)), *costs)
    return dataclasses.replace(mean, push=sum(cost.push for cost in costs))


def _place_in_stages(
    routes: Routes, assignments: Sequence[Assignment], samples: Sequence[range]
) -> TokenSample:
    """The sampled tokens in every stage, their micro-batches counted on from stage to stage.

    Stages that have no sample in common share one copy of the tokens.
    """
    first = 0
    passes: list[TokenSample] = []
    taken: list[range] = []
    for assignment, own in zip(assignments, samples, strict=True):
        placed = place_routes(routes, assignment)
        here = placed.micro_batch != EMPTY
        placed = placed._replace(micro_batch=jnp.where(here, placed.micro_batch + first, EMPTY))
        if passes and all(own.stop <= other.start or other.stop <= own.start for other in taken):
            before = passes.pop()
            placed = placed._replace(
                micro_batch=jnp.where(here, placed.micro_batch, before.micro_batch),
                rank=jnp.where(here, placed.rank, before.rank),
            )
        else:
            taken = []
        passes.append(placed)
        taken.append(own)
        first += len(assignment.sample)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *passes)


def _cut(plan: Plan, sizes: Sequence[int]) -> list[Plan]:
    """The plans of neighbouring micro-batches, over the same homes."""
    until = itertools.accumulate(sizes)
    return [
        Plan(plan.slot_expert[end - size : end], plan.home, plan.quota[end - size : end])
        for end, size in zip(until, sizes, strict=True)
    ]
