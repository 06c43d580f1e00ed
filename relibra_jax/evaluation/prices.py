"""Crossings between nodes of a planned batch, its modelled time, and the times of balanced runs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.plan import contiguous_homes, expert_totals
from relibra_jax.contract.types import Array, Price, Topology
from relibra_jax.cost.batch_time import BatchTime, balanced_time, batch_time
from relibra_jax.cost.traffic import busier_way, count_sent, count_traffic
from relibra_jax.evaluation.planned import PlannedBatch
from relibra_jax.planning.replication import without_replicas
from relibra_jax.routing.visits import node_visits


class Crossings(NamedTuple):
    """Crossings of the slow network per token at dispatch: tokens (hierarchical path) or token copies (flat path). On a
    single node, what ranks send to each other."""

    mean: float
    """The mean over all tokens of a batch."""
    busiest: float
    """What the busiest rank sends or receives, divided by the tokens of the mean rank; of the busiest node where the
    ranks of a node share a link. Over micro-batches it is the sum of maxima over the sum of means."""


def count_visits(batch: PlannedBatch, topology: Topology, cost: Price) -> Int[jax.Array, "M L P V"] | None:
    """Count the node visits of a batch's tokens with `node_visits`; return None on the flat path.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        cost: the price, of which only the path and the striping are used.
    """
    if not cost.hierarchical:
        return None
    return node_visits(batch.replay, batch.batch_plan, topology, striped=cost.striped)


def count_crossings(
    batch: PlannedBatch, topology: Topology, *, shared_link: bool, visits: Int[Array, "M L P V"] | None
) -> Crossings:
    """Count the crossings of the slow network per token of a batch, or on a single node the rows between ranks, without
    padding.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        shared_link: whether the ranks of a node share a link, so that the busiest node counts and not the busiest rank.
        visits: the node visits of its tokens, as `count_visits` returns them.
    """
    traffic = count_traffic(batch.batch_plan.layer_plans(), topology, visits=visits)
    several = topology.num_nodes > 1
    slow = np.stack(traffic[:2] if several else traffic[2:]).astype(float)
    if shared_link and several:
        slow = slow.mean(-1)[..., None]
    layers = batch.batch_plan.load.shape[1]
    tokens = max(float(np.asarray(batch.replay.mask).sum()) * layers, 1.0)
    busiest = topology.num_ranks * slow.max((0, 3, 4)).sum()
    sent = topology.num_ranks * slow[0].mean((2, 3)).sum()
    return Crossings(sent / tokens, busiest / tokens)


class Waits(NamedTuple):
    """The rows for which dispatch waits over those that it needs: 1 if lanes are level and nothing is padded."""

    between: float
    """Between nodes."""
    inside: float
    """Inside nodes."""


def count_waits(
    batch: PlannedBatch, topology: Topology, cost: Price, *, visits: Int[Array, "M L P V"] | None
) -> Waits:
    """Count the rows for which the exchanges of a batch wait as they run, over those of the busiest rank.

    Both are summed over layers and micro-batches, because each exchange ends with its slowest rank.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        cost: the price, with the kind of exchange.
        visits: the node visits of its tokens, as `count_visits` returns them.
    """
    plans = batch.batch_plan.layer_plans()
    sent = count_sent(plans, topology, cost, visits=visits)
    needed = busier_way(count_traffic(plans, topology, visits=visits), shared_link=cost.shared_link)
    waited = (np.asarray(rows, float).max((2, 3)).sum() for rows in (sent.between, sent.inside))
    most = (np.asarray(rows, float).max((2, 3)).sum() for rows in needed)
    return Waits(*(rows / busiest if busiest else 1.0 for rows, busiest in zip(waited, most, strict=True)))


def time_of_batch(
    batch: PlannedBatch, topology: Topology, cost: Price, *, visits: Int[Array, "M L P V"] | None
) -> BatchTime:
    """Model the time of a batch under its plan, with the reorder before it.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        cost: the price.
        visits: the node visits of its tokens, as `count_visits` returns them.
    """
    return batch_time(
        batch.batch_plan,
        batch.lengths,
        topology,
        cost,
        visits=visits,
        previous_home=batch.previous_home,
        sequence_length=batch.sequence_length,
    )


def time_of_balanced(
    batch: PlannedBatch, topology: Topology, cost: Price, *, local: bool = False
) -> BatchTime:
    """Model the time of the balanced run with as many tokens as a batch.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        cost: the price.
        local: whether as much crosses as with the batch's own samples at contiguous homes, evenly spread. Otherwise
            routing is uniform.
    """
    return balanced_time(
        batch.batch_plan.load,
        batch.lengths,
        topology,
        cost,
        visits=_contiguous_visits(batch, topology, cost) if local else None,
        sequence_length=batch.sequence_length,
        num_sequences=batch.batch_plan.assignment.sample.shape[-1],
    )


def _contiguous_visits(batch: PlannedBatch, topology: Topology, cost: Price) -> Int[jax.Array, "M L P V"]:
    """Count what each rank would send to each node at contiguous homes: tokens, or token copies on the flat path."""
    load = jnp.asarray(batch.batch_plan.load)
    if not cost.hierarchical:
        return load.reshape(*load.shape[:2], topology.num_ranks, topology.num_nodes, -1).sum(-1)
    home = contiguous_homes(topology, load.shape[1])
    plan = _without_replicas(expert_totals(load), jnp.asarray(home), topology)
    return node_visits(batch.replay, batch.batch_plan._replace(plan=plan), topology, striped=cost.striped)


_without_replicas = jax.jit(without_replicas)
