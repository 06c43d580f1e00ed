"""Functions that plan the stages of a batch, and check the plans, on the host.

The planning programs are compiled for the host because it has idle cores while the devices compute. A search can
therefore run during a rollout.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
from jaxtyping import Bool, Integer, PRNGKeyArray

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.types import Array, Assignment, BatchPlan, Planner, Price, RoutingReplay, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.execution.plan_agreement import check_same_plan
from relibra_jax.nnx.derived_cost import stage_times
from relibra_jax.planning.alternation import Assign, shift_samples
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.batch_counts import BatchCounts, count_batch
from relibra_jax.planning.placement import Placement
from relibra_jax.planning.plan_stages import plan_stage_loads, stage_samples
from relibra_jax.planning.starts import start_assignment
from relibra_jax.planning.unfinished import fill_unfinished

ROUNDS: Final = 4
"""Rounds of assignment and placement in a search without a warm start."""
WARM_ROUNDS: Final = 2
"""Rounds of assignment and placement in a search with a warm start.

Measured with recorded loads and a warm start from three quarters of the samples: two rounds reach the imbalance of the
full search within 0.1%, in 0.4 of its time; one round misses it by up to 0.3%
(``python -m experiments.bench_warm_start``).
"""


class Search(NamedTuple):
    """The settings of the search for a batch's plans."""

    planner: Planner
    topology: Topology
    num_micro_batches: tuple[int, ...]
    """M of each stage, including the micro-batches of all data-parallel copies of the group."""
    samples: tuple[range, ...]
    """The samples of each stage."""
    assign: Assign | None
    """The function that assigns samples. None keeps the initial assignment."""
    cost: tuple[Price, ...] | None
    """The unit times of each stage. None plans for balance."""
    in_order: bool
    """Whether the search starts from samples in their order. Otherwise it starts from the assignment of
    `relibra_jax.planning.starts.start_assignment`."""


def make_search(
    planner: Planner,
    topology: Topology,
    assign: Assign | None,
    cost: CostModel | None,
    *,
    num_samples: int,
    num_micro_batches: Sequence[int],
    copies: int,
    samples: Sequence[range | None] | None,
    updates: Sequence[int] | None,
    pack_rows: bool,
) -> Search:
    """Return the settings of the search for the plans of some stages.

    Args:
        planner: the planner.
        topology: the expert-parallel group.
        assign: the function that assigns samples. None keeps the initial assignment.
        cost: the cost model of what runs. None plans for balance.
        num_samples: B, the number of samples of the batch.
        num_micro_batches: M of each stage in each copy of the group.
        copies: the number of data-parallel copies of the group.
        samples: the samples of each stage, as `relibra_jax.planning.plan_stages.plan_stages` takes them.
        updates: the number of optimizer updates of each stage, 0 for a recompute. None takes 1 for each of several
            stages, and those of the cost model for a single stage.
        pack_rows: whether rows hold several samples.

    Raises:
        ValueError: if ``updates`` or ``samples`` does not have an entry for each stage.
    """
    stages = len(num_micro_batches)
    if updates is not None and len(updates) != stages:
        raise ValueError(f"updates has {len(updates)} entries, but num_micro_batches has {stages} stages")
    times = None
    if cost is not None:
        if updates is None:
            updates = (1,) * stages if stages > 1 else (cost.updates,)
        times = stage_times(cost, topology, updates)
    return Search(
        planner=planner,
        topology=topology,
        num_micro_batches=tuple(copies * number for number in num_micro_batches),
        samples=tuple(stage_samples(num_samples, stages, samples)),
        assign=assign,
        cost=times,
        in_order=cost is None and not pack_rows,
    )


class Planned(NamedTuple):
    """The checked plans of a batch, on the host."""

    stages: tuple[BatchPlan, ...]
    """The batch plan of each stage."""
    state: Any
    """The planner's state after the batch."""
    counts: BatchCounts
    """The counts from which the batch was planned."""


