"""From a batch's routing replay to the plans of its stages, such as a recompute and an update, by one search."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Integer

from relibra_jax.limits import check_integer
from relibra_jax.planning.batch_counts import BatchCounts, count_batch, widen_counts
from relibra_jax.planning.placement import Placement
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.planning.token_sample import Routes
from relibra_jax.planning.turns import Assign, plan_in_turns, shift_samples
from relibra_jax.types import (
    Array,
    Assignment,
    BatchPlan,
    Planner,
    RoutingReplay,
    Topology,
    Transitions,
    UnitTimes,
)


def plan_stages(
    replay: RoutingReplay,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    num_micro_batches: Sequence[int],
    samples: Sequence[range | None] | None = None,
    starts: Sequence[Assignment] | None = None,
    assign: Assign | None = None,
    rounds: int = 4,
    cost: Sequence[UnitTimes] | None = None,
    warm_start: Placement | None = None,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch, each in its own micro-batches, over homes and residents that they share.

    Before an update there is a forward pass for old log-probabilities. It keeps no activations for a backward pass, so
    it may run in fewer and larger micro-batches, and samples may be assigned for it anew. Where a batch has several
    updates, each has samples of its own, and none of them comes to another one. That all stages are planned before the
    first of them runs follows ForeMoE (arXiv 2606.11867); that one search plans them is ours: to the planner the
    micro-batches of all stages are further entries of M. Works under jit.

    The search for homes weighs all stages alike, as planners are told loads and not what they are for. Weighing an
    update three times as much as a recompute changed modelled time by less than 0.5% either way on recorded routing,
    which is what seeds do. Replicas, and where samples are, are planned for each stage alone.

    Args:
        replay: the routing of all samples of the batch, which `relibra_jax.replay.check_replay` accepts.
        planner: any planner.
        state: the planner's state, from its ``init`` or from the batch before.
        topology: the expert-parallel group.
        num_micro_batches: M of each stage, for example ``(4, 8)``, in the order in which they run. Each stage starts
            from samples packed by their lengths into so many micro-batches.
        samples: the samples of each stage, neighbours in the batch: ``(None, range(0, 16), range(16, 32))`` for a
            recompute of 32 samples, which None stands for, and two updates. All of them in all stages by default.
        starts: the assignment of each stage's samples that its first plan is for, numbered as in the batch; None packs
            them.
        assign: assigns samples to the micro-batches and ranks of one stage, as in
            `relibra_jax.planning.plan_batch.plan_batch`; None keeps samples packed.
        rounds: turns of assignment and placement, as in `relibra_jax.planning.plan_batch.plan_batch`.
        cost: the unit times of each stage, with the arguments of its `relibra_jax.cost.batch_time.batch_time`: for
            example `relibra_jax.cost.unit_times.unit_times` with ``updates=0, recompute=True`` for the first, and
            without them for the second. Moves are counted once, and residents are pushed in all updates together.
        warm_start: homes and residents that the search begins with, as in
            `relibra_jax.planning.plan_batch.plan_batch`.

    Returns:
        The batch plan of each stage, samples numbered as in the batch, all with the same homes and residents; and the
        planner's state after this batch.

    Raises:
        ValueError: if there is no stage, a number of micro-batches is below 1 or above the number of the stage's
            samples, these are no neighbours in the batch, ``samples``, ``starts`` or ``cost`` has not one entry a stage
            or ``cost`` mixes flat and hierarchical dispatch, ``rounds`` is negative, or as the planner and ``assign``
            say.

    >>> import jax, numpy as np
    >>> from relibra_jax import Topology, relibra
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> replay = RoutingReplay(np.zeros((4, 8, 3, 1), np.uint8), np.ones((4, 8), bool))
    >>> state = relibra().init(topology, 3, key=jax.random.key(0))
    >>> (recompute, update), state = plan_stages(replay, relibra(), state, topology, num_micro_batches=(1, 2))
    >>> recompute.load.shape, update.load.shape, bool((recompute.plan.home == update.plan.home).all())
    ((1, 3, 1, 2, 4), (2, 3, 1, 2, 4), True)
    """
    counts = count_batch(replay, planner, topology, with_routes=cost is not None)
    return plan_stage_loads(
        *(counts.sample_load, counts.tokens, planner, state, topology),
        num_micro_batches=num_micro_batches,
        samples=samples,
        starts=starts,
        assign=assign,
        rounds=rounds,
        cost=cost,
        routes=counts.routes,
        transitions=counts.transitions,
        warm_start=warm_start,
    )


