"""The problem of planning all stages of a batch together, and what a planner sees of it.

A stage runs all samples of the batch, or a range of them, in its own micro-batches. The planner sees the micro-batches
of all stages one after another along M, and its plan is divided over the stages again.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.contract.planner import PlacedRoutes, Placement, Planner, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan, Plan, Price, Topology
from relibra_jax.planning.assignment import Assign, with_positions
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_price import priced_micro_batches
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


def request_of(
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


def whole_batch(problem: Problem, assignments: Sequence[Assignment], request: PlanRequest) -> PlanRequest:
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


def in_stages(
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


def priced_by_stage(problem: Problem) -> list[Int[np.ndarray, " some"]]:
    """Return the numbers of the priced micro-batches of each stage."""
    pairs = zip(problem.starts, problem.prices, strict=True)
    return [priced_micro_batches(len(start.sample), price.data_parallel) for start, price in pairs]


def priced_numbers(problem: Problem) -> Int[np.ndarray, " some"]:
    """Return the numbers of the priced micro-batches among those of all stages."""
    firsts = itertools.accumulate([0, *(len(start.sample) for start in problem.starts[:-1])])
    return np.concatenate(
        [part + first for part, first in zip(priced_by_stage(problem), firsts, strict=True)]
    )


def samples_of(batch: Batch, samples: range) -> Batch:
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
