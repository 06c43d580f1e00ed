"""Alternate sample assignment and expert placement over the stages of a batch, and keep the cheapest plan.

Placement plans homes for the current assignment of samples; assignment then moves the samples to suit the current
homes. A stage runs all samples of the batch, or a range of them, in its own micro-batches; all stages share homes and
residents. The planner sees the micro-batches of all stages concatenated along M, and its plan is split along M again.
``assign`` sees the samples of one stage as a batch, so it cannot move a sample to another stage.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.contract.plan import contiguous_homes, resident_experts
from relibra_jax.contract.planner import PlacedRoutes, Placement, Planner, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan, Plan, Price, Topology
from relibra_jax.planning.assignment import Assign, nodes_as_ranks
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_price import StagePrice, price_stages
from relibra_jax.planning.portfolio import Trial, homes_of, list_trials
from relibra_jax.planning.replication import without_replicas
from relibra_jax.planning.routes import Routes, place_routes
from relibra_jax.planning.visit_estimates import tokens_of_ranks
from relibra_jax.routing.striping import planned_load


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("batch", "state", "starts", "prices", "key", "start"),
    meta_fields=("planner", "topology", "samples", "assign", "rounds", "compare_staying"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that the plans of a batch depend on."""

    batch: Batch
    """The samples of the batch, with counts in int32."""
    planner: Planner
    state: Any
    """The planner's state before the batch, from which every round plans."""
    topology: Topology
    starts: tuple[Assignment, ...]
    """The assignment of each stage's samples for the first plan."""
    samples: tuple[range, ...]
    """The samples of each stage, as a range of consecutive samples of the batch."""
    prices: tuple[Price, ...]
    """The price of each stage."""
    assign: Assign | None
    """The function that assigns the samples of one stage. None keeps the first assignments."""
    key: PRNGKeyArray | None
    """Random key for ``assign``."""
    rounds: int
    """The number of rounds of assignment and placement; 0 without ``assign``."""
    start: Placement | None
    """The homes and residents to which the first round assigns samples, instead of making a first plan for
    ``starts``."""
    compare_staying: bool
    """Whether to compare the plans with those that leave experts where they are."""

    @property
    def previous_home(self) -> Int[jax.Array, "L E"] | None:
        """The homes before the batch, if the planner's state has them."""
        home = getattr(self.state, "home", None)
        return None if home is None else jnp.asarray(home, jnp.int32)

    @property
    def can_stay(self) -> bool:
        """Whether plans are compared with those that leave experts where they are."""
        return self.compare_staying and self.planner.takes_homes and self.previous_home is not None

    @property
    def no_homes(self) -> Int[jax.Array, "L E"]:
        """Homes that are all EMPTY: a search that starts from nothing."""
        shape = (self.batch.sample_load.shape[1], self.topology.num_experts)
        return jnp.full(shape, EMPTY, jnp.int32)


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
        loads, request = _request(problem, problem.starts)
        start = None if problem.start is None else problem.start.home
        plans, state = _plan_round(problem, request._replace(start=start))
        return tuple(map(BatchPlan, problem.starts, loads, plans)), state

    # One loop compiles placement, replication, the assignment of each stage and the price only once.
    first = int(bool(rounds) and problem.start is not None)
    trials = list_trials(assigned=bool(rounds)) if problem.can_stay else ()
    starts = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), problem.starts)

    def plan_starts() -> tuple[tuple[Plan, ...], Any]:
        _, request = _request(problem, starts)
        return _plan_round(problem, request._replace(start=problem.no_homes))

    plans, _ = jax.eval_shape(plan_starts)
    blank = jax.tree.map(jnp.zeros_like, plans)
    worst = StagePrice(jnp.float32(jnp.inf), jnp.full(len(problem.no_homes), jnp.inf, jnp.float32))
    nothing = _Best(starts, blank, problem.state, worst)

    def body(number, carry: tuple[_Best, _Merged, _Latest]) -> tuple[_Best, _Merged, _Latest]:
        best, merged, latest = carry
        trial = (
            jax.tree.map(lambda *each: jnp.asarray(each)[number - rounds - 1], *trials) if trials else None
        )
        tries = number > rounds
        assignments = starts
        if rounds:
            under_best = tries & (True if trial is None else ~trial.first_assignment)
            given = jax.tree.map(functools.partial(jnp.where, under_best), best.assignments, starts)
            assign = functools.partial(_assign_stages, problem)
            inputs = ((number == 0) | tries, lambda *_: given, assign, latest.placement, latest.assignments)
            assignments = jax.lax.cond(*inputs)
        start = _search_start(problem, latest.placement, number)
        loads, request = _request(problem, assignments)
        request = request._replace(start=start)
        if trial is None:
            plans, state = _plan_round(problem, request)
        else:
            stay = _Stay(tries, trial, best.plans[0].home, latest.state)
            plans, state = jax.lax.cond(
                tries & trial.is_merged,
                lambda: (merged.plans, latest.state._replace(home=merged.plans[0].home)),
                functools.partial(_plan_round, problem, request, stay),
            )
        price = _price(problem, request, tuple(map(BatchPlan, assignments, loads, plans)))
        new = _Best(assignments, plans, state, price)
        if trial is not None:
            merged = _merge(new, best, merged, trial, tries)
        cheaper = price.total < best.price.total
        after = _Latest(state, _next_placement(problem, plans, number), assignments)
        kept = functools.partial(jnp.where, tries)
        best = jax.tree.map(functools.partial(jnp.where, cheaper), new, best)
        return best, merged, jax.tree.map(kept, latest, after)

    latest = _Latest(problem.state, _first_placement(problem, blank), starts)
    stop = rounds + 1 + len(trials)
    nothing_merged = _Merged(blank, worst.by_layer)
    best, _, _ = jax.lax.fori_loop(first, stop, body, (nothing, nothing_merged, latest))
    loads, _ = _request(problem, best.assignments)
    return tuple(map(BatchPlan, best.assignments, loads, best.plans)), best.state


