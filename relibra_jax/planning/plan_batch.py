"""The entry point of planning: `plan_batch` plans one batch, of one stage or of several.

It assigns the samples to micro-batches and ranks, and the experts to slots, in alternating rounds
(`relibra_jax.planning.rounds`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.planner import Placement, Planner
from relibra_jax.contract.replay import check_arrays, check_counted
from relibra_jax.contract.types import (
    BALANCE,
    EMPTY,
    Assignment,
    BatchPlan,
    Price,
    RoutingReplay,
    Topology,
    check_shape,
)
from relibra_jax.planning.assignment import Assign
from relibra_jax.planning.batch import (
    Batch,
    check_counts,
    check_routes,
    count_for_planner,
    may_be_positive,
    widen_counts,
)
from relibra_jax.planning.rounds import plan_rounds
from relibra_jax.planning.stage_requests import Problem, shift_samples
from relibra_jax.planning.starts import start_assignment
from relibra_jax.routing.striping import with_striped_load
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer, check_not_negative, check_positive
from relibra_jax.support.random_keys import is_key


@checks_arguments
@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a batch that runs in micro-batches of its own, such as a recompute or an update.

    Before an update there is a forward pass for the old log-probabilities (the recompute). It keeps no activations for
    a backward pass, so it may run in fewer and larger micro-batches, with its own assignment of samples. If a batch has
    several updates, each has its own samples, and no sample moves to another update.
    """

    num_micro_batches: int
    """M, the number of micro-batches. Those of data-parallel groups count as additional micro-batches."""
    samples: range | None = None
    """The samples of the stage, as a range of consecutive samples of the batch. None for all samples."""
    start: Assignment | None = None
    """The assignment of the stage's samples for the first plan, with samples numbered as in the batch, for example from
    `assign_in_order`, each once. None assigns them by lengths (`relibra_jax.planning.starts.start_assignment`)."""


@overload
def plan_batch(
    batch: RoutingReplay | Batch,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    stages: int,
    cost: Price | Sequence[Price] = ...,
    assign: Assign | None = ...,
    key: PRNGKeyArray | None = ...,
    rounds: int = ...,
    start: Placement | None = ...,
) -> tuple[BatchPlan, Any]: ...


@overload
def plan_batch(
    batch: RoutingReplay | Batch,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    stages: Sequence[Stage],
    cost: Price | Sequence[Price] = ...,
    assign: Assign | None = ...,
    key: PRNGKeyArray | None = ...,
    rounds: int = ...,
    start: Placement | None = ...,
) -> tuple[tuple[BatchPlan, ...], Any]: ...


