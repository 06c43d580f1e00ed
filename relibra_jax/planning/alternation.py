"""Alternate sample assignment and expert placement over the stages of a batch.

Placement plans homes for the current assignment of samples; assignment then moves the samples to suit the current
homes. A stage runs all samples of the batch, or a range of them, in its own micro-batches; all stages share homes and
residents. The planner sees the micro-batches of all stages concatenated along M, and its plan is split along M again.
``assign`` sees the samples of one stage as a batch, so it cannot move a sample to another stage.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.plan import contiguous_homes, expert_totals, resident_experts
from relibra_jax.contract.replay import assigned_load
from relibra_jax.contract.types import (
    EMPTY,
    Array,
    Assignment,
    BatchPlan,
    Plan,
    Planner,
    Price,
    TokenSample,
    Topology,
    check_shape,
)
from relibra_jax.planning.batch_counts import BatchCounts
from relibra_jax.planning.extra_args import accepted_arguments, with_extra_args
from relibra_jax.planning.placement import Placement
from relibra_jax.planning.plan_price import price_stages
from relibra_jax.planning.replication import without_replicas
from relibra_jax.planning.token_sample import Routes, place_routes
from relibra_jax.support.limits import check_integer, check_not_negative, check_positive

type Assign = Callable[..., Assignment]
"""``(sample_load[B L E], tokens[B], home[L E], topology, *, num_micro_batches) -> Assignment``. The
function also receives those of ``key``, ``samples_per_rank``, ``routes``, ``resident``, ``cost`` and ``refine`` that it
names as parameters and that are known, as `relibra_jax.planning.assignment.assign_samples` does. It must be hashable,
and the same object from batch to batch, or every batch compiles again."""


@functools.partial(jax.jit, static_argnames=("planner", "topology", "samples", "assign", "rounds"))
def plan_alternating(
    counts: BatchCounts,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    starts: Sequence[Assignment],
    samples: tuple[range, ...],
    assign: Assign | None,
    key: PRNGKeyArray | None,
    rounds: int,
    costs: Sequence[Price] | None,
    warm_start: Placement | None,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch together: make a first plan, then alternate assignment and placement.

    All entries to planning run this one compiled function, so that equal inputs give equal plans, bit for bit. With
    ``costs`` it returns the plan with the lowest price (`relibra_jax.planning.plan_price`) of all rounds. For a planner
    with ``replicate``, that plan also costs no more than to leave the experts at their homes, with or without replicas,
    to bring them to contiguous homes, or to do without residents, each under the first and under the best assignment.

    From the second batch on, the search for assignments begins at the homes of the batch before, which moves fewer
    experts at nearly equal balance (``python -m experiments.bench_warm_start``).

    Args:
        counts: the token counts of all samples, in int32.
        planner: any planner.
        state: the planner's state before the batch, from which every round plans.
        topology: the expert-parallel group.
        starts: the assignment of each stage's samples for the first plan.
        samples: the samples of each stage, as a range of consecutive samples of the batch.
        assign: the function that assigns the samples of one stage. None keeps the first assignments.
        key: random key for ``assign``. None if it takes none.
        rounds: the number of rounds of assignment and placement.
        costs: the unit times of each stage. None plans for balance, and returns the plan of the last round.
        warm_start: the homes and residents to which the first round assigns samples, instead of making a first plan
            for ``starts``.

    Returns:
        The batch plan of each stage, and the planner's state after the batch.
    """
    search = _Search(counts, planner, state, topology, starts, samples, assign, key, costs, warm_start)
    if assign is None:
        rounds = 0
    home = search.previous_home
    can_stay = costs is not None and planner.replicate is not None and home is not None
    if not rounds and not can_stay:
        return search.plan_round(tuple(starts), None if warm_start is None else warm_start.home)

    # One loop compiles placement, the assignment of each stage and the price only once.
    first = int(bool(rounds) and warm_start is not None)
    ways = 3 + bool(topology.resident_slots)  # of doing less, as `_Search.stay` has them
    stays = ways * (1 + bool(rounds)) if can_stay else 0
    starts = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), tuple(starts))
    stages, _ = jax.eval_shape(search.plan_round, starts, search.no_homes)
    blank = jax.tree.map(jnp.zeros_like, stages)
    placement = search.first_placement(blank)
    nothing = _Best(blank, state, jnp.float32(jnp.inf))

    def body(number, carry):
        best, latest_state, placement, assignments = carry
        staying = number > rounds

        def run_round(_):
            new = starts
            if rounds:
                new = jax.lax.cond(
                    number == 0, lambda *_: starts, search.assign_round, *placement, assignments
                )
            refine = search.refine_home(placement, number, rounds)
            return search.plan_round(new, refine)

        def stay(_):
            which = number - rounds - 1
            kept = jax.tree.map(
                lambda start, better: jnp.where(which < ways, start, better),
                starts,
                _assignments(best.stages),
            )
            return search.stay(kept, which % ways, best.stages[0].plan.home, latest_state)

        result = jax.lax.cond(staying, stay, run_round, None) if stays else run_round(None)
        seconds = search.price(result[0])
        better = (seconds < best.seconds) | (costs is None)
        best = jax.tree.map(functools.partial(jnp.where, better), _Best(result[0], result[1], seconds), best)
        next_placement = search.next_placement(result, number)
        keep = jax.tree.map(
            functools.partial(jnp.where, staying),
            (latest_state, placement, assignments),
            (result[1], next_placement, _assignments(result[0])),
        )
        return best, *keep

    carry = (nothing, state, placement, starts)
    best, *_ = jax.lax.fori_loop(first, rounds + 1 + stays, body, carry)
    return best.stages, best.state


