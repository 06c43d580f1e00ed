"""The modelled time of the layers of a training step under a plan, in seconds.

One layer of one micro-batch, forward and backward, on a cluster of `relibra_jax.cost.hardware`:

    attention  3 x (tokens of the fullest rank) x (FLOP of a token) / rate
    compute    3 x (rows of the most loaded rank, filled up to tiles) x 6 D F / rate
    exchange   4 x (bytes of the busiest rank's busiest link, sent or received) / bandwidth
    exposed    3 x (time to push a layer's replicas - time of forward attention), where that is positive

A backward pass costs as much as two forward passes. Dispatch and combine each run once per pass. A replica is sent in
the forward pass; in the backward pass it is sent again and its gradient is returned. Attention hides each of these
transfers in part. A recompute pass, for the old log-probabilities, is one more forward pass: the factors become 4, 4, 6
and 4. Every phase waits for its slowest rank, because a collective ends it. The factors are those of LAER-MoE
(ASPLOS'26: four exchanges, three passes of compute), and the transfers of replicas those of ReLibra (arXiv 2605.08639).
Not counted are operations other than attention and experts (embeddings, the optimizer step, the sum of gradients over
data-parallel copies), memory traffic, launches, latencies, and forward passes that activation checkpointing repeats.
All of it is a model: nothing here was measured on a cluster.

`relibra_jax.cost.batch_time` models the time of a whole batch.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from relibra_jax.cost.copies import push_time
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.cost.traffic import count_traffic, transfer_time
from relibra_jax.limits import check_integer
from relibra_jax.types import Array, LayerPlan, Topology

ACTIVATION_BYTES = 2
"""Bytes of one number of an activation: bfloat16."""


class RankTime(NamedTuple):
    """The modelled seconds of every rank in the forward pass of each layer and micro-batch."""

    attention: Float[Array, "M L N G"]
    """Attention, projections and shared experts, for the rank's own tokens."""
    compute: Float[Array, "M L N G"]
    """The experts in the rank's slots."""
    exchange: Float[Array, "M L N G"]
    """Dispatch; combine takes as long."""
    push: Float[Array, "M L N G"]
    """Sending and receiving replicas, at the same time as attention."""


class LayerTime(NamedTuple):
    """The modelled seconds of a layer in all passes of a micro-batch, as four parts that add up to the total."""

    attention: Float[Array, "M L"]
    """Attention, projections and shared experts."""
    compute: Float[Array, "M L"]
    """The routed experts."""
    exchange: Float[Array, "M L"]
    """Dispatch and combine."""
    exposed: Float[Array, "M L"]
    """The part of the transfers of replicas that attention does not hide."""

    @property
    def total(self) -> Float[Array, "M L"]:
        """The seconds of the whole layer."""
        return self.attention + self.compute + self.exchange + self.exposed


class Passes(NamedTuple):
    """The work on a micro-batch, in multiples of one forward pass."""

    compute: int
    """The number of forward passes, where a backward pass counts as two. Replicas are transferred as often: their
    weights in both passes, and their gradients in the backward pass."""
    exchange: int
    """The number of exchanges; dispatch and combine are one each."""


def count_passes(updates: int, *, recompute: bool) -> Passes:
    """Count the passes over a micro-batch.

    Args:
        updates: the number of optimizer updates among which the micro-batches of a batch are divided; each micro-batch
            is in one update. 0 for a stage that only recomputes.
        recompute: True if there is a forward pass for old log-probabilities.

    Raises:
        ValueError: if ``updates`` is not an integer of at least 0, or if there is neither an update nor a recompute.

    >>> count_passes(1, recompute=False), count_passes(4, recompute=True)
    (Passes(compute=3, exchange=4), Passes(compute=4, exchange=6))
    """
    check_integer("updates", updates, least=0)
    forward, backward = (updates > 0) + bool(recompute), int(updates > 0)
    if not forward:
        raise ValueError(f"updates={updates} and recompute={recompute} leave no pass to run")
    return Passes(compute=forward + 2 * backward, exchange=2 * (forward + backward))


def rank_time(
    layer_plans: LayerPlan,
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
    context: float,
    scale: Float[Array, ""] | float = 1.0,
    visits: Int[Array, "M L P N"] | None = None,
    float8: Bool[Array, "M L N G"] | None = None,
) -> RankTime:
    """Model the forward time of every rank under a plan.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``. The number of tokens of a rank is its number of
            token copies / top-k.
        topology: the expert-parallel group.
        cluster: the hardware, for example ``CLUSTERS["h100"]``.
        model: the sizes of the model, for example ``MODELS["qwen3-235b-a22b"]``.
        context: the mean length of a sequence in tokens.
        scale: the number of tokens that each token stands for, which scales a small trace to the size of a real
            micro-batch.
        visits: the number of distinct tokens that each rank sends to each node, for hierarchical dispatch; see
            `relibra_jax.cost.traffic.count_traffic`. None for flat dispatch.
        float8: True for the ranks that compute their experts in float8 (`relibra_jax.hot_ranks.mark_hot_ranks`). Their
            products run at the float8 peak, and the cast to float8 is not counted, so this is a lower bound.

    Returns:
        The times in seconds.

    Raises:
        ValueError: if the shape of ``visits`` does not fit the plans.
    """
    flops = cluster.matmul_flops * cluster.matmul_efficiency
    tokens = scale * jnp.asarray(layer_plans.load).sum(-1) / model.top_k
    speedup = cluster.float8_flops / cluster.matmul_flops
    expert_flops = flops if float8 is None else flops * jnp.where(float8, speedup, 1.0)
    tiles = jnp.ceil(scale * jnp.asarray(layer_plans.quota) / cluster.tile)
    traffic = count_traffic(layer_plans, topology, visits=visits)
    return RankTime(
        attention=tokens * model.token_flops(context) / flops,
        compute=tiles.sum(-1) * cluster.tile * 2 * model.expert_params / expert_flops,
        exchange=transfer_time(traffic, scale * ACTIVATION_BYTES * model.width, cluster),
        push=push_time(layer_plans, topology, cluster=cluster, model=model),
    )


def layer_time(time: RankTime, *, updates: int = 1, recompute: bool = False) -> LayerTime:
    """Compute the time of layers in all passes from the forward time of ranks; every phase waits for its slowest rank.

    Args:
        time: the forward time of every rank.
        updates: the number of optimizer updates, as in `count_passes`.
        recompute: True if there is a forward pass for old log-probabilities.

    Raises:
        ValueError: under the conditions of `count_passes`.

    >>> one = jnp.array([[[[1.0, 2.0]]]])
    >>> layer_time(RankTime(one, one, one, 2 * one)).exposed.tolist()
    [[6.0]]
    """
    passes = count_passes(updates, recompute=recompute)
    attention, compute, exchange, push = (part.max((-2, -1)) for part in time)
    return LayerTime(
        attention=passes.compute * attention,
        compute=passes.compute * compute,
        exchange=passes.exchange * exchange,
        exposed=passes.compute * jnp.maximum(push - attention, 0),
    )
