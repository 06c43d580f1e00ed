"""The entry points for planning one batch: `plan_batch` from a routing replay, `plan_loads` from token counts.

Both assign the samples to micro-batches and ranks, and the experts to slots, in alternating rounds
(`relibra_jax.planning.alternation`). `relibra_jax.planning.plan_stages` plans several stages of a batch together.
"""

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
    check_shape,
)
from relibra_jax.planning.alternation import Assign, check_search, plan_alternating
from relibra_jax.planning.batch_counts import BatchCounts, check_counts, count_batch, widen_counts
from relibra_jax.planning.placement import Placement
from relibra_jax.planning.starts import start_assignment
from relibra_jax.planning.token_sample import Routes


def plan_batch(
    replay: RoutingReplay,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    num_micro_batches: int,
    start: Assignment | None = None,
    assign: Assign | None = None,
    key: PRNGKeyArray | None = None,
    rounds: int = 4,
    cost: Price | None = None,
    warm_start: Placement | None = None,
) -> tuple[BatchPlan, Any]:
    """Plan a batch from its routing replay: assign samples to micro-batches and ranks, and experts to slots.

    Sample assignment depends on the homes of the experts, and placement depends on the ranks of the samples, so the two
    alternate. The first plan is for the samples as ``start`` assigns them. Each of the ``rounds`` then assigns the
    samples for the homes of the last plan, and plans again for the resulting loads, starting from those homes. Works
    under jit.

    Args:
        replay: the routing of all samples of the batch, which `relibra_jax.contract.replay.check_replay` accepts.
        planner: any planner.
        state: the planner's state, from its ``init`` or from the previous batch.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches. The micro-batches of data-parallel copies of the group count
            as additional micro-batches.
        start: the sample assignment of the first plan, for example from `assign_in_order`. None assigns samples by
            their lengths (`relibra_jax.planning.starts.start_assignment`).
        assign: the function that assigns samples to micro-batches and ranks, for example `assign_samples`. Pass the
            same object for every batch, or every batch compiles again. None keeps the first assignment.
        key: random key for ``assign``, consumed.
        rounds: the number of rounds of assignment and placement. Each round refines the result of the previous one, so
            many short rounds gain more than a few long ones. With three rounds instead of four, the modelled time of
            recorded loads is 0.2% to 0.5% longer.
        cost: the unit times of the cluster and the model, from
            `relibra_jax.cost.cost_model.CostModel.price`. With them the search minimises time, and the cheapest
            plan of all rounds is returned; it never costs more than to leave the experts where they are. Without them
            the search minimises imbalance. Residents are chosen by time in either case.
        warm_start: the homes and residents from which the search starts, taken from a plan for the samples that had
            finished earlier (`relibra_jax.planning.unfinished.fill_unfinished`). The first round then assigns samples
            to them. With three quarters of the samples finished, two rounds came within 0.1% of the imbalance that four
            rounds reach without a warm start, in 0.4 of the time (``python -m experiments.bench_warm_start`` on
            recorded loads).

    Returns:
        The batch plan, and the planner's state after this batch.

    Raises:
        ValueError: if ``rounds`` is negative, if ``start`` has a different number of micro-batches or ranks, if
            ``warm_start`` has a different topology or number of layers, or if the planner, `pack_samples` or ``assign``
            rejects its input.

    >>> import jax, numpy as np
    >>> from relibra_jax import Topology, relibra
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> replay = RoutingReplay(np.zeros((4, 8, 3, 1), np.uint8), np.ones((4, 8), bool))
    >>> state = relibra().init(topology, 3, key=jax.random.key(0))
    >>> batch_plan, state = plan_batch(replay, relibra(), state, topology, num_micro_batches=2)
    >>> batch_plan.load.shape, batch_plan.plan.quota[0, 0].tolist()  # expert 0 is split over both ranks
    ((2, 3, 1, 2, 4), [[[8, 0, 0], [0, 0, 8]]])
    """
    counts = count_batch(replay, planner, topology, with_routes=cost is not None)
    return plan_loads(
        *(counts.sample_load, counts.tokens, planner, state, topology),
        num_micro_batches=num_micro_batches,
        start=start,
        assign=assign,
        key=key,
        rounds=rounds,
        cost=cost,
        routes=counts.routes,
        transitions=counts.transitions,
        row_tokens=counts.row_tokens,
        warm_start=warm_start,
    )