@checks_arguments
def plan_batch(
    batch: RoutingReplay | Batch,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    stages: int | Sequence[Stage],
    cost: Price | Sequence[Price] = BALANCE,
    assign: Assign | None = None,
    key: PRNGKeyArray | None = None,
    rounds: int = 4,
    start: Placement | None = None,
) -> tuple[BatchPlan | tuple[BatchPlan, ...], Any]:
    """Plan a batch: assign samples to micro-batches and ranks, and experts to slots.

    Sample assignment depends on the homes of the experts, and placement depends on the ranks of the samples, so the two
    alternate. The first plan is for the samples as the stages start. Each of the ``rounds`` then assigns the samples
    for the homes of the last plan, and plans again for the resulting loads, starting from those homes. The plan with
    the lowest price of all rounds is returned. If moves, crossings or pushes cost something, and the planner can also
    leave experts at given homes, every layer then chooses between several homes (`relibra_jax.planning.portfolio`), so
    the plan never costs more than to leave experts where they are. The price of moves counts in part if they serve
    several batches (`relibra_jax.planning.horizon`). Works under jit.

    All stages share homes and residents, and are planned before the first one runs, as in ForeMoE (arXiv 2606.11867).
    Planning them in one search is our addition: the planner sees the micro-batches of all stages as additional entries
    of M. The search for homes weighs all stages equally. Weighing an update three times as much as a recompute changed
    the modelled time of recorded routing by less than 0.5% either way, no more than a different seed does.

    Args:
        batch: the routing of all samples of the batch, which `relibra_jax.contract.replay.check_replay` accepts, or the
            counts of its samples, for callers without a replay. Both give the same plan if the counts are those of
            `relibra_jax.planning.batch.count_batch`. Only the routing gives the exact load of striped layers; from
            counts it is an estimate, for `relibra_jax.routing.striping.with_striped_load` to replace.
        planner: any planner.
        state: the planner's state, from its ``init`` or from the previous batch.
        topology: the expert-parallel group.
        stages: M, the number of micro-batches of a batch that runs in one stage, or the stages in their order, for
            example ``(Stage(4), Stage(8, range(0, 16)), Stage(8, range(16, 32)))`` for a recompute of 32 samples and
            two updates.
        cost: the price, from `relibra_jax.cost.CostModel.price`, or one for each stage: with ``updates=0,
            recompute=True`` for a recompute, and ``updates=1, recompute=False`` for an update. Moves are counted once,
            and residents are pushed in all updates together. A striped price plans for striped layers
            (``ExpertParallel(striped=True)``). A price of split sequences assigns samples to nodes, and splits the load
            of a node evenly over its ranks, until `relibra_jax.routing.node_streams` lays out its tokens. The default
            pays for balance alone, and therefore places no residents.
        assign: the function that assigns samples to micro-batches and ranks, for example `assign_samples`. Pass the
            same object for every batch, or every batch compiles again. None keeps the first assignment.
        key: random key for ``assign``, consumed.
        rounds: the number of rounds of assignment and placement. Each round refines the result of the previous one, so
            many short rounds gain more than a few long ones. With three rounds instead of four, the modelled time of
            recorded loads is 0.2% to 0.5% longer.
        start: the homes and residents from which the search starts, taken from a plan for the samples that had finished
            earlier (`fill_unfinished`). The first round then assigns samples to them. With three quarters of the
            samples finished, two rounds came within 0.1% of the imbalance that four rounds reach without a start, in
            0.4 of the time (``python -m experiments.bench_warm_start`` on recorded loads).

    Returns:
        The batch plan, or one for each of several stages, with samples numbered as in the batch; and the planner's
        state after this batch.

    Raises:
        ValueError: if there is no stage, if a number of micro-batches is below 1 or above the number of samples of its
            stage, if the samples of a stage are not consecutive samples of the batch, if loads are predicted for a
            planner without ``uses_predictions``, if an assignment or ``start`` does not fit the topology, if an
            assignment does not have every sample once, if ``state`` is not the planner's, if ``cost`` does not have one
            entry per stage, has stages that differ in path, striping or the nodes of replicas, or has a negative price,
            if ``rounds`` is negative, if int32 cannot hold a count, if the replay has an expert that the topology has
            not, or a mask that is not of booleans, if routes do not belong to the counts
            (`relibra_jax.planning.batch.check_routes`), or if the planner or ``assign`` rejects its input.

    >>> import numpy as np
    >>> from relibra_jax import relibra
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> replay = RoutingReplay(np.zeros((4, 8, 3, 1), np.uint8), np.ones((4, 8), bool))
    >>> state = relibra().init(topology, 3, key=jax.random.key(0))
    >>> batch_plan, _ = plan_batch(replay, relibra(), state, topology, stages=2)
    >>> batch_plan.load.shape, batch_plan.plan.quota[0, 0].tolist()  # expert 0 is split over both ranks
    ((2, 3, 1, 2, 4), [[[8, 0, 0], [0, 0, 8]]])
    >>> (recompute, update), _ = plan_batch(replay, relibra(), state, topology, stages=[Stage(1), Stage(2)])
    >>> recompute.load.shape, update.load.shape, bool((recompute.plan.home == update.plan.home).all())
    ((1, 3, 1, 2, 4), (2, 3, 1, 2, 4), True)
    """
    is_known = not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(batch))
    if isinstance(batch, RoutingReplay) and is_known:
        batch = RoutingReplay(*check_arrays(batch))
    single = not isinstance(stages, Sequence)
    parts = stages if isinstance(stages, Sequence) else [Stage(stages)]
    num_samples = len(batch.mask if isinstance(batch, RoutingReplay) else batch.lengths)
    samples = stage_samples(num_samples, parts)
    prices = _check_prices(cost, len(parts))
    replay = batch if isinstance(batch, RoutingReplay) else None
    if isinstance(batch, RoutingReplay):
        batch = count_for_planner(batch, planner, topology, prices)
    if replay is not None and is_known:
        check_counted(replay, batch.sample_load, batch.lengths)
    batch = widen_counts(batch, topology)
    if batch.predicted_load is not None and not planner.uses_predictions:
        raise ValueError(
            "predicted_load is given, but the planner does not plan from predictions; use eplb() or lplb() with"
            " loads='true', or leave predicted_load out"
        )
    if replay is None:
        check_routes(batch)
    _check_state(state, planner, batch.sample_load.shape[1], topology)
    check_integer("rounds", rounds, least=0)
    if start is not None:
        _check_start(start, batch.sample_load.shape[1], topology)
    starts = tuple(
        first_assignment(part, batch, price, topology) for part, price in zip(parts, prices, strict=True)
    )
    check_counts(batch, starts, topology)
    plans, next_state = plan_rounds(
        Problem(
            batch=batch,
            planner=planner,
            state=state,
            topology=topology,
            starts=starts,
            samples=samples,
            prices=prices,
            assign=assign,
            key=key,
            rounds=0 if assign is None else rounds,
            start=start,
            # Staying saves transfers: where they are free, there is nothing to compare.
            compare_staying=any(
                map(may_be_positive, (time for p in prices for time in (p.visit(topology), p.move, p.push)))
            ),
        )
    )
    if replay is not None and prices[0].striped:
        plans = tuple(with_striped_load(plan, replay, topology) for plan in plans)
    return plans[0] if single else plans, next_state


