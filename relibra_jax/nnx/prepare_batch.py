"""Batches that are ready to run, from a checked plan or for live routing."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Int

from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer, prepare_layers
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.plan_stages import stage_samples
from relibra_jax.planning.turns import shift_samples
from relibra_jax.row_packing import RowLayout
from relibra_jax.types import EMPTY, Array, Assignment, BatchPlan, RoutingReplay


def replayed_batch(
    batch_plan: BatchPlan,
    parallel: ExpertParallel,
    replay: RoutingReplay,
    *,
    assignment: Assignment,
    rows: RowLayout | None,
    seconds: tuple[float, float],
    visits: Int[np.ndarray, "M L P N"] | None,
) -> PreparedBatch:
    """A batch that follows recorded routing: its layers are prepared here, on the devices.

    Args:
        batch_plan: the plan of the batch, on the mesh.
        parallel: how plans are run.
        replay: the recorded routing, on the host.
        assignment: the assignment, on the host.
        rows: how samples lie in rows; None for a sample a row.
        seconds: how long all stages of the batch were planned, and their buffers counted.
        visits: how often tokens go to each node, where that was counted.

    Raises:
        RuntimeError: if a layer is not sound, which no checked plan and no counted buffers should lead to.
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
    )
    layers, sound = _prepare(*batch().to_ranks(tuple(replay)), batch_plan, parallel)
    wrong = np.argwhere(~np.asarray(sound))
    if len(wrong):
        raise RuntimeError(
            "micro-batch {}, layer {}: the plan that was checked does not hold on the devices".format(
                *wrong[0]
            )
            + f" ({len(wrong)} layers in all), with {parallel.capacities}"
        )
    return batch(layers=layers)


@functools.partial(jax.jit, static_argnames="parallel")
def _prepare(
    ids: Array, mask: Array, batch_plan: BatchPlan, parallel: ExpertParallel
) -> tuple[PreparedLayer, Bool[jax.Array, "M L"]]:
    """The layers, and whether each of them is sound on all ranks of all copies of the group."""
    ids = jnp.where(mask[..., None, None], ids.astype(jnp.int32), EMPTY)
    layers = prepare_layers(ids, by_copy(batch_plan.layer_plans(), parallel.copies), parallel)
    assert layers.tokens is not None
    sound = jnp.asarray(layers.tokens.sound)
    if layers.fetch is not None:
        sound &= layers.fetch.fits
    everywhere = NamedSharding(parallel.mesh, PartitionSpec())
    sound = sound.reshape(*sound.shape[:2], -1).all(-1)
    return layers, jax.lax.with_sharding_constraint(sound, everywhere)


def by_copy(plans: Any, copies: tuple[int, ...]) -> Any:
    """Arrays ``[M, L]`` with the micro-batches of all copies of the group as ``[M, L, *copies]``."""
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
    """Stages that are routed live: samples in order, experts where they are, no replicas.

    Args:
        parallel: how plans are run, without replica slots.
        num_samples: B.
        num_micro_batches: M of each stage in each copy of the group.
        samples: the samples of each stage, as `relibra_jax.planning.plan_stages.plan_stages` takes them.

    Raises:
        ValueError: if the number of samples is not given, or a stage has no micro-batch or not a sample for each.
    """
    most = max(num_micro_batches, default=0)
    if num_samples is None or num_samples < most:
        raise ValueError(
            f"prepare(replay=None) prepares live routing: give it num_samples of at least num_micro_batches={most}, not"
            f" {num_samples}"
        )
    own = stage_samples(num_samples, len(num_micro_batches), samples)
    copies = math.prod(parallel.copies)
    assignments = [
        assign_in_order(len(each), parallel.topology, num_micro_batches=copies * number)
        for each, number in zip(own, num_micro_batches, strict=True)
    ]
    return tuple(
        PreparedBatch(
            None, parallel, assignment=shift_samples(assignment, each.start), num_samples=num_samples
        )
        for assignment, each in zip(assignments, own, strict=True)
    )