def plan_loads(
    sample_load: Integer[Array, "B L E"],
    tokens: Integer[Array, " B"],
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    num_micro_batches: int,
    start: Assignment | None = None,
    assign: Assign | None = None,
    key: PRNGKeyArray | None = None,
    rounds: int = 4,
    cost: Price | None = None,
    routes: Routes | None = None,
    transitions: Transitions | None = None,
    row_tokens: Float[Array, ""] | float | None = None,
    warm_start: Placement | None = None,
) -> tuple[BatchPlan, Any]:
    """Plan a batch from the token counts of each sample, for callers that have no routing replay.

    The plan equals that of `plan_batch` if the caller passes the ``routes`` and ``transitions`` that `plan_batch`
    computes from the replay. Works under jit.

    Args:
        sample_load: the number of token copies of each sample for each expert, in any integer dtype, from
            `relibra_jax.sample_counts` in rollout workers or from `relibra_jax.sample_load`.
        tokens: the length of each sample in real tokens, in any integer dtype.
        planner: any planner.
        state: the planner's state, from its ``init`` or from the previous batch.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches, as in `plan_batch`.
        start: the sample assignment of the first plan, as in `plan_batch`.
        assign: the function that assigns samples to micro-batches and ranks, as in `plan_batch`.
        key: random key for ``assign``, as in `plan_batch`.
        rounds: the number of rounds of assignment and placement, as in `plan_batch`.
        cost: the unit times of the cluster and the model, as in `plan_batch`.
        routes: sampled tokens of the batch, from `relibra_jax.planning.token_sample.sample_routes`; `plan_batch`
            samples them if ``cost`` is given or the topology has resident slots. Without them homes are searched for
            balance, and crossings are counted in token copies instead of tokens, for residents, for assigning samples
            and for the price by which the plan is chosen. On one node nothing crosses, so routes make no difference.
        transitions: transition counts of the batch, from `relibra_jax.planning.transitions.transitions_for`. None for
            planners that do not use them.
        row_tokens: T, the length to which rows that hold one sample are padded. None takes the longest sample.
        warm_start: the homes and residents from which the search starts, as in `plan_batch`.

    Returns:
        The batch plan, and the planner's state after this batch.

    Raises:
        ValueError: if ``sample_load`` is not ``[B, L, E]`` with B the length of ``tokens`` and E the experts of the
            topology, or under the conditions of `plan_batch`.

    >>> import jax, numpy as np
    >>> from relibra_jax import Topology, relibra
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load, tokens = np.zeros((4, 3, 4), np.uint8), np.full(4, 8)
    >>> load[..., 0] = 8  # every token goes to expert 0
    >>> state = relibra().init(topology, 3, key=jax.random.key(0))
    >>> batch_plan, state = plan_loads(load, tokens, relibra(), state, topology, num_micro_batches=2)
    >>> batch_plan.plan.quota[0, 0].tolist()
    [[[8, 0, 0], [0, 0, 8]]]
    """
    counts = widen_counts(BatchCounts(sample_load, tokens, routes, transitions, row_tokens), topology)
    check_search(rounds, None if cost is None else [cost], warm_start, counts.sample_load.shape[1], topology)
    if start is None:
        start = start_assignment(counts.tokens, topology, num_micro_batches=num_micro_batches, cost=cost)
    ranks = (num_micro_batches, topology.num_nodes, topology.ranks_per_node)
    check_shape("micro-batches and ranks of start", start.sample.shape[:3], ranks)
    check_counts(counts, (start,), topology)
    (batch_plan,), next_state = plan_alternating(
        *(counts, planner, state, topology),
        starts=(start,),
        samples=(range(len(tokens)),),
        assign=assign,
        key=key,
        rounds=rounds,
        costs=None if cost is None else (cost,),
        warm_start=warm_start,
    )
    return batch_plan, next_state
