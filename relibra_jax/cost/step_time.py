"""A common currency: the modelled time of a training step's layers under a plan, in seconds.

One layer of one micro-batch, forward and backward, on a described cluster:

    attention  3 x (tokens of the fullest rank) x (FLOP of a token) / rate
    compute    3 x (rows of the most loaded rank, filled up to tiles) x 6 D F / rate
    exchange   4 x (bytes of the busiest rank's busiest link, sent or received) / bandwidth
    exposed    3 x (time to push a layer's replicas - time of forward attention), where that is positive

A backward pass costs two forward passes; dispatch and combine each run once per pass; a replica is pushed in the
forward pass, and pushed again and its gradient returned in the backward pass, each time behind attention. A recompute
pass, for the old log-probabilities, is one more forward pass: 4, 4, 6 and 4 times. Every phase waits for its slowest
rank, because a collective ends it. The accounting follows LAER-MoE (ASPLOS'26: four exchanges, three passes of compute)
with the replicas' transfers of ReLibra (arXiv 2605.08639). Not counted: what is neither attention nor experts
(embeddings, the optimizer's step, the sum of gradients over data-parallel copies), memory traffic, launches, latencies,
and forward passes that activation checkpointing repeats. All of it is a model: nothing here was measured on a cluster.

What a whole batch takes is in `relibra_jax.cost.batch_time`.
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

ACTIVATION_BYTES = 2  # bfloat16


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
    """Modelled seconds of a layer in all passes of a micro-batch; the four add up."""

    attention: Float[Array, "M L"]
    compute: Float[Array, "M L"]
    exchange: Float[Array, "M L"]
    exposed: Float[Array, "M L"]
    """What of the replicas' transfers attention does not hide."""

    @property
    def total(self) -> Float[Array, "M L"]:
        """Seconds of the layer."""
        return self.attention + self.compute + self.exchange + self.exposed


class Passes(NamedTuple):
    """How often a micro-batch does what a forward pass does once."""

    compute: int
    """The work of a forward pass; a backward pass is two. Replicas travel as often: weights in both passes, and
    gradients in the backward pass."""
    exchange: int
    """Dispatch, or combine."""


def count_passes(updates: int, *, recompute: bool) -> Passes:
    """The passes over a micro-batch.

    Args:
        updates: the optimizer updates among which the micro-batches of a batch are divided, so that each is run once;
            0 for a stage that only recomputes.
        recompute: whether there is a forward pass for old log-probabilities.

    Raises:
        ValueError: if ``updates`` is no integer of at least 0, or there is no pass at all.

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
    """The modelled forward time of every rank under a plan.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``; a rank's tokens are its copies over top-k.
        topology: the expert-parallel group.
        cluster: the hardware, for example ``CLUSTERS["h100"]``.
        model: the sizes of the model, for example ``MODELS["qwen3-235b-a22b"]``.
        context: the mean length of a sequence, tokens.
        scale: how many tokens each token stands for, to read a small trace at the size of a real micro-batch.
        visits: distinct tokens that cross nodes, for the hierarchical path: see
            `relibra_jax.cost.traffic.count_traffic`.
        float8: the ranks that compute their experts in float8 (`relibra_jax.hot_ranks.mark_hot_ranks`), at the peak of
            float8 products and nothing more: rounding is not counted, so this is the least that they may take.

    Returns:
        RankTime, seconds.

    Raises:
        ValueError: if ``visits`` have another shape than the plans ask for.
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
    """From ranks to layers: every phase waits for its slowest rank, in all passes.

    Args:
        time: the forward time of every rank.
        updates: as in `count_passes`.
        recompute: as in `count_passes`.

    Raises:
        ValueError: as `count_passes`.

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
