"""The modelled time of a planned batch beside the times of balanced runs, and its crossings between nodes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.cli.planner_runs import PlannedBatch
from relibra_jax.contract.plan import contiguous_homes, expert_totals
from relibra_jax.contract.types import Array, Price, Topology
from relibra_jax.cost.batch_time import BatchTime, balanced_time, batch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.traffic import count_traffic
from relibra_jax.planning.replication import without_replicas
from relibra_jax.routing.exchange_rules import AUTO, choose_exchange
from relibra_jax.routing.visits import node_visits


class Crossings(NamedTuple):
    """Crossings of the slow network per token at dispatch: tokens (hierarchical path) or token copies (flat path)."""

    mean: float
    """The mean over all tokens of a batch."""
    busiest: float
    """What the busiest rank sends or receives, divided by the tokens of the mean rank; of the busiest node where the
    ranks of a node share a link. Over micro-batches it is the sum of maxima over the sum of means."""


class Prices(NamedTuple):
    """The modelled seconds of a batch, and of balanced runs with as many tokens."""

    parts: dict[str, float]
    """The parts of the batch's time, by their names in `relibra_jax.cost.batch_time.BatchTime`."""
    overlapped: float
    """The batch, if every exchange overlapped the compute of its layer."""
    as_needed: float
    """The batch, if exchanges sent only the rows that are needed."""
    balanced: float
    """The balanced run with uniform routing."""
    balanced_overlapped: float
    """The balanced run with uniform routing, if every exchange overlapped the compute of its layer."""
    local: float
    """The balanced run with as many crossings as the samples have at contiguous homes, evenly spread."""

    @property
    def total(self) -> float:
        """The seconds of the batch."""
        return sum(self.parts.values())


def with_fetch_of(cost_model: CostModel, topology: Topology, *, across_nodes: bool) -> CostModel:
    """Return the cost model with the exchange of replicas that runs by default for a planner.

    Args:
        cost_model: the cost model.
        topology: the expert-parallel group.
        across_nodes: whether the planner puts replicas on any node. They are then fetched from all ranks.
    """
    if not across_nodes or cost_model.fetch != AUTO:
        return cost_model
    fetch = choose_exchange(topology.num_ranks, crosses_nodes=topology.num_nodes > 1, on_gpu=True)
    return dataclasses.replace(cost_model, fetch=fetch)


def count_visits(batch: PlannedBatch, topology: Topology, cost: Price) -> Int[jax.Array, "M L P N"] | None:
    """Count the node visits of a batch's tokens with `node_visits`; return None on the flat path.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        cost: the price, of which only the path is used.
    """
    return node_visits(batch.replay, batch.batch_plan, topology) if cost.hierarchical else None


def count_crossings(
    batch: PlannedBatch, topology: Topology, cost: Price, *, visits: Int[Array, "M L P N"] | None
) -> Crossings:
    """Count the crossings of the slow network per token of a batch, without padding.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        cost: the price, of which only the kind of link is used.
        visits: the node visits of its tokens, as `count_visits` returns them.
    """
    traffic = _count_traffic(batch.batch_plan.layer_plans(), topology, visits=visits)
    slow = np.stack([traffic.slow_sent, traffic.slow_received]).astype(float)
    if cost.shared_link:
        slow = slow.mean(-1)[..., None]
    layers = batch.batch_plan.load.shape[1]
    tokens = max(float(np.asarray(batch.replay.mask).sum()) * layers, 1.0)
    busiest = topology.num_ranks * slow.max((0, 3, 4)).sum()
    sent = topology.num_ranks * slow[0].mean((2, 3)).sum()
    return Crossings(sent / tokens, busiest / tokens)


def time_of_batch(
    batch: PlannedBatch, topology: Topology, cost: Price, *, visits: Int[Array, "M L P N"] | None
) -> BatchTime:
    """Model the time of a batch under its plan, with the reorder before it.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        cost: the price.
        visits: the node visits of its tokens, as `count_visits` returns them.
    """
    lengths, row_length = sample_lengths(batch)
    return batch_time(
        *(batch.batch_plan, lengths, topology, cost),
        visits=visits,
        previous_home=batch.previous_home,
        row_length=row_length,
    )


def sample_lengths(batch: PlannedBatch) -> tuple[Int[jax.Array, " B"], float]:
    """Return the number of tokens of each sample, and the length to which rows of one sample are padded."""
    mask = jnp.asarray(batch.replay.mask)
    return mask.sum(1, dtype=jnp.int32), float(mask.shape[1])


def price_batch(
    batch: PlannedBatch, topology: Topology, cost_model: CostModel, *, visits: Int[Array, "M L P N"] | None
) -> Prices:
    """Model the time of a batch and of balanced runs.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
        cost_model: the cost model.
        visits: the node visits of its tokens, as `count_visits` returns them.
    """
    cost = cost_model.price(topology)
    needed = dataclasses.replace(cost_model, between="ragged", inside="ragged").price(topology)
    time = time_of_batch(batch, topology, cost, visits=visits)
    lengths, row_length = sample_lengths(batch)
    run = {"row_length": row_length, "rows": batch.batch_plan.assignment.sample.shape[-1]}
    load = batch.batch_plan.load
    uniform = balanced_time(load, lengths, topology, cost, **run)
    local = balanced_time(
        load, lengths, topology, cost, visits=_contiguous_visits(batch, topology, cost), **run
    )
    return Prices(
        {name: float(part) for name, part in time.parts().items()},
        overlapped=float(time.overlapped),
        as_needed=float(time_of_batch(batch, topology, needed, visits=visits).total),
        balanced=float(uniform.total),
        balanced_overlapped=float(uniform.overlapped),
        local=float(local.total),
    )


def mean_prices(prices: list[Prices]) -> Prices:
    """Average the prices of several batches."""
    return jax.tree.map(lambda *seconds: float(np.mean(seconds)), *prices)


def _contiguous_visits(batch: PlannedBatch, topology: Topology, cost: Price) -> Int[jax.Array, "M L P N"]:
    """Count what each rank would send to each node at contiguous homes: tokens, or token copies on the flat path."""
    load = jnp.asarray(batch.batch_plan.load)
    if not cost.hierarchical:
        return load.reshape(*load.shape[:2], topology.num_ranks, topology.num_nodes, -1).sum(-1)
    home = contiguous_homes(topology, load.shape[1])
    plan = _without_replicas(expert_totals(load), jnp.asarray(home), topology)
    return node_visits(batch.replay, batch.batch_plan._replace(plan=plan), topology)


_count_traffic = jax.jit(count_traffic)
_without_replicas = jax.jit(without_replicas)