def _price(problem: Problem, request: PlanRequest, stages: Sequence[BatchPlan]) -> StagePrice:
    """Price the plans of all stages; moves are divided among the batches that they serve."""
    topology = problem.topology
    batches: Float[jax.Array, " L"] | float = 1.0
    if problem.planner.serves is not None and problem.compare_staying:
        batches = problem.planner.serves(stages[0].plan.home, request, problem.state, topology)
    return price_stages(
        stages,
        problem.batch,
        topology,
        problem.prices,
        previous_home=problem.previous_home,
        batches=batches,
    )


class _Best(NamedTuple):
    """The cheapest plan of all stages so far. Loads follow from the assignments, and are too large to be kept."""

    assignments: tuple[Assignment, ...]
    plans: tuple[Plan, ...]
    state: Any
    price: StagePrice


class _Merged(NamedTuple):
    """The plan that has the cheapest layers of the trials so far."""

    plans: tuple[Plan, ...]
    by_layer: Float[jax.Array, " L"]
    """The seconds of each layer, as `StagePrice` has them."""


def _merge(new: _Best, best: _Best, merged: _Merged, trial: Trial, tries: Array) -> _Merged:
    """Take the layers of a trial's plan that cost less than those of the plan that is merged so far."""
    begins = trial.begins & tries
    # Under the best assignment, with replicas, the trials begin with the best plan.
    from_best = begins & ~trial.first_assignment & ~trial.bare
    old = jnp.where(from_best, best.price.by_layer, jnp.where(begins, jnp.inf, merged.by_layer))
    old_plans = jax.tree.map(functools.partial(jnp.where, from_best), best.plans, merged.plans)
    wins = (new.price.by_layer < old) & ~trial.is_merged

    def pick(new: Plan, old: Plan) -> Plan:
        by_layer = wins[None, :, None, None, None]
        slots = jnp.where(by_layer, new.slot_expert, old.slot_expert)
        return Plan(
            slots, jnp.where(wins[:, None], new.home, old.home), jnp.where(by_layer, new.quota, old.quota)
        )

    return _Merged(tuple(map(pick, new.plans, old_plans)), jnp.where(wins, new.price.by_layer, old))


