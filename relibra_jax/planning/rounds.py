"""Alternate sample assignment and expert placement over the stages of a batch, and keep the cheapest plan.

Placement plans homes for the current assignment of samples; assignment then moves the samples to suit the current
homes. A stage runs all samples of the batch, or a range of them, in its own micro-batches; all stages share homes and
residents. The planner sees the micro-batches of all stages concatenated along M, and its plan is split along M again.
``assign`` sees the samples of one stage as a batch, so it cannot move a sample to another stage.

The rounds add replicas to the priced micro-batches alone (`relibra_jax.planning.plan_price.priced_micro_batches`). The
plan of all follows from the cheapest homes and residents at the end, in parts of as many micro-batches. There no
rank sends replicas of more experts inside its node than in the priced ones: a padded fetch is as long as the longest.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from relibra_jax.contract.plan import contiguous_homes, resident_experts
from relibra_jax.contract.planner import PlacedRoutes, Placement, Planner, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan, Plan, Price, Topology, layer_plans
from relibra_jax.cost.copies import padded_exports
from relibra_jax.planning.assignment import Assign, nodes_as_ranks, with_positions
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_price import StagePrice, price_stages, priced_micro_batches
from relibra_jax.planning.portfolio import Trial, homes_of, list_trials
from relibra_jax.planning.replicate_for_time import FEW_EXPORTS
from relibra_jax.planning.replication import without_replicas
from relibra_jax.planning.routes import Routes, place_routes
from relibra_jax.planning.visit_estimates import tokens_of_ranks
from relibra_jax.routing.striping import planned_load

SUM_MOST: Final = float(1 << 30)
"""The most token copies of a layer in the sum over a batch; more are scaled down."""


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
        request = _request(problem, problem.starts)
        start = None if problem.start is None else problem.start.home
        plan, state = problem.planner.update(request._replace(start=start), problem.state, problem.topology)
        return _in_stages(problem.starts, request.load, plan), state

    # One loop compiles placement, replication, the assignment of each stage and the price only once. After the rounds
    # and the trials, its last passes plan all micro-batches of the best choice, as many at a time as are priced.
    first = int(bool(rounds) and problem.start is not None)
    trials = list_trials(assigned=bool(rounds)) if problem.can_stay else ()
    starts = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), problem.starts)

    def plan_starts() -> tuple[_Choice, Plan]:
        request = _request(problem, starts)
        choice, _ = _choose(problem, lambda: request, problem.no_homes)
        return choice, _plan_choice(problem, request, choice)

    blank, no_plan = jax.tree.map(jnp.zeros_like, jax.eval_shape(plan_starts))
    is_planned = isinstance(blank, Plan)
    priced = _priced_numbers(problem)
    count, size = len(no_plan.quota), len(no_plan.quota) if is_planned else len(priced)
    stop = rounds + 1 + len(trials)
    worst = StagePrice(jnp.float32(jnp.inf), jnp.full(len(problem.no_homes), jnp.inf, jnp.float32))
    nothing = _Best(starts, blank, problem.state, worst, jnp.int32(0))

    def body(number, carry: tuple[_Best, _Merged, _Latest, Plan]) -> tuple[_Best, _Merged, _Latest, Plan]:
        best, merged, latest, whole_plan = carry
        ends = number >= stop
        begin = jnp.clip((number - stop) * size, 0, count - size)
        trial = (
            jax.tree.map(lambda *each: jnp.asarray(each)[number - rounds - 1], *trials) if trials else None
        )
        tries = number > rounds
        assignments = starts
        if rounds:
            under_best = tries & (True if trial is None else ~trial.first_assignment)
            given = jax.tree.map(functools.partial(jnp.where, under_best | ends), best.assignments, starts)
            assign = functools.partial(_assign_stages, problem)
            inputs = ((number == 0) | tries, lambda *_: given, assign, latest.placement, latest.assignments)
            assignments = jax.lax.cond(*inputs)
        start = _search_start(problem, latest.placement, number)
        numbers = (
            None if size == count else jnp.where(ends, begin + jnp.arange(size, dtype=jnp.int32), priced)
        )
        request = _request(problem, assignments, numbers)
        request = request._replace(exports=jnp.where(ends, best.exports, 0))
        whole = (lambda: request) if numbers is None else functools.partial(_request, problem, assignments)
        search = functools.partial(_choose, problem, whole, start)
        if trial is None:
            choice, state = jax.lax.cond(tries, lambda: (best.choice, best.state), search)
        else:
            assert isinstance(best.choice, _Homes)
            assert isinstance(merged.choice, _Homes)
            stay = functools.partial(_stay, problem, trial, best.choice, merged.choice, latest.state)
            choice, state = jax.lax.cond(tries, stay, search)
        choice = jax.tree.map(functools.partial(jnp.where, ends), best.choice, choice)
        plan = _plan_choice(problem, request, choice)
        compute_price = functools.partial(_price, problem, assignments, request, plan)
        price = jax.lax.cond(ends, lambda: worst, compute_price)
        new = _Best(assignments, choice, state, price, _most_exports(problem, request, plan))
        if trial is not None:
            merged = _merge(new, best, merged, trial, tries)
        cheaper = price.total < best.price.total
        after = _Latest(state, _next_placement(problem, choice, number), assignments)
        kept = functools.partial(jnp.where, tries)
        best = jax.tree.map(functools.partial(jnp.where, cheaper), new, best)
        return best, merged, jax.tree.map(kept, latest, after), _write_part(whole_plan, plan, begin)

    latest = _Latest(problem.state, _first_placement(problem), starts)
    carry = (nothing, _Merged(blank, worst.by_layer), latest, no_plan)
    end = stop if is_planned else stop - (-count // size)
    best, _, _, plan = jax.lax.fori_loop(first, end, body, carry)
    plan = best.choice if isinstance(best.choice, Plan) else plan
    return _in_stages(best.assignments, _request(problem, best.assignments).load, plan), best.state


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


class _Homes(NamedTuple):
    """What a planner that takes homes plans; replicas follow from it."""

    placement: Placement
    bare: Bool[jax.Array, ""]
    """Whether there are no replicas."""


type _Choice = _Homes | Plan
"""What is kept of a plan in the rounds: all of it, for a planner that does not take homes."""


def _choose(
    problem: Problem, whole: Callable[[], PlanRequest], start: Int[Array, "L E"] | None
) -> tuple[_Choice, Any]:
    """Search for a plan of the whole batch from given homes."""
    planner, topology = problem.planner, problem.topology
    request = whole()._replace(start=start)
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
    placement = jax.tree.map(functools.partial(jnp.where, trial.is_merged), merged.placement, own)
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


def _priced(problem: Problem) -> list[Int[np.ndarray, " some"]]:
    """Return the numbers of the priced micro-batches of each stage."""
    pairs = zip(problem.starts, problem.prices, strict=True)
    return [priced_micro_batches(len(start.sample), price.data_parallel) for start, price in pairs]


def _priced_numbers(problem: Problem) -> Int[np.ndarray, " some"]:
    """Return the numbers of the priced micro-batches among those of all stages."""
    firsts = itertools.accumulate([0, *(len(start.sample) for start in problem.starts[:-1])])
    return np.concatenate([part + first for part, first in zip(_priced(problem), firsts, strict=True)])


def _price(
    problem: Problem, assignments: Sequence[Assignment], request: PlanRequest, plan: Plan
) -> StagePrice:
    """Price a plan of all or of the priced micro-batches; moves are divided among the batches that they serve."""
    topology = problem.topology
    batches: Float[jax.Array, " L"] | float = 1.0
    if problem.planner.serves is not None and problem.compare_staying:
        whole = _whole_batch(problem, assignments, request)
        batches = problem.planner.serves(plan.home, whole, problem.state, topology)
    all_planned = len(plan.quota) == sum(len(each.sample) for each in assignments)
    sizes = None if all_planned else [len(part) for part in _priced(problem)]
    return price_stages(
        _in_stages(assignments, request.load, plan, sizes),
        problem.batch,
        topology,
        problem.prices,
        previous_home=problem.previous_home,
        batches=batches,
    )


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


def _merge(new: _Best, best: _Best, merged: _Merged, trial: Trial, tries: Array) -> _Merged:
    """Take the layers of a trial's plan that cost less than those of the plan that is merged so far."""
    begins = trial.begins & tries
    # Under the best assignment, with replicas, the trials begin with the best plan.
    from_best = begins & ~trial.first_assignment & ~trial.bare
    old = jnp.where(from_best, best.price.by_layer, jnp.where(begins, jnp.inf, merged.by_layer))
    old_choice = jax.tree.map(functools.partial(jnp.where, from_best), best.choice, merged.choice)
    wins = (new.price.by_layer < old) & ~trial.is_merged

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(wins.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    assert isinstance(new.choice, _Homes)
    assert isinstance(old_choice, _Homes)
    # All trials of a merged plan are alike in whether they have replicas.
    placement = jax.tree.map(pick, new.choice.placement, old_choice.placement)
    return _Merged(_Homes(placement, new.choice.bare), jnp.where(wins, new.price.by_layer, old))


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
    return jax.tree.map(functools.partial(jnp.where, begins), before, placement)


def _request(
    problem: Problem, assignments: Sequence[Assignment], numbers: Int[Array, " some"] | None = None
) -> PlanRequest:
    """Return all that the planner may look at: of all micro-batches, or of some of them, numbered in their order."""
    batch = problem.batch
    room = max(each.sample.shape[-1] for each in assignments)
    together = Assignment(jnp.concatenate([with_positions(each, room).sample for each in assignments]))
    routes, predicted = None, predicted_loads(batch, assignments)
    if batch.routes is not None:
        routes = _place_in_stages(batch.routes, assignments, problem.samples)
    if numbers is not None:
        if routes is not None:
            in_turn = jnp.arange(len(numbers), dtype=jnp.int32)
            place = jnp.full(len(together.sample), EMPTY, jnp.int32).at[numbers].set(in_turn)
            number = jnp.where(routes.micro_batch == EMPTY, EMPTY, place[routes.micro_batch])
            routes = routes._replace(micro_batch=number, rank=jnp.where(number == EMPTY, EMPTY, routes.rank))
        together = Assignment(together.sample[numbers])
        predicted = None if predicted is None else predicted[numbers]
    return PlanRequest(
        load=planned_load(batch.sample_load, together, problem.prices[0]),
        routes=routes,
        transitions=batch.transitions,
        price=_price_of_batch(problem.prices, problem.samples),
        tokens=tokens_of_ranks(together, batch.lengths),
        predicted=predicted,
    )


def _whole_batch(problem: Problem, assignments: Sequence[Assignment], request: PlanRequest) -> PlanRequest:
    """Return a request with all micro-batches of all stages as one, whose loads are in proportion to the true ones."""
    batch, nodes = problem.batch, problem.topology.num_nodes
    times = jnp.zeros((nodes, len(batch.lengths) + 1), jnp.float32)
    for each in assignments:
        sample = jnp.moveaxis(jnp.asarray(each.sample), 1, 0).reshape(nodes, -1)
        times = times.at[
            jnp.arange(nodes)[:, None], jnp.where(sample == EMPTY, len(batch.lengths), sample)
        ].add(1)
    load = batch.sample_load.astype(jnp.float32)
    by_node = jnp.einsum("nb,ble->lne", times[:, :-1], load, precision=jax.lax.Precision.HIGHEST)
    # The sum over a batch may exceed int32.
    by_node *= jnp.minimum(1.0, SUM_MOST / jnp.maximum(by_node.sum((1, 2)).max(), 1))
    return request._replace(load=by_node.round().astype(jnp.int32)[None, :, :, None], tokens=None)


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


def _in_stages(
    assignments: Sequence[Assignment], load: Array, plan: Plan, sizes: Sequence[int] | None = None
) -> tuple[BatchPlan, ...]:
    """Divide a plan and its load over the stages, all with the same homes.

    Args:
        assignments: the assignment of each stage.
        load: the load of the micro-batches of all stages.
        plan: their plan.
        sizes: the number of micro-batches of each stage. None for all of them.
    """
    sizes = [len(each.sample) for each in assignments] if sizes is None else sizes
    parts = [slice(end - size, end) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    return tuple(
        BatchPlan(each, load[part], Plan(plan.slot_expert[part], plan.home, plan.quota[part]))
        for each, part in zip(assignments, parts, strict=True)
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

    mean = jax.tree.map(lambda *costs: sum(map(operator.mul, costs, parts)), *prices)
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
