"""Functions that plan the stages of a batch, and check the plans, on the host.

The planning programs are compiled for the host because it has idle cores while the devices compute. A search can
therefore run during a rollout.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
from jaxtyping import Bool, Integer, PRNGKeyArray

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.planner import Placement, Planner
from relibra_jax.contract.types import BALANCE, Array, Assignment, BatchPlan, Price, RoutingReplay, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.execution.plan_agreement import check_same_plan
from relibra_jax.nnx.derived_cost import stage_times
from relibra_jax.planning.assignment import Assign
from relibra_jax.planning.batch import Batch, count_batch, fill_unfinished
from relibra_jax.planning.plan_batch import Stage, pays_for_crossings, plan_batch, stage_samples
from relibra_jax.planning.rounds import shift_samples
from relibra_jax.planning.starts import start_assignment

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
    stages: tuple[Stage, ...]
    """The stages, with the micro-batches of all data-parallel copies of the group."""
    assign: Assign | None
    """The function that assigns samples. None keeps the initial assignment."""
    prices: tuple[Price, ...]
    """The price of each stage."""


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
    number = len(num_micro_batches)
    samples = (None,) * number if samples is None else samples
    for name, values in (("updates", updates), ("samples", samples)):
        if values is not None and len(values) != number:
            raise ValueError(f"{name} has {len(values)} entries, but num_micro_batches has {number} stages")
    if cost is None:
        balance = dataclasses.replace(BALANCE, rows="packed" if pack_rows else "padded", data_parallel=copies)
        prices: tuple[Price, ...] = (balance,) * number
    else:
        if updates is None:
            updates = (1,) * number if number > 1 else (cost.updates,)
        prices = stage_times(cost, topology, updates)
    stages = tuple(Stage(copies * each, part) for each, part in zip(num_micro_batches, samples, strict=True))
    stage_samples(num_samples, stages)
    return Search(planner, topology, stages, assign, prices)


class Planned(NamedTuple):
    """The checked plans of a batch, on the host."""

    stages: tuple[BatchPlan, ...]
    """The batch plan of each stage."""
    state: Any
    """The planner's state after the batch."""
    counts: Batch
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
    counts = count_batch(
        replay,
        search.topology,
        with_routes=any(map(pays_for_crossings, search.prices)),
        with_transitions=search.planner.uses_transitions,
    )
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
    counts = fill_unfinished(Batch(sample_load, tokens), finished)
    (stage, *_), _ = jax.device_get(_plan(counts, state, key, None, search))
    return Placement(stage.plan.home, jax.device_get(resident_experts(stage.plan, search.topology)))


def start_of_stage(lengths: Integer[Array, " B"], search: Search, stage: int) -> Assignment:
    """Return the assignment of a stage's samples from which the search starts.

    Args:
        lengths: the number of tokens of each sample of the batch.
        search: the settings of the search.
        stage: the number of the stage.
    """
    own = stage_samples(len(lengths), search.stages)[stage]
    assignment = start_assignment(
        lengths[own.start : own.stop],
        search.topology,
        num_micro_batches=search.stages[stage].num_micro_batches,
        price=search.prices[stage],
    )
    return shift_samples(assignment, own.start)


def host_device() -> jax.Device:
    """Return the host's CPU device, or this process's first device if JAX runs without the CPU backend."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _plan(
    counts: Batch, state: Any, key: PRNGKeyArray, start: Placement | None, search: Search
) -> tuple[tuple[BatchPlan, ...], Any]:
    with jax.default_device(host_device()):
        return plan_batch(
            counts,
            search.planner,
            state,
            search.topology,
            stages=search.stages,
            cost=search.prices,
            assign=search.assign,
            key=key,
            rounds=ROUNDS if start is None else WARM_ROUNDS,
            start=start,
        )
