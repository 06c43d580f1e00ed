"""The sizes of the buffers that a batch's stages need.

The shape of a stage is its number of micro-batches and the number of rows in each. Stages of equal shape run the same
compiled step, so they share buffer sizes. Stages of different shapes have separate sizes, so that a recompute in large
micro-batches does not enlarge the buffers of an update.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import BatchPlan, RoutingReplay
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.balancer_state import NO_EXCHANGE
from relibra_jax.nnx.stage_plans import host_device
from relibra_jax.routing.sizes import Capacities, count_capacities, grow_capacities, with_spare_room
from relibra_jax.routing.visits import node_visits


def stage_shape(stage: BatchPlan, parallel: ExpertParallel) -> str:
    """Return the shape of a stage as text, such as ``4x64`` for 4 micro-batches of 64 rows.

    Micro-batches are counted in each copy of the group, and rows in all copies together.
    """
    micro_batches, *places = stage.assignment.sample.shape
    copies = math.prod(parallel.copies)
    return f"{micro_batches // copies}x{math.prod(places) * copies}"


def count_visits(
    replay: RoutingReplay, stage: BatchPlan, parallel: ExpertParallel
) -> Int[np.ndarray, "M L P N"] | None:
    """Count the tokens that each rank P sends to each node N, for hierarchical dispatch; None on the flat path."""
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
    """Grow the buffer sizes of earlier batches until they suffice for the stages of this one.

    Args:
        sizes: the buffer sizes of earlier batches, by stage shape.
        first: the initial buffer sizes of a new shape.
        stages: the plan of each stage.
        visits: the number of tokens that each rank sends to each node, for every stage, as `count_visits` returns it.
        parallel: the mesh, topology and exchanges with which layers execute the plans.

    Returns:
        The buffer sizes by stage shape.
    """
    sizes = dict(sizes)
    for stage, stage_visits in zip(stages, visits, strict=True):
        shape = stage_shape(stage, parallel)
        sizes[shape] = _grow(sizes.get(shape, first), stage, stage_visits, parallel)
    return sizes


def _grow(sizes: Capacities, stage: BatchPlan, visits: Any, parallel: ExpertParallel) -> Capacities:
    need = count_capacities(stage.layer_plans(), parallel.topology, visits=visits)
    if visits is None and sizes.node is not None:
        need = dataclasses.replace(need, node=NO_EXCHANGE)
    rows = grow_capacities(sizes, need, round_up=with_spare_room)
    # Experts are few and large, and padded exchanges send spare room too.
    experts = grow_capacities(sizes, need, round_up=lambda size: -(-size // 2) * 2)
    names = ("exports", "export_copies", "push")
    return dataclasses.replace(rows, **{name: getattr(experts, name) for name in names})
