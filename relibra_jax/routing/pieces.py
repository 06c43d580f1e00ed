"""Pieces: parts of a rank's tokens, of which one travels while the experts of another run.

The token at position i of its sequence is in piece ``i mod pieces``, or ``i // G mod pieces`` if layers are striped
(`relibra_jax.routing.striping`). Every piece is therefore a like mixture of all tokens of a rank. All pieces have the
slots of the plan, and every slot computes about its share of each piece (`relibra_jax.routing.split.refit_quota`).
"""

import functools

import jax
import jax.numpy as jnp

from relibra_jax.contract.replay import assigned_load, sample_load
from relibra_jax.contract.types import BatchPlan, RoutingReplay, Topology
from relibra_jax.routing.split import refit_quota
from relibra_jax.routing.striping import striped_load


def split_plan(
    replay: RoutingReplay, batch_plan: BatchPlan, topology: Topology, *, pieces: int, striped: bool
) -> tuple[tuple[RoutingReplay, BatchPlan], ...]:
    """Split a batch and its plan into pieces, to count what each of them needs.

    Args:
        replay: the routing of the samples of the batch.
        batch_plan: the plan that was made for the replay.
        topology: the expert-parallel group.
        pieces: the number of pieces.
        striped: whether layers are striped.

    Returns:
        The replay of each piece, in which the other tokens are masked, and the plan of the piece with its load and
        quotas. The loads of all pieces add up to that of the plan, and their quotas to about its quotas.
    """
    if pieces == 1:
        return ((replay, batch_plan),)
    return _split_plan(replay, batch_plan, topology, pieces=pieces, striped=striped)


@functools.partial(jax.jit, static_argnames=("topology", "pieces", "striped"))
def _split_plan(
    replay: RoutingReplay, batch_plan: BatchPlan, topology: Topology, *, pieces: int, striped: bool
) -> tuple[tuple[RoutingReplay, BatchPlan], ...]:
    unit = topology.ranks_per_node if striped else 1
    piece_of_position = jnp.arange(replay.mask.shape[1]) // unit % pieces
    refit = jax.vmap(jax.vmap(functools.partial(refit_quota, topology=topology)))

    def of_piece(piece: int) -> tuple[RoutingReplay, BatchPlan]:
        part = RoutingReplay(replay.expert_ids, jnp.asarray(replay.mask) & (piece_of_position == piece))
        if striped:
            load = striped_load(part, batch_plan.assignment, topology)
        else:
            load = assigned_load(sample_load(part, num_experts=topology.num_experts), batch_plan.assignment)
        quota = refit(batch_plan.layer_plans(), load).quota
        return part, batch_plan._replace(load=load, plan=batch_plan.plan._replace(quota=quota))

    return tuple(map(of_piece, range(pieces)))
