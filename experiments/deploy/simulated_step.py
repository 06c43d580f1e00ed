"""Simulation of a decoding step of a deployment, in which every layer takes as long as its busiest group.

The search (`experiments.deploy.deployments`) uses mean loads over a batch. A micro-batch is a random draw from them,
so its busiest group has more than the mean says, and micro-batches wait for one another. The difference between the
simulation and the closed form is the cost of both effects.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments.deploy.deployments import Clusters, Deployment
from experiments.deploy.expert_devices import ExpertPlacement, group_copies
from experiments.deploy.phase_times import attention_time, exchange_time, expert_time
from experiments.deploy.ping_pong import Schedule, idle_shares, simulate_ping_pong
from relibra_jax.contract.types import Array, check_shape
from relibra_jax.cost.models import Model


class SimulatedStep(NamedTuple):
    """One simulated decoding step, with modelled times in seconds."""

    attention: Float[Array, "L m"]
    """The seconds of attention for each micro-batch in each layer."""
    experts: Float[Array, "L m"]
    """The seconds of the slowest group of expert devices."""
    exchange: Float[Array, "L m"]
    """The seconds of the transfer in one direction."""
    schedule: Schedule
    """The schedule of these times."""
    attention_idle: float
    """The share of the step in which attention waits."""
    expert_idle: float
    """The share of the step in which all groups of expert devices wait at the same time."""
    group_idle: float
    """The share of the step in which a group of expert devices waits, averaged over all groups."""
    busiest: float
    """The token copies of the busiest group over those of the mean group, averaged over layers and micro-batches."""


def simulate_deployment(
    model: Model,
    clusters: Clusters,
    placement: ExpertPlacement,
    deployment: Deployment,
    load: Int[Array, "L m E"],
    *,
    context: float,
) -> SimulatedStep:
    """Simulate one decoding step of a deployment with the loads of its micro-batches.

    Args:
        model: the sizes of the model.
        clusters: the hardware of attention devices and of expert devices.
        placement: the placement of the experts. If it has fewer layers than the model, they are repeated; if it has
            more, the extra ones are left out.
        deployment: the deployment.
        load: the token copies of each expert, from all copies of attention together, for all layers of the model.
        context: the mean number of tokens of a sequence in the key-value cache.

    Returns:
        The times, the schedule, and how long each side waits.

    Raises:
        ValueError: if the shape of the load does not match the model and the deployment.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> from experiments.deploy.expert_devices import even_placement
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
    sequences, attention_devices = float(deployment.sequences), float(deployment.attention_devices)
    expert_devices = float(deployment.expert_devices)
    by_group = expert_time(
        copies, float(placement.slots), expert_devices, cluster=clusters.experts, model=model
    )
    experts = by_group.max(-1)
    attention = jnp.full_like(
        experts,
        attention_time(
            sequences, attention_devices, cluster=clusters.attention, model=model, context=context
        ),
    )
    sent, received = (np.resize(each, layers)[:, None] for each in (placement.sent, placement.received))
    exchange = exchange_time(
        np.broadcast_to(sequences * model.top_k * sent, experts.shape),
        copies.max(-1) * received,
        attention_devices,
        expert_devices,
        attention=clusters.attention,
        experts=clusters.experts,
        model=model,
    )
    schedule = simulate_ping_pong(attention, experts, exchange)
    idle = idle_shares(attention, experts, schedule)
    group_idle = 1 - float(by_group.mean(-1).sum() / schedule.seconds)
    busiest = float((copies.max(-1) / copies.mean(-1)).mean())
    return SimulatedStep(attention, experts, exchange, schedule, *idle, group_idle, busiest)
