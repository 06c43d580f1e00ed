"""The modelled time of a batch under a plan, in seconds, and the times of balanced runs to which plans are compared.

    layers   attention, compute, exchange, gathers and exposed transfers of all layers and micro-batches
             (`relibra_jax.cost.step_time`), for the slowest data-parallel group
    push     transfers of residents: weights before each optimizer update, gradients after it; no computation hides them
    reorder  transfers of experts with their optimizer state to new homes, once, if the previous homes are given
    rest     output head, sum of dense gradients, optimizer step: the same for all plans

A stage with a plan of its own over the same homes and residents, such as a recompute in larger micro-batches, takes a
call of its own, with the price of its passes. The time of the batch is the sum of the calls, of which only one
gets ``previous_home``.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from relibra_jax.contract.types import Array, BatchPlan, Price, Topology, check_shape
from relibra_jax.cost.copies import keep_time, push_time, reorder_time
from relibra_jax.cost.step_time import (
    LayerTime,
    attention_time,
    exposed_exchange,
    kind_between,
    layer_time,
    rank_time,
)
from relibra_jax.routing.exchange_rules import IN_LANES
from relibra_jax.support.argument_types import checks_arguments


class BatchTime(NamedTuple):
    """The modelled time of a batch in seconds: eight parts that add up to `total`, and ``hideable``."""

    attention: Float[Array, "*stack"]
    """Attention, projections and shared experts."""
    compute: Float[Array, "*stack"]
    """The routed experts."""
    exchange: Float[Array, "*stack"]
    """Dispatch and combine."""
    gather: Float[Array, "*stack"]
    """Gathers and sums of rows in dispatch and combine."""
    exposed: Float[Array, "*stack"]
    """The transfers of replicas that attention does not hide, and the waits of ranks for each other there."""
    push: Float[Array, "*stack"]
    """The transfers of residents' weights and gradients, and of experts to host memory, in all updates."""
    reorder: Float[Array, "*stack"]
    """The transfers of experts that change home before the batch."""
    rest: Float[Array, "*stack"]
    """The output head, the sum of dense gradients and the optimizer step."""
    hideable: Float[Array, "*stack"]
    """Not a part: the time that would be saved if every exchange overlapped the compute of its layer."""

    @property
    def total(self) -> Float[Array, "*stack"]:
        """The seconds of the whole batch."""
        return (
            self.attention
            + self.compute
            + self.exchange
            + self.gather
            + self.exposed
            + self.push
            + self.reorder
            + self.rest
        )

    @property
    def overlapped(self) -> Float[Array, "*stack"]:
        """The seconds of the batch if every layer took the larger of its exchange and its compute. Nothing runs so."""
        return self.total - self.hideable

    def parts(self) -> dict[str, Float[Array, "*stack"]]:
        """Return the parts that add up to the total, by name."""
        return {name: value for name, value in self._asdict().items() if name != "hideable"}


PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attention": "attention, projections, shared experts",
        "compute": "routed experts",
        "exchange": "exchange of tokens",
        "gather": "reading and writing exchange buffers",
        "exposed": "replicas, where nothing hides them",
        "push": "residents",
        "reorder": "moves of experts to new homes",
        "rest": "output head, dense gradients, optimizer",
    }
)
"""The names of the parts of a `BatchTime` in tables and figures."""


