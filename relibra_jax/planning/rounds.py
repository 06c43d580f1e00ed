"""Alternate sample assignment and expert placement over the stages of a batch, and keep the cheapest plan.

Placement plans homes for the current assignment of samples; assignment then moves the samples to suit the current
homes. All stages share homes and residents (`relibra_jax.planning.stage_requests`). ``assign`` sees the samples of one
stage as a batch, so it cannot move a sample to another stage.

The rounds add replicas to the priced micro-batches alone (`relibra_jax.planning.plan_price.priced_micro_batches`). The
plan of all follows from the cheapest homes and residents at the end, in parts of as many micro-batches. There no
rank sends replicas of more experts inside its node than in the priced ones: a padded fetch is as long as the longest.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from relibra_jax.contract.plan import contiguous_homes, resident_experts
from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan, Plan, layer_plans
from relibra_jax.cost.copies import padded_exports
from relibra_jax.planning.assignment import nodes_as_ranks
from relibra_jax.planning.plan_price import StagePrice, price_stages
from relibra_jax.planning.portfolio import Trial, homes_of, list_trials
from relibra_jax.planning.replicate_for_time import FEW_EXPORTS
from relibra_jax.planning.replication import without_replicas
from relibra_jax.planning.stage_requests import (
    Problem,
    in_stages,
    priced_by_stage,
    priced_numbers,
    request_of,
    samples_of,
    shift_samples,
    whole_batch,
)


@jax.jit
def plan_rounds(problem: Problem) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch together: make a first plan, then alternate assignment and placement.

    The plan with the lowest price (`relibra_jax.planning.plan_price`) of all rounds is returned. For a planner with
    ``reorder`` and ``replicate``, and where transfers are paid for, every layer then gets the cheapest of several homes
    (`relibra_jax.planning.portfolio`) under the best assignment; so the plan costs no more than to leave the experts
    where they are, with or without replicas, under the first or under the best assignment.

    From the second batch on, the search for assignments begins at the homes of the batch before, which moves fewer
    experts at nearly equal balance (``python -m experiments.bench_warm_start``).

    Args:
        problem: everything that the plans depend on.

    Returns:
        The batch plan of each stage, and the planner's state after the batch.
    """
    rounds = problem.rounds
    if not rounds and not problem.can_stay:
        request = request_of(problem, problem.starts)
        start = None if problem.start is None else problem.start.home
        plan, state = problem.planner.update(request._replace(start=start), problem.state, problem.topology)
        return in_stages(problem.starts, request.load, plan), state

    # One loop compiles placement, replication, the assignment of each stage and the price only once.
    schedule = _Schedule.of(problem)
    starts = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), problem.starts)

    def plan_starts() -> tuple[_Choice, Plan]:
        request = request_of(problem, starts)
        choice, _ = _choose(problem, request, problem.no_homes)
        return choice, _plan_choice(problem, request, choice)

    blank, no_plan = jax.tree.map(jnp.zeros_like, jax.eval_shape(plan_starts))
    worst = StagePrice(jnp.float32(jnp.inf), jnp.full(len(problem.no_homes), jnp.inf, jnp.float32))
    nothing = _Best(starts, blank, problem.state, worst, jnp.int32(0))

    def body(number, carry: tuple[_Best, _Merged, _Latest, Plan]) -> tuple[_Best, _Merged, _Latest, Plan]:
        best, merged, latest, whole_plan = carry
        one_pass = schedule.at(number)
        assignments = _assignments(problem, one_pass, starts, best, latest)
        request = request_of(problem, assignments, one_pass.micro_batches)
        request = request._replace(exports=jnp.where(one_pass.is_part, best.exports, 0))
        choice, state = _search_or_stay(problem, one_pass, assignments, request, best, merged, latest)
        plan = _plan_choice(problem, request, choice)
        compute_price = functools.partial(_price, problem, assignments, request, plan)
        price = jax.lax.cond(one_pass.is_part, lambda: worst, compute_price)
        new = _Best(assignments, choice, state, price, _most_exports(problem, request, plan))
        if one_pass.trial is not None:
            merged = _merge(new, best, merged, one_pass.trial, one_pass.tries)
        after = _Latest(state, _next_placement(problem, choice, number), assignments)
        latest = _select(one_pass.tries, latest, after)
        best = _select(price.total < best.price.total, new, best)
        return best, merged, latest, _write_part(whole_plan, plan, one_pass.begin)

    latest = _Latest(problem.state, _first_placement(problem), starts)
    carry = (nothing, _Merged(blank, worst.by_layer), latest, no_plan)
    best, _, _, plan = jax.lax.fori_loop(schedule.first, schedule.end, body, carry)
    plan = best.choice if isinstance(best.choice, Plan) else plan
    return in_stages(best.assignments, request_of(problem, best.assignments).load, plan), best.state


