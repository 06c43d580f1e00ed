"""A common currency: the modelled time of a training step's layers under a plan, in seconds.

One layer of one micro-batch, forward and backward, on a described cluster:

    attention  3 x (tokens of the fullest rank) x (FLOP of a token) / rate
    compute    3 x (rows of the most loaded rank, filled up to tiles) x 6 D F / rate
    exchange   4 x (bytes of the busiest link of the busiest rank, one way)
    exposed    3 x (time to push a layer's replicas - time of forward attention), where that is positive

A backward pass costs two forward passes; dispatch and combine each run once per pass; a replica is pushed in the
forward pass, and pushed again and its gradient returned in the backward pass, each time behind attention. Every
phase waits for its slowest rank, because a collective ends it. The accounting follows LAER-MoE (ASPLOS'26:
four exchanges, three passes of compute) with the replicas' transfers of ReLibra (arXiv 2605.08639). All of it is a
model: nothing here was measured on a cluster.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from relibra_jax.cost.hardware import Cluster, Model
from relibra_jax.cost.traffic import count_traffic
from relibra_jax.plan import copy_source
from relibra_jax.types import EMPTY, Array, LayerPlan, Topology

ACTIVATION_BYTES = 2  # bfloat16
WEIGHT_BYTES = 2  # bfloat16; a replica's gradient returns in the same dtype
STATE_BYTES = 14  # a parameter that changes home: bfloat16 weight, float32 master copy and two Adam moments
PASSES = 3  # one forward, and a backward of twice the work


class RankTime(NamedTuple):
    """Modelled seconds of every rank in the forward pass of one layer of one micro-batch."""

    attention: Float[Array, "M L N G"]
    """Attention, projections and shared experts on the rank's own tokens."""
    compute: Float[Array, "M L N G"]
    """The experts in its slots."""
    exchange: Float[Array, "M L N G"]
    """Dispatch, which is as long as combine."""
    push: Float[Array, "M L N G"]
    """Sending and receiving replicas, beside attention."""


class LayerTime(NamedTuple):
    """Modelled seconds of a layer in a micro-batch, forward and backward; the four add up."""

    attention: Float[Array, "M L"]
    compute: Float[Array, "M L"]
    exchange: Float[Array, "M L"]
    exposed: Float[Array, "M L"]
    """What of the replicas' transfers attention does not hide."""

    @property
    def total(self) -> Float[Array, "M L"]:
        """Seconds of the layer."""
        return self.attention + self.compute + self.exchange + self.exposed


def rank_time(
    layer_plans: LayerPlan,
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
    context: float,
    scale: float = 1.0,
    visits: Int[Array, "M L P N"] | None = None,
) -> RankTime:
    """The modelled forward time of every rank under a plan.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``; a rank's tokens are its copies over top-k.
        topology: the expert-parallel group.
        cluster: the hardware, for example ``CLUSTERS["h100"]``.
        model: the sizes of the model, for example ``MODELS["qwen3-235b-a22b"]``.
        context: the mean length of a sequence, tokens.
        scale: how many tokens each token stands for, to read a small trace at the size of a real micro-batch.
        visits: distinct tokens that cross nodes, see `relibra_jax.cost.traffic.count_traffic`.

    Returns:
        RankTime, seconds.
    """
    flops = cluster.matmul_flops * cluster.matmul_efficiency
    tokens = scale * jnp.asarray(layer_plans.load).sum(-1) / model.top_k
    tiles = jnp.ceil(scale * jnp.asarray(layer_plans.quota) / cluster.tile)
    traffic = count_traffic(layer_plans, topology, visits=visits)
    row_bytes = scale * ACTIVATION_BYTES * model.width
    return RankTime(
        attention=tokens * model.token_flops(context) / flops,
        compute=tiles.sum(-1) * cluster.tile * 2 * model.expert_params / flops,
        exchange=_transfer_time(traffic.slow * row_bytes, traffic.fast * row_bytes, cluster),
        push=push_time(layer_plans, topology, cluster=cluster, model=model),
    )