@checks_arguments
@functools.partial(jax.jit, static_argnames="topology")
def batch_time(
    batch_plan: BatchPlan,
    lengths: Int[Array, " B"],
    topology: Topology,
    cost: Price,
    *,
    visits: Num[Array, "M L P V"] | None = None,
    previous_home: Int[Array, "L E"] | None = None,
    sequence_length: Float[Array, ""] | float | None = None,
    pairs: Num[Array, "M L N G N G"] | None = None,
) -> BatchTime:
    """Model the time of a batch under its plan. The function is compiled, and works under jit and vmap as well.

    Args:
        batch_plan: the plan and its load. With data parallelism, axis M has all micro-batches of the first copy, then
            those of the second, and so on.
        lengths: the number of tokens of each sample of the batch.
        topology: the expert-parallel group.
        cost: the price, from `relibra_jax.cost.cost_model.CostModel.price`, with the number of data-parallel
            groups, which must divide M.
        visits: the counts of `relibra_jax.routing.visits.node_visits` for hierarchical dispatch, where a token crosses
            to a node once. None for flat dispatch, where each of its copies crosses.
        previous_home: flat home slot of each expert before the batch. None counts no reorder.
        sequence_length: T, the number of positions of a padded sequence, as in
            `relibra_jax.cost.step_time.attention_time`.
        pairs: an estimate of the token copies that each rank sends to each rank. None counts them.

    Raises:
        ValueError: if shapes do not fit the topology or each other, ``visits`` does not fit the path, or M does not
            divide over the copies.
    """
    loads, slots = batch_plan.load.shape, batch_plan.plan.slot_expert.shape
    grid = (topology.num_nodes, topology.ranks_per_node)
    check_shape("load", loads, (*loads[:2], *grid, topology.num_experts))
    check_shape("slot_expert", slots, (*loads[:2], *grid, topology.slots))
    if previous_home is not None:
        check_shape("previous_home", previous_home.shape, batch_plan.plan.home.shape)
    attention, positions = attention_time(
        batch_plan.assignment, lengths, cost, sequence_length=sequence_length
    )
    ranks = rank_time(batch_plan.layer_plans(), attention, topology, cost, visits=visits, pairs=pairs)
    push = push_time(batch_plan.plan, topology, cost)
    push = push + keep_time(batch_plan.layer_plans(), topology, cost)
    reorder = jnp.zeros(())
    if previous_home is not None:
        reorder = reorder_time(batch_plan.plan.home, previous_home, topology, cost)
    rest = rest_time(positions, cost, micro_batches=loads[0], num_layers=loads[1])
    return _slowest_copy(layer_time(ranks, cost), cost.data_parallel, push, reorder, rest)


def rest_time(
    positions: Float[Array, ""] | float, cost: Price, *, micro_batches: int, num_layers: int
) -> Float[jax.Array, ""]:
    """Model the seconds of a batch that do not depend on its plan: output head, sum of dense gradients, optimizer step.

    Args:
        positions: the token positions of a rank in a micro-batch.
        cost: the price.
        micro_batches: M, the number of micro-batches of all data-parallel groups.
        num_layers: L, the number of MoE layers.
    """
    return jnp.asarray(
        num_layers * (cost.head * positions * micro_batches / cost.data_parallel + cost.update)
    )