class _Pass(NamedTuple):
    """One pass of the loop of `plan_rounds`."""

    number: Array
    """The number of the pass."""
    tries: Array
    """Whether the pass tries homes without a search, or plans the best choice."""
    is_part: Array
    """Whether it plans a part of the best choice, and prices nothing."""
    trial: Trial | None
    """What it tries; None if nothing is tried."""
    begin: Array
    """The first micro-batch of the part."""
    micro_batches: Int[Array, " some"] | None
    """The numbers of the micro-batches that it plans; None for all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Schedule:
    """The passes of the loop of `plan_rounds`: rounds with a search, then trials, then the parts of the whole plan."""

    rounds: int
    """The number of the last pass with a search. Pass 0 plans for the first assignment of samples."""
    trials: tuple[Trial, ...]
    """The plans that are tried without a search."""
    priced: Int[np.ndarray, " some"]
    """The numbers of the priced micro-batches: as many as a pass plans."""
    count: int
    """The number of all micro-batches."""
    first: int
    """The number of the first pass."""
    parts: int
    """The number of passes that plan the best choice."""

    @classmethod
    def of(cls, problem: Problem) -> "_Schedule":
        """Return the schedule of a problem."""
        rounds, count = problem.rounds, sum(len(start.sample) for start in problem.starts)
        # Without homes, a plan is a whole one from the search on.
        homes = problem.planner.takes_homes
        priced = priced_numbers(problem) if homes else np.arange(count, dtype=np.int32)
        return cls(
            rounds=rounds,
            trials=list_trials(assigned=bool(rounds)) if problem.can_stay else (),
            priced=priced,
            count=count,
            first=int(bool(rounds) and problem.start is not None),
            parts=-(-count // len(priced)) if homes else 0,
        )

    @property
    def end(self) -> int:
        """One more than the number of the last pass."""
        return self._first_part + self.parts

    @property
    def _first_part(self) -> int:
        """The number of the first pass that plans the best choice."""
        return self.rounds + 1 + len(self.trials)

    def at(self, number: Array) -> _Pass:
        """Return a pass by its number."""
        size, is_part, trial = len(self.priced), number >= self._first_part, None
        begin = jnp.clip((number - self._first_part) * size, 0, self.count - size)
        if self.trials:
            trial = jax.tree.map(lambda *each: jnp.asarray(each)[number - self.rounds - 1], *self.trials)
        numbers = None
        if size < self.count:
            numbers = jnp.where(is_part, begin + jnp.arange(size, dtype=jnp.int32), self.priced)
        return _Pass(number, number > self.rounds, is_part, trial, begin, numbers)


class _Homes(NamedTuple):
    """What a planner that takes homes plans; replicas follow from it."""

    placement: Placement
    bare: Bool[jax.Array, ""]
    """Whether there are no replicas."""


type _Choice = _Homes | Plan
"""What is kept of a plan in the rounds: all of it, for a planner that does not take homes."""


class _Best(NamedTuple):
    """The cheapest plan of all stages so far. Loads follow from the assignments, and are too large to be kept."""

    assignments: tuple[Assignment, ...]
    choice: _Choice
    state: Any
    price: StagePrice
    exports: Int[jax.Array, ""]
    """The most experts of which a rank sends replicas in a priced layer and micro-batch, as a padded fetch counts."""


class _Merged(NamedTuple):
    """The plan that has the cheapest layers of the trials so far."""

    choice: _Choice
    by_layer: Float[jax.Array, " L"]
    """The seconds of each layer, as `StagePrice` has them."""


class _Latest(NamedTuple):
    """What the latest round leaves to the next one."""

    state: Any
    placement: Placement
    assignments: tuple[Assignment, ...]


def _assignments(
    problem: Problem, one_pass: _Pass, starts: tuple[Assignment, ...], best: _Best, latest: _Latest
) -> tuple[Assignment, ...]:
    """Return the assignment of every stage's samples in a pass: a new one in rounds after pass 0, or a given one."""
    if not problem.rounds:
        return starts
    under_best = one_pass.tries & (True if one_pass.trial is None else ~one_pass.trial.first_assignment)
    given = _select(under_best | one_pass.is_part, best.assignments, starts)
    assign = functools.partial(_assign_stages, problem)
    is_given = (one_pass.number == 0) | one_pass.tries
    return jax.lax.cond(is_given, lambda *_: given, assign, latest.placement, latest.assignments)


