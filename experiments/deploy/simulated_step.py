"""Simulation of a decoding step of a deployment, in which every layer takes as long as its busiest group.

In one decoding step every sequence in flight routes one token. Finished sequences are replaced at once. So a step sees
a sequence at any of its tokens, and sees longer sequences more often: every recorded token is equally likely.

The search (`experiments.deploy.deployments`) uses mean loads over a batch. A micro-batch is a random draw from them,
so its busiest group has more than the mean says, and micro-batches wait for one another. The difference between the
simulation and the closed form is the cost of both effects.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments.deploy.costs import attention_time, exchange_time, expert_time
from experiments.deploy.deployments import Deployment
from experiments.deploy.ping_pong import Schedule, idle_shares, simulate_ping_pong
from experiments.deploy.placements import ExpertPlacement, group_copies
from experiments.deploy.serving import Serving
from relibra_jax.contract.types import Array, RoutingReplay, check_shape
from relibra_jax.support.limits import check_integer


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


def draw_micro_batches(
    replay: RoutingReplay, *, num_experts: int, sequences: int, micro_batches: int, layers: int, seed: int
) -> Int[np.ndarray, "L m E"]:
    """Draw the loads of one decoding step from recorded tokens, with replacement.

    A drawn token keeps its routes in all layers.

    Args:
        replay: the recorded routing, which `relibra_jax.contract.replay.check_replay` accepts.
        num_experts: the number of experts of a layer, E.
        sequences: the number of sequences in a micro-batch.
        micro_batches: the number of micro-batches, m.
        layers: the number of layers of the result, L. If the trace has fewer layers, they are repeated.
        seed: the seed of the draw.

    Returns:
        The token copies of each expert. A micro-batch has ``sequences`` times K of them in every layer.

    Raises:
        ValueError: if the replay has no token, or a count is not an integer of at least 1.

    >>> replay = RoutingReplay(np.array([[[[0, 2]], [[1, 2]]]]), np.array([[True, False]]))
    >>> sizes = {"num_experts": 4, "sequences": 3, "micro_batches": 1, "layers": 2}
    >>> draw_micro_batches(replay, **sizes, seed=0).tolist()
    [[[3, 0, 3, 0]], [[3, 0, 3, 0]]]
    """
    for name, value in (("sequences", sequences), ("micro_batches", micro_batches), ("layers", layers)):
        check_integer(name, value, least=1)
    routes = np.asarray(replay.expert_ids)[np.asarray(replay.mask)]
    if not len(routes):
        raise ValueError("the replay has no tokens to draw from")
    recorded = routes.shape[1]
    drawn = np.random.default_rng(seed).integers(len(routes), size=(micro_batches, sequences))
    load = np.zeros((recorded, micro_batches, num_experts), np.int32)
    for micro_batch, layer in np.ndindex(micro_batches, recorded):
        ids = routes[drawn[micro_batch], layer].ravel()
        load[layer, micro_batch] = np.bincount(ids, minlength=num_experts)
    return load[np.arange(layers) % recorded]


def simulate_deployment(
    serving: Serving, placement: ExpertPlacement, deployment: Deployment, load: Int[Array, "L m E"]
) -> SimulatedStep:
    """Simulate one decoding step of a deployment with the loads of its micro-batches.

    Args:
        serving: the model and the hardware.
        placement: the placement of the experts. If it has fewer layers than the model, they are repeated; if it has
            more, the extra ones are left out.
        deployment: the deployment.
        load: the token copies of each expert, from all copies of attention together, for all layers of the model.

    Returns:
        The times, the schedule, and how long each side waits.

    Raises:
        ValueError: if the shape of the load does not match the model and the deployment.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> from experiments.deploy.placements import even_placement
    >>> serving = Serving(model=MODELS["gpt-oss-20b"], attention=CLUSTERS["h100"], experts=CLUSTERS["h100"])
    >>> deployment = Deployment(2, 4, 1, 0, 3, 64)  # 4 x 64 sequences are 1,024 copies: 32 for each of 32 experts
    >>> even, load = even_placement(4, 32, top_k=4), np.full((24, 3, 32), 32)
    >>> step = simulate_deployment(serving, even, deployment, load)
    >>> f"{1e3 * float(step.schedule.seconds):.1f} ms, idle {step.attention_idle:.0%} and {step.expert_idle:.0%}"
    '10.9 ms, idle 26% and 2%'
    """
    model = serving.model
    layers, micro_batches = model.moe_layers, int(deployment.micro_batches)
    check_shape("load", load.shape, (layers, micro_batches, model.num_experts))
    share = placement.share[np.arange(layers) % len(placement.share)][:, None]
    copies = group_copies(load, np.broadcast_to(share, (layers, micro_batches, *share.shape[2:])))
    copies = np.asarray(copies, np.float32)
    sequences, attention_devices = float(deployment.sequences), float(deployment.attention_devices)
    expert_devices = float(deployment.expert_devices)
    by_group = expert_time(copies, float(placement.slots), expert_devices, serving)
    experts = by_group.max(-1)
    attention = jnp.full_like(experts, attention_time(sequences, attention_devices, serving))
    sent, received = (np.resize(rows, layers)[:, None] for rows in (placement.sent, placement.received))
    exchange = exchange_time(
        np.broadcast_to(sequences * model.top_k * sent, experts.shape),
        copies.max(-1) * received,
        attention_devices,
        expert_devices,
        serving,
    )
    schedule = simulate_ping_pong(attention, experts, exchange)
    idle = idle_shares(attention, experts, schedule)
    group_idle = 1 - float(by_group.mean(-1).sum() / schedule.seconds)
    busiest = float((copies.max(-1) / copies.mean(-1)).mean())
    return SimulatedStep(attention, experts, exchange, schedule, *idle, group_idle, busiest)
