"""Plan the stages of a batch, such as a recompute and an update, together in one search."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Integer, PRNGKeyArray

from relibra_jax.contract.types import (
    Array,
    Assignment,
    BatchPlan,
    Planner,
    Price,
    RoutingReplay,
    Topology,
    Transitions,
)
from relibra_jax.planning.alternation import Assign, check_search, plan_alternating, shift_samples
from relibra_jax.planning.batch_counts import BatchCounts, check_counts, count_batch, widen_counts
from relibra_jax.planning.placement import Placement
from relibra_jax.planning.starts import start_assignment
from relibra_jax.planning.token_sample import Routes
from relibra_jax.support.limits import check_integer


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
    key: PRNGKeyArray | None = None,
    rounds: int = 4,
    cost: Sequence[Price] | None = None,
    warm_start: Placement | None = None,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch, each with its own micro-batches, over homes and residents that all stages share.

    Before an update there is a forward pass for the old log-probabilities (the recompute). It keeps no activations for
    a backward pass, so it may run in fewer and larger micro-batches, with its own assignment of samples. If a batch has
    several updates, each has its own samples, and no sample moves to another update. All stages are planned before the
    first one runs, as in ForeMoE (arXiv 2606.11867). Planning them in one search is our addition: the planner sees the
    micro-batches of all stages as additional entries of M. Works under jit.

    The search for homes weighs all stages equally, because planners receive loads without their purpose. Weighing an
    update three times as much as a recompute changed the modelled time of recorded routing by less than 0.5% either
    way, no more than a different seed does. Replicas and sample assignments are planned for each stage separately.

    Args:
        replay: the routing of all samples of the batch, which `relibra_jax.contract.replay.check_replay` accepts.
        planner: any planner.
        state: the planner's state, from its ``init`` or from the previous batch.
        topology: the expert-parallel group.
        num_micro_batches: the number of micro-batches of each stage, in the order in which the stages run, for example
            ``(4, 8)``.
        samples: the samples of each stage, as a range of consecutive samples of the batch. None as an entry means all
            samples: ``(None, range(0, 16), range(16, 32))`` is a recompute of 32 samples and two updates. By default
            every stage has all samples.
        starts: the assignment of each stage's samples for its first plan, with samples numbered as in the batch. None
            packs the samples by their lengths.
        assign: the function that assigns samples to the micro-batches and ranks of one stage, as in
            `relibra_jax.planning.plan_batch.plan_batch`. None keeps the first assignments.
        key: random key for ``assign``, consumed.
        rounds: the number of rounds of assignment and placement, as in `relibra_jax.planning.plan_batch.plan_batch`.
        cost: the unit times of each stage, made with the same arguments as its
            `relibra_jax.cost.batch_time.batch_time`: for example from
            `relibra_jax.cost.cost_model.CostModel.price` with ``updates=0, recompute=True`` for a recompute, and
            with ``updates=1, recompute=False`` for an update. Moves are counted once, and
            residents are pushed in all updates together.
        warm_start: the homes and residents from which the search starts, as in
            `relibra_jax.planning.plan_batch.plan_batch`.

    Returns:
        The batch plan of each stage, with samples numbered as in the batch, and the planner's state after this batch.
        All plans have the same homes and residents.

    Raises:
        ValueError: if there is no stage, if a number of micro-batches is below 1 or above the number of samples of its
            stage, if the samples of a stage are not consecutive samples of the batch, if ``samples``, ``starts`` or
            ``cost`` does not have one entry per stage, if ``cost`` mixes flat and hierarchical dispatch, if ``rounds``
            is negative, or if the planner or ``assign`` rejects its input.

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
        key=key,
        rounds=rounds,
        cost=cost,
        routes=counts.routes,
        transitions=counts.transitions,
        row_tokens=counts.row_tokens,
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
    key: PRNGKeyArray | None = None,
    rounds: int = 4,
    cost: Sequence[Price] | None = None,
    routes: Routes | None = None,
    transitions: Transitions | None = None,
    row_tokens: Float[Array, ""] | float | None = None,
    warm_start: Placement | None = None,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch from the token counts of each sample, for callers that have no routing replay.

    The plans equal those of `plan_stages` if the caller passes the ``routes`` and ``transitions`` that `plan_stages`
    computes from the replay. Works under jit.

    Args:
        sample_load: the number of token copies of each sample for each expert, as in
            `relibra_jax.planning.plan_batch.plan_loads`.
        tokens: the length of each sample in real tokens, in any integer dtype.
        planner: any planner.
        state: the planner's state, from its ``init`` or from the previous batch.
        topology: the expert-parallel group.
        num_micro_batches: the number of micro-batches of each stage, as in `plan_stages`.
        samples: the samples of each stage, as in `plan_stages`.
        starts: the assignment of each stage's samples for its first plan, as in `plan_stages`.
        assign: the function that assigns samples to the micro-batches and ranks of one stage, as in `plan_stages`.
        key: random key for ``assign``, as in `plan_stages`.
        rounds: the number of rounds of assignment and placement, as in `plan_stages`.
        cost: the unit times of each stage, as in `plan_stages`.
        routes: sampled tokens of the batch, as in `relibra_jax.planning.plan_batch.plan_loads`.
        transitions: transition counts of the batch, as in `relibra_jax.planning.plan_batch.plan_loads`.
        row_tokens: T, the length to which rows that hold one sample are padded. None takes the longest sample.
        warm_start: the homes and residents from which the search starts, as in `plan_stages`.

    Returns:
        The batch plan of each stage, and the planner's state after this batch, as `plan_stages` returns them.

    Raises:
        ValueError: if ``sample_load`` is not ``[B, L, E]`` with B the length of ``tokens`` and E the experts of the
            topology, or under the conditions of `plan_stages`.

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
    counts = widen_counts(BatchCounts(sample_load, tokens, routes, transitions, row_tokens), topology)
    ranges = stage_samples(len(tokens), len(num_micro_batches), samples)
    check_search(rounds, cost, warm_start, counts.sample_load.shape[1], topology)
    for stage, (stage_range, number) in enumerate(zip(ranges, num_micro_batches, strict=True)):
        check_integer(f"num_micro_batches[{stage}]", number, least=1, most=len(stage_range))
    _check_cost(len(ranges), cost)
    if starts is not None and len(starts) != len(ranges):
        raise ValueError(f"starts has {len(starts)} entries, but num_micro_batches has {len(ranges)} stages")
    if starts is None:
        starts = [
            shift_samples(
                start_assignment(
                    counts.tokens[stage_range.start : stage_range.stop],
                    topology,
                    num_micro_batches=number,
                    cost=None if cost is None else cost[stage],
                ),
                stage_range.start,
            )
            for stage, (stage_range, number) in enumerate(zip(ranges, num_micro_batches, strict=True))
        ]
    check_counts(counts, starts, topology)
    return plan_alternating(
        *(counts, planner, state, topology),
        starts=tuple(starts),
        samples=tuple(ranges),
        assign=assign,
        key=key,
        rounds=rounds,
        costs=None if cost is None else tuple(cost),
        warm_start=warm_start,
    )


def stage_samples(num_samples: int, num_stages: int, samples: Sequence[range | None] | None) -> list[range]:
    """Complete and check the ``samples`` argument of `plan_stages`.

    Args:
        num_samples: B, the number of samples in the batch.
        num_stages: the number of stages.
        samples: the samples of each stage. None means all samples of the batch, as an entry or as the whole argument.

    Returns:
        One range of samples per stage.

    Raises:
        ValueError: if there is no stage, if ``samples`` does not have one entry per stage, or if an entry is not a
            range of consecutive samples of the batch.

    >>> stage_samples(8, 3, (None, range(0, 4), range(4, 8)))
    [range(0, 8), range(0, 4), range(4, 8)]
    """
    if not num_stages:
        raise ValueError("num_micro_batches must have at least one entry, one for each stage")
    samples = [None] * num_stages if samples is None else samples
    if len(samples) != num_stages:
        raise ValueError(f"samples has {len(samples)} entries, but num_micro_batches has {num_stages} stages")
    stages = [range(num_samples) if stage_range is None else stage_range for stage_range in samples]
    for stage, stage_range in enumerate(stages):
        if stage_range.step != 1 or not 0 <= stage_range.start < stage_range.stop <= num_samples:
            raise ValueError(
                f"samples[{stage}]={stage_range} must be a range of consecutive samples among {num_samples}"
            )
    return stages


def _check_cost(stages: int, cost: Sequence[Price] | None) -> None:
    if cost is None:
        return
    if len(cost) != stages:
        raise ValueError(f"cost has {len(cost)} entries; it must have one for each of {stages} stages")
    kinds = [times.hierarchical for times in cost]
    if len(set(kinds)) > 1:
        raise ValueError(f"cost has hierarchical={kinds}, which must be the same in all stages")
