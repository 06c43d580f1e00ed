"""The sizes of the buffers that a batch's stages need.

A stage has a shape: its micro-batches, and the rows of each. Stages of one shape run one compiled step, so they share
buffer sizes, and stages of another shape have sizes of their own: a recompute in large micro-batches makes no buffer of
an update larger.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from relibra_jax.capacity import Capacities, count_capacities, grow_capacities, round_capacity
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.balancer_state import NOTHING
from relibra_jax.nnx.stage_plans import host_device
from relibra_jax.node_visits import node_visits
from relibra_jax.types import BatchPlan, RoutingReplay


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
    with jax.default_device(host_device()):
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