def balanced_time(
    load: Int[Array, "M L N G E"],
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
    context: float,
    scale: float = 1.0,
    hierarchical: bool = False,
) -> RankTime:
    """The modelled time if every rank had as many tokens and routing were uniform over experts, without replicas.

    What plans are compared to, as in ReLibra's evaluation; no plan. Arguments as in `rank_time`; ``hierarchical`` if
    a token crosses to a node once, however many of its experts are there.
    """
    flops = cluster.matmul_flops * cluster.matmul_efficiency
    copies = scale * jnp.asarray(load, jnp.float32).sum((-3, -2, -1)) / topology.num_ranks
    copies = jnp.broadcast_to(
        copies[..., None, None], (*copies.shape, topology.num_nodes, topology.ranks_per_node)
    )
    nodes, local, experts = topology.num_nodes, topology.ranks_per_node, topology.num_experts
    away, near = 1 - 1 / nodes, (local - 1) / topology.num_ranks
    if hierarchical:
        # A token avoids a node if all its experts are among those elsewhere.
        elsewhere = experts - experts // nodes
        avoided = np.prod([max(elsewhere - i, 0) / (experts - i) for i in range(model.top_k)])
        away, near = (nodes - 1) * (1 - avoided) / model.top_k, (local - 1) / local
    sent = copies * float(ACTIVATION_BYTES * model.width)
    return RankTime(
        attention=copies / model.top_k * model.token_flops(context) / flops,
        compute=copies * 2.0 * model.expert_params / flops,
        exchange=_transfer_time(sent * away, sent * near, cluster),
        push=jnp.zeros_like(copies),
    )


def layer_time(time: RankTime) -> LayerTime:
    """From ranks to layers: every phase waits for its slowest rank, forward and backward.

    >>> one = jnp.array([[[[1.0, 2.0]]]])
    >>> layer_time(RankTime(one, one, one, 2 * one)).exposed.tolist()
    [[6.0]]
    """
    attention, compute, exchange, push = (part.max((-2, -1)) for part in time)
    return LayerTime(
        attention=PASSES * attention,
        compute=PASSES * compute,
        exchange=4 * exchange,
        exposed=PASSES * jnp.maximum(push - attention, 0),
    )


def push_time(
    layer_plans: LayerPlan, topology: Topology, *, cluster: Cluster, model: Model
) -> Float[jax.Array, "M L N G"]:
    """Seconds in which each rank gives and takes its layer's replicas, which the forward pass does once."""
    plans, ranks = jax.tree.map(jnp.asarray, layer_plans), topology.num_ranks

    def one(plan):
        owner = copy_source(plan, topology).reshape(ranks, -1)
        taker = jnp.arange(ranks)[:, None]
        copied = owner != EMPTY
        away = owner // topology.ranks_per_node != taker // topology.ranks_per_node

        def busiest(moved):
            given = jnp.zeros(ranks, jnp.int32).at[owner].add(moved)
            return jnp.maximum(given, moved.sum(-1))

        return busiest(copied & away), busiest(copied & ~away)

    slow, fast = jax.vmap(jax.vmap(one))(plans)
    size = float(WEIGHT_BYTES * model.expert_params)
    return _transfer_time(slow * size, fast * size, cluster).reshape(plans.slot_expert.shape[:-1])


def reorder_time(
    home: Int[Array, "L E"],
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
) -> Float[jax.Array, ""]:
    """Seconds to move experts with their optimizer state to new homes, once a batch, all layers together."""
    ranks = topology.num_ranks
    source, target = (jnp.asarray(slots) // topology.home_slots for slots in (previous_home, home))
    same_node = source // topology.ranks_per_node == target // topology.ranks_per_node

    def busiest(moved):
        sent, received = (jnp.zeros(ranks, jnp.int32).at[rank].add(moved) for rank in (source, target))
        return jnp.maximum(sent, received)

    size = float(STATE_BYTES * model.expert_params)
    slow, fast = busiest(~same_node), busiest(same_node & (source != target))
    return _transfer_time(slow * size, fast * size, cluster).max()


def batch_time(times: LayerTime, *, reorder: float = 0.0, data_parallel: int = 1) -> Float[jax.Array, ""]:
    """Seconds of a batch: the slowest copy of the expert-parallel group, and the reorder before it.

    Args:
        times: the times of all layers and micro-batches; with data parallelism the copies' micro-batches follow one
            another along M, a copy at a time.
        reorder: from `reorder_time`, seconds.
        data_parallel: copies of the group; divides M.

    Raises:
        ValueError: if M does not divide over the copies.
    """
    total = jnp.asarray(times.total)
    if data_parallel < 1 or total.shape[0] % data_parallel:
        raise ValueError(
            f"{total.shape[0]} micro-batches must divide evenly over data_parallel={data_parallel}"
        )
    return total.reshape(data_parallel, -1).sum(-1).max() + reorder


def _transfer_time(
    slow_bytes: Num[Array, "..."], fast_bytes: Num[Array, "..."], cluster: Cluster
) -> Float[jax.Array, "..."]:
    """Seconds in which a rank sends and receives; the two networks work at the same time."""
    slow, fast = slow_bytes / cluster.slow_bandwidth, fast_bytes / cluster.fast_bandwidth
    return jnp.maximum(slow, fast) / cluster.network_efficiency