def _search_or_stay(
    problem: Problem,
    one_pass: _Pass,
    assignments: tuple[Assignment, ...],
    request: PlanRequest,
    best: _Best,
    merged: _Merged,
    latest: _Latest,
) -> tuple[_Choice, Any]:
    """Return the choice of a pass, searched, tried or the best, and the planner's state after it."""
    start = _search_start(problem, latest.placement, one_pass.number)

    def search() -> tuple[_Choice, Any]:
        whole = request if one_pass.micro_batches is None else request_of(problem, assignments)
        return _choose(problem, whole, start)

    if one_pass.trial is None:
        choice, state = jax.lax.cond(one_pass.tries, lambda: (best.choice, best.state), search)
    else:
        assert isinstance(best.choice, _Homes)
        assert isinstance(merged.choice, _Homes)
        stay = functools.partial(_stay, problem, one_pass.trial, best.choice, merged.choice, latest.state)
        choice, state = jax.lax.cond(one_pass.tries, stay, search)
    return _select(one_pass.is_part, best.choice, choice), state


def _select[T](condition: Array, one: T, other: T) -> T:
    """Return the first of two trees of arrays where the condition holds, and otherwise the second."""
    return jax.tree.map(functools.partial(jnp.where, condition), one, other)


def _most_exports(problem: Problem, request: PlanRequest, plan: Plan) -> Int[jax.Array, ""]:
    """Return the exports of a plan, at least those of the shortest fetch; 0 if they are free, or of no effect."""
    topology = problem.topology
    if not problem.planner.takes_homes or problem.prices[0].fetches != "padded":
        return jnp.int32(0)
    exports = padded_exports(layer_plans(plan, request.load), topology)
    return jnp.maximum(exports.astype(jnp.int32), FEW_EXPORTS)


def _write_part(whole: Plan, part: Plan, begin: Int[Array, ""]) -> Plan:
    """Write the plan of some consecutive micro-batches to that of all."""
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=begin, axis=0)
    slots, quota = write(whole.slot_expert, part.slot_expert), write(whole.quota, part.quota)
    return Plan(slots, part.home, quota)


def _choose(problem: Problem, request: PlanRequest, start: Int[Array, "L E"] | None) -> tuple[_Choice, Any]:
    """Search for a plan of the whole batch from given homes."""
    planner, topology = problem.planner, problem.topology
    request = request._replace(start=start)
    if not planner.takes_homes:
        return planner.update(request, problem.state, topology)
    assert planner.reorder is not None
    placement, state = planner.reorder(request, problem.state, topology)
    return _Homes(jax.tree.map(jnp.asarray, placement), jnp.zeros((), bool)), state


def _stay(problem: Problem, trial: Trial, best: _Homes, merged: _Homes, state: Any) -> tuple[_Homes, Any]:
    """Choose homes without a search, as a trial says, and the planner's state with them."""
    before = problem.previous_home
    assert before is not None
    history = getattr(state, "history", None)
    load = problem.batch.sample_load.sum(0, dtype=jnp.float32) if history is None else history.load.sum(1)
    home = homes_of(trial, before, best.placement.home, load, problem.topology)
    own = Placement.without_residents(home, problem.topology)
    placement = _select(trial.is_merged, merged.placement, own)
    choice = _Homes(placement, jnp.asarray(trial.bare))
    return choice, state._replace(home=choice.placement.home)