class _Best(NamedTuple):
    """The cheapest plan so far."""

    stages: tuple[BatchPlan, ...]
    state: Any
    seconds: Float[jax.Array, ""]


def _assignments(stages: Sequence[BatchPlan]) -> tuple[Assignment, ...]:
    return tuple(stage.assignment for stage in stages)


@dataclasses.dataclass(frozen=True)
class _Search:
    """The inputs of `plan_alternating`, and the steps of its loop."""

    counts: BatchCounts
    planner: Planner
    state: Any
    topology: Topology
    starts: Sequence[Assignment]
    samples: tuple[range, ...]
    assign: Assign | None
    key: PRNGKeyArray | None
    costs: Sequence[Price] | None
    warm_start: Placement | None

    @property
    def previous_home(self) -> Int[jax.Array, "L E"] | None:
        """The homes before the batch, if the planner's state has them."""
        home = getattr(self.state, "home", None)
        return None if home is None else jnp.asarray(home, jnp.int32)

    @property
    def no_homes(self) -> Int[jax.Array, "L E"]:
        """Homes that are all EMPTY: a search that refines nothing."""
        shape = (self.counts.sample_load.shape[1], self.topology.num_experts)
        return jnp.full(shape, EMPTY, jnp.int32)

    def refine_home(self, placement: Placement, number: Array, rounds: int) -> Int[jax.Array, "L E"] | None:
        """Return the homes at which the search of a round begins; None for a search that no round follows."""
        if not rounds:
            return None if self.warm_start is None else self.warm_start.home
        return jnp.where(number == 0, self.no_homes, placement.home)

    def first_placement(self, blank: Sequence[BatchPlan]) -> Placement:
        """Return the homes and residents to which the first assignment of samples is made, if they are known."""
        if self.warm_start is not None:
            return jax.tree.map(jnp.asarray, self.warm_start)
        return Placement(self.no_homes, jnp.asarray(resident_experts(blank[0].plan, self.topology)))

    def next_placement(self, result: tuple[Sequence[BatchPlan], Any], number: Array) -> Placement:
        """Return the homes and residents for the next assignment: those of the plan, or of the batch before."""
        placement, home = _placement(result, self.topology), self.previous_home
        if home is None:
            return placement
        # Contiguous homes are those of a planner that has seen no batch.
        begins = (number == 0) & (home != contiguous_homes(self.topology, len(home))).any()
        no_residents = jnp.full_like(placement.resident, EMPTY)
        return Placement(
            jnp.where(begins, home, placement.home), jnp.where(begins, no_residents, placement.resident)
        )

    def plan_round(
        self, assignments: Sequence[Assignment], refine: Int[jax.Array, "L E"] | None
    ) -> tuple[tuple[BatchPlan, ...], Any]:
        """Plan all stages for their assignments with one call of the planner."""
        loads = [assigned_load(self.counts.sample_load, each) for each in assignments]
        extra = self._extra(assignments)
        if self.counts.transitions is not None:
            extra["transitions"] = self.counts.transitions
        if refine is not None:
            extra["refine"] = refine
        plan, next_state = with_extra_args(self.planner).update(
            _join(loads), self.state, self.topology, **extra
        )
        return self._stages(plan, assignments, loads), next_state

    def _extra(self, assignments: Sequence[Assignment]) -> dict[str, Any]:
        """Return the sampled tokens and the unit times of the batch, where they are known."""
        extra: dict[str, Any] = {}
        if self.counts.routes is not None:
            extra["tokens"] = _place_in_stages(self.counts.routes, assignments, self.samples)
        if self.costs is not None:
            extra["cost"] = _cost_of_batch(self.costs, self.samples)
        return extra

    def stay(
        self,
        assignments: Sequence[Assignment],
        which: Array,
        best_home: Int[jax.Array, "L E"],
        next_state: Any,
    ) -> tuple[tuple[BatchPlan, ...], Any]:
        """Plan without a search and without residents, in one of four ways.

        They are the previous homes with replicas (0) or without (1), contiguous homes (2), and the best homes (3).
        """
        assert self.planner.replicate is not None
        assert self.previous_home is not None
        loads = [assigned_load(self.counts.sample_load, each) for each in assignments]
        contiguous = jnp.asarray(contiguous_homes(self.topology, len(self.previous_home)), jnp.int32)
        homes = jnp.stack([self.previous_home, self.previous_home, contiguous, best_home])
        home = homes[which]
        load, replicate, extra = _join(loads), self.planner.replicate, self._extra(assignments)
        plan = jax.lax.cond(
            which == 1,
            lambda: without_replicas(expert_totals(load), home, self.topology),
            lambda: replicate(load, home, self.topology, **extra),
        )
        return self._stages(plan, assignments, loads), next_state._replace(home=plan.home)

    def _stages(
        self, plan: Plan, assignments: Sequence[Assignment], loads: Sequence[Array]
    ) -> tuple[BatchPlan, ...]:
        plans = _split_plan(plan, [len(part) for part in loads])
        return tuple(map(BatchPlan, assignments, loads, plans))

    def assign_round(
        self,
        home: Int[jax.Array, "L E"],
        resident: Int[jax.Array, "L N G B"],
        refine: Sequence[Assignment],
    ) -> tuple[Assignment, ...]:
        """Assign the samples of every stage for given homes and residents."""
        assert self.assign is not None
        assignments = []
        for stage, start in enumerate(self.starts):
            stage_range = self.samples[stage]
            micro_batches, *_, room = start.sample.shape
            routes, costs = self.counts.routes, self.costs
            extra = {
                "samples_per_rank": room,
                "resident": resident,
                "refine": shift_samples(refine[stage], -stage_range.start),
            }
            if self.key is not None:
                extra["key"] = self.key
            if routes is not None:
                extra["routes"] = _routes_of(routes, stage_range)
            if costs is not None:
                extra["cost"] = costs[stage]
            options = {"num_micro_batches": micro_batches, **accepted_arguments(self.assign, extra)}
            part = slice(stage_range.start, stage_range.stop)
            assignment = self.assign(
                *(self.counts.sample_load[part], self.counts.tokens[part], home, self.topology), **options
            )
            assignments.append(shift_samples(assignment, stage_range.start))
        return tuple(assignments)

    def price(self, stages: Sequence[BatchPlan]) -> Float[jax.Array, ""]:
        """Return the estimated price of plans; 0 if the search is for balance."""
        if self.costs is None:
            return jnp.zeros((), jnp.float32)
        return price_stages(stages, self.counts, self.topology, self.costs, previous_home=self.previous_home)