class _Latest(NamedTuple):
    """What the latest round leaves to the next one."""

    state: Any
    placement: Placement
    assignments: tuple[Assignment, ...]


def _search_start(problem: Problem, placement: Placement, number: Array) -> Int[Array, "L E"] | None:
    """Return the homes at which the search of a round starts; None for a search that no round follows."""
    if not problem.rounds:
        return None if problem.start is None else problem.start.home
    return jnp.where(number == 0, problem.no_homes, placement.home)


def _first_placement(problem: Problem, blank: Sequence[Plan]) -> Placement:
    """Return the homes and residents to which the first assignment of samples is made, if they are known."""
    if problem.start is not None:
        return jax.tree.map(jnp.asarray, problem.start)
    return Placement(problem.no_homes, jnp.asarray(resident_experts(blank[0], problem.topology)))


def _next_placement(problem: Problem, plans: Sequence[Plan], number: Array) -> Placement:
    """Return the homes and residents for the next assignment: those of the plan, or of the batch before."""
    plan, home = plans[0], problem.previous_home
    placement = Placement(jnp.asarray(plan.home), jnp.asarray(resident_experts(plan, problem.topology)))
    if home is None:
        return placement
    # Homes that are EMPTY or contiguous are those of a planner that has seen no batch.
    planned = (home != EMPTY).all() & (home != contiguous_homes(problem.topology, len(home))).any()
    begins = (number == 0) & planned
    before = Placement.without_residents(home, problem.topology)
    return jax.tree.map(functools.partial(jnp.where, begins), before, placement)


class _Stay(NamedTuple):
    """A plan without a search and without residents, as a trial says."""

    chosen: Array
    """Whether the round makes this plan. Otherwise it searches."""
    trial: Trial
    best_home: Int[Array, "L E"]
    state: Any
    """The planner's state, whose homes become those of the plan."""


def _plan_round(
    problem: Problem, request: PlanRequest, stay: _Stay | None = None
) -> tuple[tuple[Plan, ...], Any]:
    """Plan all stages, by a search or, if it is chosen, as ``stay`` says."""
    planner, topology = problem.planner, problem.topology
    if stay is None:
        plan, state = planner.update(request, problem.state, topology)
        return _split_stages(problem, plan), state

    assert planner.reorder is not None
    assert planner.replicate is not None
    search = functools.partial(planner.reorder, request, problem.state, topology)
    placement, state = jax.lax.cond(stay.chosen, lambda: _stay(problem, stay, request), search)
    replicate = functools.partial(planner.replicate, request, placement, topology)
    bare = functools.partial(without_replicas, request.by_expert, placement.home, topology)
    plan = jax.lax.cond(stay.chosen & stay.trial.bare, bare, replicate)
    return _split_stages(problem, plan), state


def _stay(problem: Problem, stay: _Stay, request: PlanRequest) -> tuple[Placement, Any]:
    """Return the homes of a plan without a search, and the planner's state with them."""
    before = problem.previous_home
    assert before is not None
    history = getattr(stay.state, "history", None)
    load = jnp.asarray(request.by_expert, jnp.float32).sum(0) if history is None else history.load.sum(1)
    home = homes_of(stay.trial, before, stay.best_home, load, problem.topology)
    return Placement.without_residents(home, problem.topology), stay.state._replace(home=home)


def _request(
    problem: Problem, assignments: Sequence[Assignment]
) -> tuple[list[Int[jax.Array, "M L N G E"]], PlanRequest]:
    """Return the load of each stage, and all that the planner may look at."""
    batch = problem.batch
    loads = [planned_load(batch.sample_load, each, problem.prices[0]) for each in assignments]
    routes = None
    if batch.routes is not None:
        routes = _place_in_stages(batch.routes, assignments, problem.samples)
    load = jnp.asarray(loads[0]) if len(loads) == 1 else jnp.concatenate(loads)
    price = _price_of_batch(problem.prices, problem.samples)
    tokens = [tokens_of_ranks(each, batch.lengths) for each in assignments]
    return loads, PlanRequest(
        load=load,
        routes=routes,
        transitions=batch.transitions,
        price=price,
        tokens=tokens[0] if len(tokens) == 1 else jnp.concatenate(tokens),
        predicted=predicted_loads(batch, assignments),
    )