def stage_samples(num_samples: int, stages: Sequence[Stage]) -> tuple[range, ...]:
    """Return the samples of each stage, and check the stages.

    Args:
        num_samples: B, the number of samples in the batch.
        stages: the stages of the batch.

    Returns:
        One range of samples per stage.

    Raises:
        ValueError: if there is no stage, if the samples of a stage are not consecutive samples of the batch, or if a
            number of micro-batches is below 1 or above the number of samples of the stage.

    >>> stage_samples(8, (Stage(1), Stage(2, range(0, 4)), Stage(2, range(4, 8))))
    (range(0, 8), range(0, 4), range(4, 8))
    """
    if not stages:
        raise ValueError("stages must have at least one entry")
    if not num_samples:
        raise ValueError("the batch has no samples")
    ranges = [range(num_samples) if stage.samples is None else stage.samples for stage in stages]
    for number, (samples, stage) in enumerate(zip(ranges, stages, strict=True)):
        if samples.step != 1 or not 0 <= samples.start < samples.stop <= num_samples:
            raise ValueError(
                f"stages[{number}]: samples={samples} must be a range of consecutive samples among {num_samples}"
            )
        check_integer(f"stages[{number}]: num_micro_batches", stage.num_micro_batches, least=1)
        if stage.num_micro_batches > len(samples):
            raise ValueError(
                f"stages[{number}]: {len(samples)} samples are fewer than its {stage.num_micro_batches} micro-batches,"
                " those of all data-parallel groups together"
            )
    return tuple(ranges)