def plan_and_check(
    replay: RoutingReplay,
    state: Any,
    key: PRNGKeyArray,
    search: Search,
    *,
    across_nodes: bool,
    warm_start: Placement | None,
) -> Planned:
    """Plan the stages of a batch and check the plans.

    The plans are those of `relibra_jax.planning.plan_stages.plan_stages` with the same settings, bit for bit.

    Args:
        replay: the routing of all samples, on the host.
        state: the planner's state.
        key: random key of the sample assignment, consumed.
        search: the settings of the search.
        across_nodes: whether a replica may be on a different node than its expert's home.
        warm_start: the placement from which the search starts, as `plan_unfinished` returns it. None for no warm start.

    Returns:
        The plans, with the planner's state after the batch.

    Raises:
        ValueError: if a plan breaks a rule, processes computed different plans, or under the conditions of
            `relibra_jax.planning.plan_stages.plan_stages`.
    """
    host_inputs = jax.device_put((replay, state, key, warm_start), host_device())
    replay, state, key, warm_start = host_inputs
    counts = _count(replay, search.planner, search.topology, with_routes=search.cost is not None)
    counts = counts._replace(row_length=float(replay.mask.shape[1]))
    stages, next_state = _plan(counts, state, key, warm_start, search)
    stages = jax.device_get(stages)
    for stage in stages:
        check_plan(stage.plan, stage.load, search.topology, across_nodes=across_nodes)
    if jax.process_count() > 1:
        check_same_plan(stages)
    return Planned(stages, next_state, counts)


def plan_unfinished(
    sample_load: Integer[Array, "B L E"],
    tokens: Integer[Array, " B"],
    finished: Bool[Array, " B"],
    state: Any,
    key: PRNGKeyArray,
    search: Search,
) -> Placement:
    """Plan a batch whose rollout has not finished yet, and return its homes and residents.

    Args:
        sample_load: token copies of each finished sample for each expert, as
            `relibra_jax.planning.unfinished.fill_unfinished` takes them.
        tokens: the number of real tokens of each finished sample.
        finished: True for samples that have finished.
        state: the planner's state.
        key: random key of the sample assignment, consumed.
        search: the settings of the search.

    Returns:
        The homes and residents, on the host.
    """
    host_inputs = jax.device_put((sample_load, tokens, finished, state, key), host_device())
    sample_load, tokens, finished, state, key = host_inputs
    counts = BatchCounts(*fill_unfinished(sample_load, tokens, finished))
    (stage, *_), _ = jax.device_get(_plan(counts, state, key, None, search))
    return Placement(stage.plan.home, jax.device_get(resident_experts(stage.plan, search.topology)))


def start_of_stage(lengths: Integer[Array, " B"], search: Search, stage: int) -> Assignment:
    """Return the assignment of a stage's samples from which the search starts.

    Args:
        lengths: the number of tokens of each sample of the batch.
        search: the settings of the search.
        stage: the number of the stage.
    """
    samples, number = search.samples[stage], search.num_micro_batches[stage]
    if search.in_order:
        assignment = assign_in_order(len(samples), search.topology, num_micro_batches=number)
    else:
        cost = None if search.cost is None else search.cost[stage]
        own = lengths[samples.start : samples.stop]
        assignment = start_assignment(own, search.topology, num_micro_batches=number, cost=cost)
    return shift_samples(assignment, samples.start)


def host_device() -> jax.Device:
    """Return the host's CPU device, or this process's first device if JAX runs without the CPU backend."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


_count = jax.jit(count_batch, static_argnames=("planner", "topology", "with_routes"))


def _plan(
    counts: BatchCounts, state: Any, key: PRNGKeyArray, warm_start: Placement | None, search: Search
) -> tuple[tuple[BatchPlan, ...], Any]:
    with jax.default_device(host_device()):
        stages = range(len(search.num_micro_batches))
        return plan_stage_loads(
            *(counts.sample_load, counts.tokens, search.planner, state, search.topology),
            num_micro_batches=search.num_micro_batches,
            samples=search.samples,
            starts=[start_of_stage(counts.tokens, search, stage) for stage in stages]
            if search.in_order
            else None,
            assign=search.assign,
            key=key,
            rounds=ROUNDS if warm_start is None else WARM_ROUNDS,
            cost=search.cost,
            routes=counts.routes,
            transitions=counts.transitions,
            row_length=counts.row_length,
            warm_start=warm_start,
        )
