"""A decoding step of a deployment with real loads: in every layer a micro-batch takes what its busiest group takes.

The search (`relibra_jax.serving.deployments`) takes loads as they are on average over a batch. A micro-batch is a draw
from them, so its busiest group is busier than that, and micro-batches wait for one another: what both cost is the
difference between this and the closed form.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.cost.models import Model
from relibra_jax.serving.deployments import Clusters, Deployment
from relibra_jax.serving.expert_devices import ExpertPlacement, group_copies
from relibra_jax.serving.phase_times import attention_time, exchange_time, expert_time
from relibra_jax.serving.ping_pong import Schedule, idle_shares, simulate_ping_pong
from relibra_jax.types import Array, check_shape


class SimulatedStep(NamedTuple):
    """One decoding step, event by event; modelled seconds."""

    attention: Float[Array, "L m"]
    """Of each micro-batch in each layer."""
    experts: Float[Array, "L m"]
    """Of its busiest group."""
    exchange: Float[Array, "L m"]
    """One way."""
    schedule: Schedule
    attention_idle: float
    """The share of the step in which attention waits."""
    expert_idle: float
    """The share of the step in which all groups of expert devices wait."""
    group_idle: float
    """The share of the step in which a group waits, the mean over groups: that of the busiest and the less busy."""
    busiest: float
    """Token copies of the busiest group over the mean group's, the mean over layers and micro-batches."""


def simulate_deployment(
    model: Model,
    clusters: Clusters,
    placement: ExpertPlacement,
    deployment: Deployment,
    load: Int[Array, "L m E"],
    *,
    context: float,
) -> SimulatedStep:
    """Run the ping-pong schedule of a deployment with the loads of its micro-batches.

    Args:
        model: the sizes of the model.
        clusters: the hardware of either side.
        placement: where the experts are; layers beyond those it has go through it again, further ones are left out.
        deployment: the deployment.
        load: token copies of each expert, of all copies of attention together, for all layers of the model.
        context: the mean tokens of a sequence in the key-value cache.

    Raises:
        ValueError: if the load has another shape than the model and the deployment.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> from relibra_jax.serving.expert_devices import even_placement
    >>> clusters = Clusters(attention=CLUSTERS["h100"], experts=CLUSTERS["h100"])
    >>> deployment = Deployment(2, 4, 1, 0, 3, 64)  # 4 x 64 sequences are 1,024 copies: 32 for each of 32 experts
    >>> even, load = even_placement(4, 32, top_k=4), np.full((24, 3, 32), 32)
    >>> step = simulate_deployment(MODELS["gpt-oss-20b"], clusters, even, deployment, load, context=4096.0)
    >>> f"{1e3 * float(step.schedule.seconds):.1f} ms, idle {step.attention_idle:.0%} and {step.expert_idle:.0%}"
    '10.9 ms, idle 26% and 2%'
    """
    layers, micro_batches = model.moe_layers, int(deployment.micro_batches)
    check_shape("load", load.shape, (layers, micro_batches, model.num_experts))
    share = placement.share[np.arange(layers) % len(placement.share)][:, None]
    copies = group_copies(load, np.broadcast_to(share, (layers, micro_batches, *share.shape[2:])))
    copies = np.asarray(copies, np.float32)
    sequences, attends = float(deployment.sequences), float(deployment.attention_devices)
    computes = float(deployment.expert_devices)
    by_group = expert_time(copies, float(placement.slots), computes, cluster=clusters.experts, model=model)
    experts = by_group.max(-1)
    attention = jnp.full_like(
        experts,
        attention_time(sequences, attends, cluster=clusters.attention, model=model, context=context),
    )
    sent, received = (np.resize(each, layers)[:, None] for each in (placement.sent, placement.received))
    exchange = exchange_time(
        np.broadcast_to(sequences * model.top_k * sent, experts.shape),
        copies.max(-1) * received,
        attends,
        computes,
        attention=clusters.attention,
        experts=clusters.experts,
        model=model,
    )
    schedule = simulate_ping_pong(attention, experts, exchange)
    waits = idle_shares(attention, experts, schedule)
    group_idle = 1 - float(by_group.mean(-1).sum() / schedule.seconds)
    busiest = float((copies.max(-1) / copies.mean(-1)).mean())
    return SimulatedStep(attention, experts, exchange, schedule, *waits, group_idle, busiest)