def predicted_loads(batch: Batch, assignments: Sequence[Assignment]) -> Float[jax.Array, "M L E"] | None:
    """Sum the predicted loads of the samples of every micro-batch of all stages; None if nothing is predicted.

    Args:
        batch: the samples of the batch.
        assignments: the assignment of each stage's samples.
    """
    if batch.predicted_load is None:
        return None
    load = jnp.asarray(batch.predicted_load, jnp.float32)

    def one_micro_batch(sample: Int[jax.Array, " b"]) -> Float[jax.Array, "L E"]:
        return load.at[sample].get(mode="fill", fill_value=0, wrap_negative_indices=False).sum(0)

    samples = [jnp.asarray(each.sample).reshape(len(each.sample), -1) for each in assignments]
    return jnp.concatenate([jax.lax.map(one_micro_batch, sample) for sample in samples])


def _split_stages(problem: Problem, plan: Plan) -> tuple[Plan, ...]:
    """Split a plan along M into the plans of the stages, all with the same homes."""
    sizes = [len(start.sample) for start in problem.starts]
    return tuple(
        Plan(plan.slot_expert[end - size : end], plan.home, plan.quota[end - size : end])
        for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)
    )


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
            _samples_of(problem.batch, samples),
            placed,
            topology,
            start=start,
            price=price,
            key=problem.key,
        )
        assignment = Assignment(assignment.sample.reshape(stage.sample.shape))
        assignments.append(shift_samples(assignment, samples.start))
    return tuple(assignments)


def _samples_of(batch: Batch, samples: range) -> Batch:
    """Return the part of a batch in a range of samples, numbered from its start; other samples' routes get EMPTY."""
    part, routes = slice(samples.start, samples.stop), batch.routes
    if routes is not None:
        sample = jnp.asarray(routes.sample)
        inside = (sample >= samples.start) & (sample < samples.stop)
        routes = Routes(routes.expert_ids, jnp.where(inside, sample - samples.start, EMPTY))
    predicted = None if batch.predicted_load is None else batch.predicted_load[part]
    return batch._replace(
        sample_load=batch.sample_load[part],
        lengths=batch.lengths[part],
        routes=routes,
        predicted_load=predicted,
    )


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


def _price_of_batch(prices: Sequence[Price], samples: Sequence[range]) -> Price:
    """Average the prices over the samples of all stages; pushes add up, because residents serve all stages."""
    total = sum(map(len, samples))
    parts = [len(stage_range) / total for stage_range in samples]

    def mean_cost(*costs: Any) -> Any:
        # All stages agree on `Price.across_nodes`.
        return (
            costs[0] if jnp.result_type(costs[0]) is jnp.dtype(bool) else sum(map(operator.mul, costs, parts))
        )

    mean = jax.tree.map(mean_cost, *prices)
    pushes = {name: sum(getattr(price, name) for price in prices) for name in ("push", "push_inside")}
    return dataclasses.replace(mean, **pushes)


def _place_in_stages(
    routes: Routes, assignments: Sequence[Assignment], samples: Sequence[range]
) -> PlacedRoutes:
    """Place the sampled tokens in every stage, with micro-batches numbered consecutively over the stages.

    Consecutive stages that have no sample in common share one copy of the tokens.
    """
    first = 0
    passes: list[PlacedRoutes] = []
    ranges: list[range] = []
    for assignment, stage_range in zip(assignments, samples, strict=True):
        placed = place_routes(routes, assignment)
        in_stage = placed.micro_batch != EMPTY
        placed = placed._replace(micro_batch=jnp.where(in_stage, placed.micro_batch + first, EMPTY))
        if passes and all(
            stage_range.stop <= other.start or other.stop <= stage_range.start for other in ranges
        ):
            previous = passes.pop()
            placed = placed._replace(
                micro_batch=jnp.where(in_stage, placed.micro_batch, previous.micro_batch),
                rank=jnp.where(in_stage, placed.rank, previous.rank),
            )
        else:
            ranges = []
        passes.append(placed)
        ranges.append(stage_range)
        first += len(assignment.sample)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *passes)