@checks_arguments
@functools.partial(jax.jit, static_argnames=("topology", "num_sequences"))
def balanced_time(
    load: Int[Array, "M L N G E"],
    lengths: Int[Array, " B"],
    topology: Topology,
    cost: Price,
    *,
    visits: Num[Array, "M L P V"] | None = None,
    sequence_length: Float[Array, ""] | float | None = None,
    num_sequences: int | None = None,
) -> BatchTime:
    """Model the time of a balanced run, which no real plan has: all ranks have equally much of everything.

    All lanes of the exchange are even, so nothing is padded, but hops and pieces run as in `batch_time`. There are no
    replicas, no residents and no reorder. Padded sequences are as long as in `batch_time`.

    Args:
        load: token copies. Only the sum of each layer and micro-batch is used.
        lengths: the number of tokens of each sample of the batch.
        topology: the expert-parallel group.
        cost: the price.
        visits: node visits of the same samples. The balanced run then has as many crossings as they have on average,
            evenly spread. None takes routing that is uniform over the experts, as in ReLibra's evaluation.
        sequence_length: T, the number of positions of a padded sequence, as in `batch_time`.
        num_sequences: b, the number of sequences of a rank in a micro-batch, if sequences are padded.

    Raises:
        ValueError: if M does not divide over the copies, or sequences are padded and ``num_sequences`` is None.
    """
    if cost.hierarchical:  # a token is sent to a node once, or to a rank
        cost, topology = dataclasses.replace(cost, crossing=cost.visit(topology)), topology.visited
    nodes, local, ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks
    lengths = jnp.asarray(lengths, jnp.float32)
    copies = jnp.asarray(load, jnp.float32).sum((-3, -2, -1)) / ranks  # [M L]
    top_k = copies[:, 0].sum() * ranks / jnp.maximum(lengths.sum(), 1)
    micro_batches, layers = copies.shape
    bins = micro_batches * ranks
    if cost.sequences == "padded":
        if num_sequences is None:
            raise ValueError("num_sequences must be given if sequences are padded")
        length = jnp.float32(lengths.max() if sequence_length is None else sequence_length)
        positions, squares = num_sequences * length, num_sequences * length**2
    else:
        positions, squares = lengths.sum() / bins, (lengths**2).sum() / bins
    tokens = copies / top_k
    if visits is not None:
        stays = np.repeat(np.eye(nodes, dtype=bool), local, 0)[None, None]
        away = jnp.where(stays, 0.0, jnp.asarray(visits, jnp.float32)).sum((2, 3)) / ranks
        arrived = jnp.asarray(visits, jnp.float32).sum((2, 3)) / ranks
    elif cost.hierarchical:
        away = tokens * _uniform_visits(topology, top_k)
        arrived = away * nodes / (nodes - 1) if nodes > 1 else tokens
    else:
        away = copies * (1 - 1 / nodes)
    if cost.hierarchical:
        near = copies * (1 - 1 / local)
        gathered = 2 * arrived + 1.5 * copies
        wait = cost.pieces * cost.wait
        between, inside = cost.crossing * away + wait * (nodes > 1), cost.spread * near + wait * (local > 1)
    else:
        near = copies * (local - 1) / ranks
        gathered = 1.5 * copies
        between = jnp.maximum(cost.crossing * away, cost.spread * near) + cost.pieces * cost.wait * (
            ranks > 1
        )
        inside = jnp.zeros_like(between)
    # Where there are lanes, rows are packed once more on their way back; but not where the next exchange is ragged, nor
    # where there is none.
    if cost.hierarchical and (cost.exchange == "ragged" or local == 1):
        gathered = arrived + away + 1.5 * copies
    elif cost.hierarchical:
        gathered = gathered + 2 * (
            away * (kind_between(cost) in IN_LANES) + near * (cost.exchange in IN_LANES)
        )
    elif cost.exchange in IN_LANES:
        gathered = gathered + 2 * (copies - copies / ranks)
    compute = cost.copy * copies
    exchange = exposed_exchange(between, inside, compute, cost)
    times = LayerTime(
        attention=jnp.full(copies.shape, cost.token * positions + cost.pair * squares, jnp.float32),
        compute=compute,
        exchange=exchange,
        gather=cost.gather * gathered,
        exposed=jnp.zeros_like(copies),
    )
    zero = jnp.zeros(())
    rest = rest_time(positions, cost, micro_batches=micro_batches, num_layers=layers)
    return _slowest_copy(times, cost.data_parallel, zero, zero, rest)


def _uniform_visits(topology: Topology, top_k: Float[jax.Array, ""]) -> Float[jax.Array, ""]:
    """Return the crossings per token under uniform routing, if a token crosses once to each node that it needs."""
    nodes, experts = topology.num_nodes, topology.num_experts
    # A token does not need a node if all its experts are on other nodes.
    elsewhere = experts - experts // nodes
    index = jnp.arange(experts, dtype=jnp.float32)
    factor = jnp.maximum(elsewhere - index, 0) / (experts - index)
    avoided = jnp.where(index < jnp.round(top_k), factor, 1.0).prod()
    return (nodes - 1) * (1 - avoided)


def _slowest_copy(
    times: LayerTime, data_parallel: int, push: jax.Array, reorder: jax.Array, rest: jax.Array
) -> BatchTime:
    """Sum the parts of the time over layers and micro-batches, for the data-parallel group with the longest total."""
    micro_batches = times.total.shape[0]
    if micro_batches % data_parallel:
        raise ValueError(
            f"{micro_batches} micro-batches must divide evenly over data_parallel={data_parallel}"
        )
    hideable = jnp.minimum(times.compute, times.exchange)
    by_copy = jnp.stack([jnp.asarray(part).reshape(data_parallel, -1).sum(-1) for part in (*times, hideable)])
    *layers, hideable = by_copy[:, by_copy[:-1].sum(0).argmax()]
    attention, compute, exchange, gather, exposed = layers
    return BatchTime(attention, compute, exchange, gather, exposed, push, reorder, rest, hideable)
