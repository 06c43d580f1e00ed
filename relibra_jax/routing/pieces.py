"""Pieces: parts of a rank's tokens, of which one travels while the experts of another run.

The token at position i of its sequence is in piece ``i mod pieces``, or ``i // G mod pieces`` if layers are striped
(`relibra_jax.routing.striping`). Every piece is therefore a like mixture of all tokens of a rank. All pieces have the
slots of the plan, and every slot computes about its share of each piece (`relibra_jax.routing.split.split_quota`).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.replay import assigned_load, sample_load
from relibra_jax.contract.types import Array, Assignment, BatchPlan, RoutingReplay, Topology
from relibra_jax.routing.split import split_quota
from relibra_jax.routing.striping import striped_load


def split_plan(
    replay: RoutingReplay,
    batch_plan: BatchPlan,
    topology: Topology,
    *,
    pieces: int,
    striped: bool,
    total: Callable[[Array], Array] = lambda load: load,
) -> tuple[tuple[RoutingReplay, BatchPlan], ...]:
    """Split a batch and its plan into pieces, to count what each of them needs.

    Args:
        replay: the routing of the samples of the batch.
        batch_plan: the plan that was made for the replay.
        topology: the expert-parallel group.
        pieces: the number of pieces.
        striped: whether layers are striped.
        total: a function that adds up the loads of all processes, if ``replay`` has only the samples of this one.

    Returns:
        The replay of each piece, in which the other tokens are masked, and the plan of the piece with its load and
        quotas. Those of all pieces add up to the load and the quotas of the plan.
    """
    if pieces == 1:
        return ((replay, batch_plan),)
    unit = topology.ranks_per_node if striped else 1
    piece_of_position = np.arange(replay.mask.shape[1]) // unit % pieces
    parts = [
        replay._replace(mask=replay.mask & (piece_of_position == piece)[None]) for piece in range(pieces)
    ]
    loads = [total(dispatched_load(part, batch_plan.assignment, topology, striped=striped)) for part in parts]
    return tuple(zip(parts, _split_plan(batch_plan, tuple(loads), topology), strict=True))


@functools.partial(jax.jit, static_argnames="topology")
def _split_plan(
    batch_plan: BatchPlan, loads: tuple[Int[Array, "M L N G E"], ...], topology: Topology
) -> tuple[BatchPlan, ...]:
    split = jax.vmap(jax.vmap(functools.partial(split_quota, topology=topology)))
    layers = split(batch_plan.layer_plans(), jnp.stack(loads, 2))
    return tuple(
        batch_plan._replace(load=load, plan=batch_plan.plan._replace(quota=layer.quota))
        for load, layer in zip(loads, layers, strict=True)
    )


def dispatched_load(
    replay: RoutingReplay, assignment: Assignment, topology: Topology, *, striped: bool
) -> Int[jax.Array, "M L N G E"]:
    """Count the token copies that every rank dispatches to every expert, in layers that are striped or not.

    ``replay`` may have no samples, if all of a stage are with other processes.
    """
    if not len(replay.mask):
        micro_batches, layers = len(assignment.sample), replay.expert_ids.shape[2]
        ranks = (topology.num_nodes, topology.ranks_per_node)
        return jnp.zeros((micro_batches, layers, *ranks, topology.num_experts), jnp.int32)
    if striped:
        return striped_load(replay, assignment, topology)
    return assigned_load(sample_load(replay, num_experts=topology.num_experts), assignment)
