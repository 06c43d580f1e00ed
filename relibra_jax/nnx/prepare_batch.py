"""Constructors of prepared batches, from a checked plan or for live routing."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Int

from relibra_jax.contract.types import EMPTY, Array, Assignment, BatchPlan, RoutingReplay
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer, prepare_layers
from relibra_jax.nnx.modelled_times import ModelledTimes
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.plan_batch import Stage, stage_samples
from relibra_jax.planning.rounds import shift_samples
from relibra_jax.routing.row_packing import RowLayout


def replayed_batch(
    batch_plan: BatchPlan,
    parallel: ExpertParallel,
    replay: RoutingReplay,
    *,
    assignment: Assignment,
    rows: RowLayout | None,
    seconds: tuple[float, float],
    visits: Int[np.ndarray, "M L P N"] | None,
    model_times: Callable[[], ModelledTimes] | None,
) -> PreparedBatch:
    """Prepare a batch that follows recorded routing; its layers are prepared on the devices.

    Args:
        batch_plan: the plan of the batch, on the mesh.
        parallel: the mesh, topology, buffer sizes and exchanges with which layers execute the plan.
        replay: the recorded routing, on the host.
        assignment: the sample assignment, on the host.
        rows: the layout of samples in rows. None puts one sample in a row.
        seconds: the seconds that planning and buffer sizing took, for all stages of the batch.
        visits: the number of tokens that each rank sends to each node. None on the flat path.
        model_times: a function that models the times of the stage. None if the batch was planned without a price.

    Raises:
        RuntimeError: if the devices find a layer invalid. This should not happen with a checked plan and counted
            buffers.
    """
    batch = functools.partial(
        PreparedBatch,
        *(batch_plan, parallel),
        assignment=assignment,
        num_samples=len(replay.mask),
        num_tokens=replay.mask.shape[1],
        rows=rows,
        seconds=seconds,
        visits=visits,
        model_times=model_times,
    )
    layers, valid = _prepare(*batch().to_ranks(tuple(replay)), batch_plan, parallel)
    invalid = np.argwhere(~np.asarray(valid))
    if len(invalid):
        raise RuntimeError(
            "micro-batch {}, layer {}: the checked plan is invalid on the devices".format(*invalid[0])
            + f" ({len(invalid)} invalid layers in all), with {parallel.capacities}"
        )
    return batch(layers=layers)


@functools.partial(jax.jit, static_argnames="parallel")
def _prepare(
    ids: Array, mask: Array, batch_plan: BatchPlan, parallel: ExpertParallel
) -> tuple[PreparedLayer, Bool[jax.Array, "M L"]]:
    """Return the prepared layers, and whether each of them is valid on all ranks of all copies of the group."""
    ids = jnp.where(mask[..., None, None], ids.astype(jnp.int32), EMPTY)
    layers = prepare_layers(ids, group_by_copy(batch_plan.layer_plans(), parallel.copies), parallel)
    assert layers.tokens is not None
    valid = jnp.asarray(layers.tokens.valid)
    if layers.fetch is not None:
        valid &= layers.fetch.fits
    replicated = NamedSharding(parallel.mesh, PartitionSpec())
    valid = valid.reshape(*valid.shape[:2], -1).all(-1)
    return layers, jax.lax.with_sharding_constraint(valid, replicated)


def group_by_copy(plans: Any, copies: tuple[int, ...]) -> Any:
    """Regroup arrays ``[copies x M, L, ...]`` over the micro-batches of all copies as ``[M, L, *copies, ...]``."""
    if not copies:
        return plans

    def regroup(leaf: jax.Array) -> jax.Array:
        leaf = jnp.asarray(leaf).reshape(math.prod(copies), -1, *leaf.shape[1:])
        leaf = jnp.moveaxis(leaf, 0, 2)
        return leaf.reshape(*leaf.shape[:2], *copies, *leaf.shape[3:])

    return jax.tree.map(regroup, plans)


def live_stages(
    parallel: ExpertParallel,
    *,
    num_samples: int | None,
    num_micro_batches: Sequence[int],
    samples: Sequence[range | None] | None,
) -> tuple[PreparedBatch, ...]:
    """Prepare stages for live routing: samples in order, experts at home, no replicas.

    Args:
        parallel: the mesh, topology without replica slots, buffer sizes and exchanges of the layers.
        num_samples: B, the number of samples in the batch.
        num_micro_batches: M of each stage in each copy of the group.
        samples: the samples of each stage, as `relibra_jax.planning.plan_stages.plan_stages` takes them.

    Raises:
        ValueError: if ``num_samples`` is None, or a stage has no micro-batch or fewer samples than micro-batches.
    """
    largest = max(num_micro_batches, default=0)
    if num_samples is None or num_samples < largest:
        raise ValueError(
            f"live routing (replay=None) needs num_samples of at least num_micro_batches={largest}, not {num_samples}"
        )
    samples = [None] * len(num_micro_batches) if samples is None else samples
    ranges = stage_samples(num_samples, list(map(Stage, num_micro_batches, samples)))
    copies = math.prod(parallel.copies)
    assignments = [
        assign_in_order(len(stage), parallel.topology, num_micro_batches=copies * number)
        for stage, number in zip(ranges, num_micro_batches, strict=True)
    ]
    return tuple(
        PreparedBatch(
            None, parallel, assignment=shift_samples(assignment, stage.start), num_samples=num_samples
        )
        for assignment, stage in zip(assignments, ranges, strict=True)
    )