def first_assignment(stage: Stage, batch: Batch, price: Price, topology: Topology) -> Assignment:
    """Return the assignment of a stage's samples from which the search for its plan starts.

    Args:
        stage: the stage.
        batch: the samples of the batch.
        price: the price of the stage, which says how sequences are laid out.
        topology: the expert-parallel group.

    Raises:
        ValueError: if the stage's own assignment does not fit the topology, or does not hold every sample of the stage
            once; traced values are not checked.
    """
    samples = range(len(batch.lengths)) if stage.samples is None else stage.samples
    if stage.start is None:
        assignment = start_assignment(
            batch.lengths[samples.start : samples.stop],
            topology,
            num_micro_batches=stage.num_micro_batches,
            price=price,
        )
        return shift_samples(assignment, samples.start)
    ranks = (stage.num_micro_batches, topology.num_nodes, topology.ranks_per_node)
    check_shape("micro-batches and ranks of start", stage.start.sample.shape[:3], ranks)
    if not isinstance(stage.start.sample, jax.core.Tracer):
        _check_each_once(np.asarray(stage.start.sample), samples)
    return stage.start


def _check_each_once(sample: np.ndarray, samples: range) -> None:
    placed = sample[sample != EMPTY]
    foreign = placed[(placed < samples.start) | (placed >= samples.stop)]
    if foreign.size:
        raise ValueError(
            f"start has sample {foreign[0]}, which is not among {samples.start} to {samples.stop - 1}"
        )
    times = np.bincount(placed - samples.start, minlength=len(samples))
    if (times != 1).any():
        wrong = int(np.argmax(times != 1))
        raise ValueError(
            f"start has sample {samples.start + wrong} {times[wrong]} times; it must have each once"
        )


def _check_prices(cost: Price | Sequence[Price], num_stages: int) -> tuple[Price, ...]:
    prices = (cost,) * num_stages if isinstance(cost, Price) else tuple(cost)
    if len(prices) != num_stages:
        raise ValueError(f"cost has {len(prices)} entries; it must have one for each of {num_stages} stages")
    for name in ("hierarchical", "striped", "across_nodes"):
        kinds = [getattr(price, name) for price in prices]
        if len(set(kinds)) > 1:
            raise ValueError(f"cost has {name}={kinds}, which must be the same in all stages")
    for price in prices:
        _check_price(price)
    return prices


def _check_price(price: Price) -> None:
    """Raise ValueError if a price is negative or not finite, or ``copy`` is 0; traced values are not checked."""
    for field in dataclasses.fields(price):
        value = getattr(price, field.name)
        if isinstance(value, jax.core.Tracer) or field.metadata.get("static"):
            continue
        check_not_negative(f"cost.{field.name}", float(value))
        if field.name == "copy":
            check_positive("cost.copy", float(value))


def _check_state(state: Any, planner: Planner, layers: int, topology: Topology) -> None:
    """Raise ValueError unless a state has the structure and shapes of the planner's own."""
    own = _own_state(planner, layers, topology)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (own, state)]
    if structures[0] != structures[1] or not jax.tree.all(
        # Random keys of the old style have another shape.
        jax.tree.map(lambda leaf, each: is_key(each) or np.shape(leaf) == each.shape, state, own)
    ):
        expected, found = jax.tree.map(np.shape, own), jax.tree.map(np.shape, state)
        raise ValueError(f"state must be that of the planner for {layers} layers, {expected}, found {found}")


@functools.lru_cache(maxsize=64)
def _own_state(planner: Planner, layers: int, topology: Topology) -> Any:
    return jax.eval_shape(lambda key: planner.init(topology, layers, key=key), jax.random.key(0))


def _check_start(start: Placement, layers: int, topology: Topology) -> None:
    """Raise ValueError unless homes and residents fit the topology; the values of traced homes are not checked."""
    ranks = (topology.num_nodes, topology.ranks_per_node)
    if not isinstance(start.home, jax.core.Tracer):
        check_homes(start.home, topology.num_experts, "start.home")
    check_shape("start.home", start.home.shape, (layers, topology.num_experts))
    check_shape("start.resident", start.resident.shape, (layers, *ranks, topology.resident_slots))