def plan_stage_loads(
    sample_load: Integer[Array, "B L E"],
    tokens: Integer[Array, " B"],
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    num_micro_batches: Sequence[int],
    samples: Sequence[range | None] | None = None,
    starts: Sequence[Assignment] | None = None,
    assign: Assign | None = None,
    rounds: int = 4,
    cost: Sequence[UnitTimes] | None = None,
    routes: Routes | None = None,
    transitions: Transitions | None = None,
    warm_start: Placement | None = None,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch from the counts of each sample, for callers that have them without the replay.

    With the ``routes`` and ``transitions`` that `plan_stages` takes itself, the plans are the same. Works under jit.

    Args:
        sample_load: token copies of each sample for each expert, as in `relibra_jax.planning.plan_batch.plan_loads`.
        tokens: the length of each sample, in real tokens, of any integer dtype.
        planner: any planner.
        state: the planner's state, from its ``init`` or from the batch before.
        topology: the expert-parallel group.
        num_micro_batches: M of each stage, as in `plan_stages`; so are ``samples``, ``starts``, ``assign``, ``rounds``,
            ``cost`` and ``warm_start``.
        samples: the samples of each stage.
        starts: the assignment of each stage's samples that its first plan is for.
        assign: assigns samples to the micro-batches and ranks of one stage.
        rounds: turns of assignment and placement.
        cost: the unit times of each stage.
        routes: some tokens of the batch, as in `relibra_jax.planning.plan_batch.plan_loads`; so are ``transitions``.
        transitions: counts of the batch, for planners that take them.
        warm_start: homes and residents that the search begins with.

    Returns:
        The batch plan of each stage and the planner's state after this batch, as `plan_stages`.

    Raises:
        ValueError: if ``sample_load`` is not ``[B, L, E]`` of as many samples as ``tokens`` and the topology's experts,
            or as `plan_stages`.

    >>> import jax, numpy as np
    >>> from relibra_jax import Topology, relibra
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load, tokens = np.zeros((4, 3, 4), np.uint8), np.full(4, 8)
    >>> load[..., 0] = 8  # every token goes to expert 0
    >>> state = relibra().init(topology, 3, key=jax.random.key(0))
    >>> stages, _ = plan_stage_loads(load, tokens, relibra(), state, topology, num_micro_batches=(1, 2))
    >>> [stage.load.shape for stage in stages]
    [(1, 3, 1, 2, 4), (2, 3, 1, 2, 4)]
    """
    counts = widen_counts(BatchCounts(sample_load, tokens, routes, transitions), topology)
    own = stage_samples(len(tokens), len(num_micro_batches), samples)
    for stage, (each, number) in enumerate(zip(own, num_micro_batches, strict=True)):
        check_integer(f"num_micro_batches[{stage}]", number, least=1, most=len(each))
    _check_cost(len(own), cost)
    if starts is not None and len(starts) != len(own):
        raise ValueError(f"starts are of {len(starts)} stages, num_micro_batches of {len(own)}")
    if starts is None:
        starts = [
            shift_samples(
                pack_samples(counts.tokens[each.start : each.stop], topology, num_micro_batches=number),
                each.start,
            )
            for each, number in zip(own, num_micro_batches, strict=True)
        ]
    return plan_in_turns(
        *(counts, planner, state, topology),
        starts=starts,
        samples=own,
        assign=assign,
        rounds=rounds,
        costs=cost,
        warm_start=warm_start,
    )


def stage_samples(num_samples: int, num_stages: int, samples: Sequence[range | None] | None) -> list[range]:
    """The samples of each stage, for `plan_stages`.

    Args:
        num_samples: B.
        num_stages: the number of stages.
        samples: the samples of each stage; None, there or for all, for all samples of the batch.

    Raises:
        ValueError: if there is no stage, ``samples`` has not one entry a stage, or one is not of neighbours in the
            batch.

    >>> stage_samples(8, 3, (None, range(0, 4), range(4, 8)))
    [range(0, 8), range(0, 4), range(4, 8)]
    """
    if not num_stages:
        raise ValueError("num_micro_batches must be a sequence of one number a stage, not empty")
    samples = [None] * num_stages if samples is None else samples
    if len(samples) != num_stages:
        raise ValueError(f"samples are of {len(samples)} stages, num_micro_batches of {num_stages}")
    stages = [range(num_samples) if own is None else own for own in samples]
    for stage, own in enumerate(stages):
        if own.step != 1 or not 0 <= own.start < own.stop <= num_samples:
            raise ValueError(f"samples[{stage}]={own} must be neighbours among the {num_samples} samples")
    return stages


def _check_cost(stages: int, cost: Sequence[UnitTimes] | None) -> None:
    if cost is None:
        return
    if len(cost) != stages:
        raise ValueError(f"cost must be unit times of each of {stages} stages, not of {len(cost)}")
    kinds = [times.hierarchical for times in cost]
    if len(set(kinds)) > 1:
        raise ValueError(f"cost has hierarchical={kinds}: stages must agree on dispatch")