def _join(loads: Sequence[Array]) -> jax.Array:
    return jnp.asarray(loads[0]) if len(loads) == 1 else jnp.concatenate(loads)


def _placement(result: tuple[Sequence[BatchPlan], Any], topology: Topology) -> Placement:
    """Return the homes and residents that all stages share."""
    plan = result[0][0].plan
    return Placement(jnp.asarray(plan.home), jnp.asarray(resident_experts(plan, topology)))


def check_search(
    rounds: int,
    costs: Sequence[Price] | None,
    warm_start: Placement | None,
    layers: int,
    topology: Topology,
) -> None:
    """Raise ValueError unless the settings of `plan_alternating` are valid; traced values are not checked.

    Args:
        rounds: the number of rounds, at least 0.
        costs: the unit times of each stage, which must not be negative; ``copy`` must be positive.
        warm_start: homes and residents that must fit the topology.
        layers: L, the number of layers of the batch.
        topology: the expert-parallel group.
    """
    check_integer("rounds", rounds, least=0)
    if warm_start is not None:
        _check_warm_start(warm_start, layers, topology)
    for times in costs or ():
        _check_unit_times(times)


def _check_warm_start(warm_start: Placement, layers: int, topology: Topology) -> None:
    ranks = (topology.num_nodes, topology.ranks_per_node)
    if not isinstance(warm_start.home, jax.core.Tracer):
        check_homes(warm_start.home, topology.num_experts, "warm_start.home")
    check_shape("warm_start.home", warm_start.home.shape, (layers, topology.num_experts))
    check_shape("warm_start.resident", warm_start.resident.shape, (layers, *ranks, topology.resident_slots))


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


def _check_unit_times(cost: Price) -> None:
    """Raise ValueError if a unit time is negative or not finite, or ``copy`` is 0; traced values are not checked."""
    for field in dataclasses.fields(cost):
        value = getattr(cost, field.name)
        if isinstance(value, jax.core.Tracer) or field.metadata.get("static"):
            continue
        check_not_negative(f"cost.{field.name}", float(value))
        if field.name == "copy":
            check_positive("cost.copy", float(value))


def _cost_of_batch(costs: Sequence[Price], samples: Sequence[range]) -> Price:
    """Average the unit times over the samples of all stages; the push times add up, as residents serve all stages."""
    total = sum(map(len, samples))
    parts = [len(stage_range) / total for stage_range in samples]
    mean = jax.tree.map(lambda *times: sum(map(operator.mul, times, parts)), *costs)
    pushes = {name: sum(getattr(cost, name) for cost in costs) for name in ("push", "push_inside")}
    return dataclasses.replace(mean, **pushes)


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