def _plan_choice(problem: Problem, request: PlanRequest, choice: _Choice) -> Plan:
    """Return the plan of a choice for the micro-batches of a request."""
    if isinstance(choice, Plan):
        return choice
    assert problem.planner.replicate is not None
    topology = problem.topology
    replicate = functools.partial(problem.planner.replicate, request, choice.placement, topology)
    if not problem.can_stay:
        return replicate()
    bare = functools.partial(without_replicas, request.by_expert, choice.placement.home, topology)
    return jax.lax.cond(choice.bare, bare, replicate)


def _price(
    problem: Problem, assignments: Sequence[Assignment], request: PlanRequest, plan: Plan
) -> StagePrice:
    """Price a plan of all or of the priced micro-batches; moves are divided among the batches that they serve."""
    topology = problem.topology
    batches: Float[jax.Array, " L"] | float = 1.0
    if problem.planner.serves is not None and problem.compare_staying:
        whole = whole_batch(problem, assignments, request)
        batches = problem.planner.serves(plan.home, whole, problem.state, topology)
    all_planned = len(plan.quota) == sum(len(each.sample) for each in assignments)
    sizes = None if all_planned else [len(part) for part in priced_by_stage(problem)]
    return price_stages(
        in_stages(assignments, request.load, plan, sizes),
        problem.batch,
        topology,
        problem.prices,
        previous_home=problem.previous_home,
        batches=batches,
    )


def _merge(new: _Best, best: _Best, merged: _Merged, trial: Trial, tries: Array) -> _Merged:
    """Take the layers of a trial's plan that cost less than those of the plan that is merged so far."""
    begins = trial.begins & tries
    # Under the best assignment, with replicas, the trials begin with the best plan.
    from_best = begins & ~trial.first_assignment & ~trial.bare
    old = jnp.where(from_best, best.price.by_layer, jnp.where(begins, jnp.inf, merged.by_layer))
    old_choice = _select(from_best, best.choice, merged.choice)
    wins = (new.price.by_layer < old) & ~trial.is_merged

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(wins.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    assert isinstance(new.choice, _Homes)
    assert isinstance(old_choice, _Homes)
    # All trials of a merged plan are alike in whether they have replicas.
    placement = jax.tree.map(pick, new.choice.placement, old_choice.placement)
    return _Merged(_Homes(placement, new.choice.bare), jnp.where(wins, new.price.by_layer, old))


def _search_start(problem: Problem, placement: Placement, number: Array) -> Int[Array, "L E"] | None:
    """Return the homes at which the search of a round starts; None for a search that no round follows."""
    if not problem.rounds:
        return None if problem.start is None else problem.start.home
    return jnp.where(number == 0, problem.no_homes, placement.home)


def _first_placement(problem: Problem) -> Placement:
    """Return the homes and residents to which the first assignment of samples is made, if they are known."""
    if problem.start is not None:
        return jax.tree.map(jnp.asarray, problem.start)
    return Placement.without_residents(problem.no_homes, problem.topology)


def _next_placement(problem: Problem, choice: _Choice, number: Array) -> Placement:
    """Return the homes and residents for the next assignment: those of the choice, or of the batch before."""
    home = problem.previous_home
    if isinstance(choice, Plan):
        residents = jnp.asarray(resident_experts(choice, problem.topology))
        placement = Placement(jnp.asarray(choice.home), residents)
    else:
        placement = choice.placement
    if home is None:
        return placement
    # Homes that are EMPTY or contiguous are those of a planner that has seen no batch.
    planned = (home != EMPTY).all() & (home != contiguous_homes(problem.topology, len(home))).any()
    begins = (number == 0) & planned
    before = Placement.without_residents(home, problem.topology)
    return _select(begins, before, placement)


def _assign_stages(
    problem: Problem, placement: Placement, latest: Sequence[Assignment]
) -> tuple[Assignment, ...]:
    """Assign the samples of every stage for given homes and residents."""
    assert problem.assign is not None
    assignments = []
    for stage, samples, price in zip(latest, problem.samples, problem.prices, strict=True):
        topology, start = problem.topology, shift_samples(stage, -samples.start)
        placed = placement
        if price.sequences == "split":
            placed, topology, start = nodes_as_ranks(placement, topology, start)
        assignment = problem.assign(
            samples_of(problem.batch, samples),
            placed,
            topology,
            start=start,
            price=price,
            key=problem.key,
        )
        assignment = Assignment(assignment.sample.reshape(stage.sample.shape))
        assignments.append(shift_samples(assignment, samples.start))
    return tuple(assignments)
