"""Plans of a batch's stages, checked on the host, and the sizes of the buffers that they need.

A stage has a shape: its micro-batches, and the rows of each. Stages of one shape run one compiled step, so they share
buffer sizes, and stages of another shape have sizes of their own: a recompute in large micro-batches makes no buffer of
an update larger.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from relibra_jax.capacity import Capacities, count_capacities, grow_capacities, round_capacity
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_agreement import check_same_plan
from relibra_jax.nnx.balancer_state import NOTHING
from relibra_jax.node_visits import node_visits
from relibra_jax.plan_check import check_plan
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.plan_stages import plan_stages, stage_samples
from relibra_jax.planning.turns import Assign, shift_samples
from relibra_jax.types import BatchPlan, Planner, RoutingReplay, Topology


def plan_checked(
    replay: RoutingReplay,
    state: Any,
    key: PRNGKeyArray,
    parallel: ExpertParallel,
    *,
    planner: Planner,
    num_micro_batches: Sequence[int],
    samples: Sequence[range | None] | None,
    assign: Assign | None,
    by_length: bool,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch, and hold each plan to the rules.

    Args:
        replay: the routing of all samples, on the host.
        state: the planner's state.
        key: random key of the assignment, consumed.
        parallel: how plans are run; its data-parallel copies have further micro-batches.
        planner: any planner.
        num_micro_batches: M of each stage in each copy of the group.
        samples: the samples of each stage, as `relibra_jax.planning.plan_stages.plan_stages` takes them.
        assign: how samples are assigned, with a ``key``; None keeps them where they start.
        by_length: whether samples start packed by their lengths, as rows want that hold several; in order otherwise.

    Returns:
        The batch plan of each stage, on the host, and the planner's state after the batch.

    Raises:
        ValueError: if a plan breaks a rule, processes hold different ones, or as `plan_stages` says.
    """
    copies = math.prod(parallel.copies)
    stages, after = _plan(
        *(replay, state, key),
        planner=planner,
        topology=parallel.topology,
        num_micro_batches=tuple(copies * number for number in num_micro_batches),
        samples=tuple(stage_samples(len(replay.mask), len(num_micro_batches), samples)),
        assign=assign,
        by_length=by_length,
    )
    stages = jax.device_get(stages)
    for stage in stages:
        check_plan(stage.plan, stage.load, parallel.topology, across_nodes=parallel.across_nodes)
    if jax.process_count() > 1:
        check_same_plan(stages)
    return stages, after


@functools.partial(
    jax.jit, static_argnames=("planner", "topology", "num_micro_batches", "samples", "assign", "by_length")
)
def _plan(replay, state, key, *, planner, topology: Topology, num_micro_batches, samples, assign, by_length):
    """`plan_stages`, compiled once for equal settings, whoever asks."""
    # Rows are padded to one length, so ranks with more of them would compute more.
    starts = [
        shift_samples(assign_in_order(len(own), topology, num_micro_batches=number), own.start)
        for own, number in zip(samples, num_micro_batches, strict=True)
    ]
    return plan_stages(
        *(replay, planner, state, topology),
        num_micro_batches=num_micro_batches,
        samples=samples,
        starts=None if by_length else starts,
        assign=None if assign is None else functools.partial(assign, key=key),
    )


def stage_shape(stage: BatchPlan, parallel: ExpertParallel) -> str:
    """The micro-batches of a stage in each copy of the group, and the rows of each in all copies: ``4x64``."""
    micro_batches, *places = stage.assignment.sample.shape
    copies = math.prod(parallel.copies)
    return f"{micro_batches // copies}x{math.prod(places) * copies}"


def count_visits(
    replay: RoutingReplay, stage: BatchPlan, parallel: ExpertParallel
) -> Int[np.ndarray, "M L P N"] | None:
    """The tokens of each rank P that each node is sent, which hierarchical dispatch needs to know; else None."""
    if not parallel.is_hierarchical(replay.expert_ids.shape[-1]):
        return None
    return np.asarray(node_visits(replay, stage, parallel.topology))


def grow_sizes(
    sizes: Mapping[str, Capacities],
    first: Capacities,
    stages: Sequence[BatchPlan],
    visits: Sequence[Int[np.ndarray, "..."] | None],
    parallel: ExpertParallel,
) -> dict[str, Capacities]:
    """Buffer sizes by shape that serve the stages of the batches so far and of this one.

    Args:
        sizes: the sizes of the batches so far.
        first: the sizes that a new shape begins with.
        stages: the plan of each stage.
        visits: from `count_visits`, of each stage.
        parallel: how plans are run.
    """
    grown = dict(sizes)
    for stage, visited in zip(stages, visits, strict=True):
        shape = stage_shape(stage, parallel)
        grown[shape] = _grow(grown.get(shape, first), stage, visited, parallel)
    return grown


def _grow(have: Capacities, stage: BatchPlan, visits: Any, parallel: ExpertParallel) -> Capacities:
    need = count_capacities(stage.layer_plans(), parallel.topology, visits=visits)
    if visits is None and have.node is not None:
        need = dataclasses.replace(need, node=NOTHING)
    rows = grow_capacities(have, need, round_up=_with_spare_room)
    # Experts are few and large, and spare room for them would be sent.
    experts = grow_capacities(have, need, round_up=lambda size: -(-size // 2) * 2)
    names = ("exports", "export_copies", "push")
    return dataclasses.replace(rows, **{name: getattr(experts, name) for name in names})


def _with_spare_room(size: int) -> int:
    """A quarter more than what is needed, so that the next batches need no larger buffers and no other program."""
    return round_capacity(size * 5 // 4)
