"""Which devices serve attention and which experts, with how many micro-batches in flight: a search of a whole grid.

Source: the plan search of MegaScale-Infer (arXiv 2504.02263). Of the deployments whose devices hold what they must and
whose decoding step stays within the time between two tokens, the one with most tokens a second for its price wins. The
paper loops over tensor parallelism and micro-batches and derives the copies of attention from balance; here every
candidate's times (`relibra_jax.serving.phase_times`) and schedule (`relibra_jax.serving.ping_pong`) are computed in one
compiled evaluation, so that nothing has to be derived. What the paper leaves out is the unevenness of experts: a layer
takes what its busiest group takes at recorded loads, and the step the mean over layers. All of it is modelled.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.limits import check_integer, check_memory, check_positive
from relibra_jax.serving.device_memory import attention_memory, expert_memory
from relibra_jax.serving.expert_devices import ExpertPlacement
from relibra_jax.serving.infeasible import refuse
from relibra_jax.serving.phase_times import attention_time, exchange_time, expert_time
from relibra_jax.serving.ping_pong import step_time
from relibra_jax.types import Array

MEMORY_SHARE: Final = 0.9
"""The part of a device's memory that weights and caches may take, unless another is given: an assumption. Serving
engines keep the rest for activations, exchange buffers and the runtime."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clusters:
    """The hardware of either side, and what a device of it costs in the same unit."""

    attention: Cluster
    experts: Cluster
    attention_price: float = 1.0
    expert_price: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """What a search tries: every combination of these, with every placement of the experts."""

    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    """Devices over which a copy of attention, or an expert, is divided; at most those of a node, and a divisor
    of the model's heads and of its expert width."""
    attention_copies: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    """Copies of attention, each with sequences of its own."""
    micro_batches: tuple[int, ...] = (1, 2, 3, 4)
    """Micro-batches in flight."""
    sequences: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    """Sequences of one micro-batch that one copy of attention serves."""


class Deployment(NamedTuple):
    """One combination of a grid, or all of them stacked."""

    attention_devices: Int[Array, "*C"] | int
    """Devices of one copy of attention."""
    attention_copies: Int[Array, "*C"] | int
    expert_devices: Int[Array, "*C"] | int
    """Devices of one group of expert devices."""
    placement: Int[Array, "*C"] | int
    """Which of the placements, counted from 0; it has the number of groups."""
    micro_batches: Int[Array, "*C"] | int
    """In flight."""
    sequences: Int[Array, "*C"] | int
    """Of one micro-batch on one copy of attention."""


class Score(NamedTuple):
    """What one deployment comes to, modelled, or all of them stacked."""

    attention: Float[Array, "*C"] | float
    """Seconds of attention for one micro-batch in one layer."""
    experts: Float[Array, "*C"] | float
    """Seconds of the busiest group, likewise, the mean over layers."""
    exchange: Float[Array, "*C"] | float
    """Seconds of the transfer one way, likewise."""
    step: Float[Array, "*C"] | float
    """Seconds of a decoding step: the time between two tokens of a sequence."""
    throughput: Float[Array, "*C"] | float
    """Tokens a second of all sequences together."""
    per_price: Float[Array, "*C"] | float
    """The same for each unit of price."""


class Search(NamedTuple):
    """All deployments of a grid and the best of them."""

    candidates: Deployment
    """Stacked, in the order of the grid, the last field fastest."""
    scores: Score
    """Stacked likewise."""
    feasible: np.ndarray
    """Whether each fits its devices and the time between two tokens."""
    best: Deployment
    score: Score
    """Of the best."""


def search_deployment(
    model: Model,
    clusters: Clusters,
    placements: Sequence[ExpertPlacement],
    *,
    slo: float,
    context: float,
    grid: Grid | None = None,
    memory_share: float = MEMORY_SHARE,
) -> Search:
    """The deployment with most tokens a second for its price, of all that fit the memory and the time between tokens.

    Args:
        model: the sizes of the model.
        clusters: the hardware and the price of either side.
        placements: the placements of the experts to try, each with its number of groups.
        slo: the most seconds of a decoding step, which is the time between two tokens of a sequence.
        context: the mean tokens of a sequence in the key-value cache.
        grid: what is tried besides; None for the default.
        memory_share: the part of a device's memory that weights and caches may take, above 0 and at most 1. The rest is
            for what `relibra_jax.serving.device_memory` does not count.

    Returns:
        The search. Of equally good deployments the first of the grid is the best.

    Raises:
        ValueError: if a number is out of its range, there is nothing to try, the placements are of other experts than
            the model's, or nothing is feasible, with the constraint that binds and by how much.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> from relibra_jax.serving.expert_devices import even_placement
    >>> clusters = Clusters(attention=CLUSTERS["h200"], experts=CLUSTERS["h100"])
    >>> placements = [even_placement(groups, 32, top_k=4) for groups in (4, 8)]
    >>> found = search_deployment(MODELS["gpt-oss-20b"], clusters, placements, slo=0.1, context=4096.0)
    >>> found.best.micro_batches, found.score.step <= 0.1
    (4, True)
    """
    grid = Grid() if grid is None else grid
    check_search(model, clusters, grid, slo=slo, context=context, memory_share=memory_share)
    _check_placements(model, placements)
    layers = model.moe_layers
    axes = _axes(grid, len(placements))
    size = math.prod(map(len, axes))
    # float32: the numbers of a candidate and its score, and copies, rows and two times of each layer.
    check_memory(f"a grid of {size} deployments x {layers} layers", 4 * size * (24 + 4 * layers))
    columns = np.meshgrid(*(np.array(axis, np.int32) for axis in axes), indexing="ij")
    candidates = Deployment(*(column.ravel() for column in columns))
    scores = score_deployments(model, clusters, placements, candidates, context=context)
    slots = np.array([placement.slots for placement in placements])[candidates.placement]
    in_flight = np.asarray(candidates.micro_batches, np.int64) * candidates.sequences
    needs = (
        attention_memory(in_flight, np.asarray(candidates.attention_devices), model=model, context=context),
        expert_memory(slots, np.asarray(candidates.expert_devices), model=model),
    )
    room = (memory_share * clusters.attention.memory, memory_share * clusters.experts.memory)
    fits = (needs[0] <= room[0]) & (needs[1] <= room[1])
    feasible = fits & (np.asarray(scores.step, np.float64) <= slo)
    if not feasible.any():
        refuse(needs, room, np.asarray(scores.step)[fits], slo)
    index = int(np.where(feasible, scores.per_price, -1.0).argmax())
    best, score = jax.tree.map(lambda each: each[index].item(), (candidates, scores))
    return Search(candidates, scores, feasible, best, score)


def score_deployments(
    model: Model,
    clusters: Clusters,
    placements: Sequence[ExpertPlacement],
    candidates: Deployment,
    *,
    context: float,
) -> Score:
    """The modelled times and throughputs of many deployments, feasible or not, in one compiled evaluation.

    Args:
        model: the sizes of the model.
        clusters: the hardware and the price of either side.
        placements: the placements that ``candidates.placement`` counts.
        candidates: the deployments, stacked.
        context: the mean tokens of a sequence in the key-value cache.

    Returns:
        Score of float32 NumPy arrays.
    """
    # The model's layers, as a simulated step has them: fewer are gone through again, further ones are left out.
    hottest, sent, received = (
        np.stack([np.resize(getattr(placement, name), model.moe_layers) for placement in placements])
        for name in ("hottest", "sent", "received")
    )
    groups = np.array([placement.groups for placement in placements], np.float32)
    slots = np.array([placement.slots for placement in placements], np.float32)
    index = np.asarray(candidates.placement, np.int32)
    numbers = Deployment(*(np.asarray(each, np.float32) for each in candidates))._replace(placement=index)
    table = _Placed(hottest, sent, received, groups, slots)
    scores = _score_all(numbers, table, jnp.float32(context), model, clusters)
    return Score(*(np.asarray(each) for each in scores))


class _Placed(NamedTuple):
    """What a score needs of a placement, or of all of them stacked."""

    hottest: Array
    sent: Array
    received: Array
    groups: Array
    slots: Array


@jax.jit
def _score_all(candidates: Deployment, table: _Placed, context, model: Model, clusters: Clusters) -> Score:
    def one(candidate: Deployment) -> Score:
        placed = jax.tree.map(lambda each: each[candidate.placement], table)
        return _score(candidate, placed, context, model, clusters)

    return jax.vmap(one)(candidates)


def _score(at: Deployment, placed: _Placed, context, model: Model, clusters: Clusters) -> Score:
    """The score of one deployment."""
    batch = at.micro_batches * at.attention_copies * at.sequences
    copies = at.attention_copies * at.sequences * model.top_k * placed.hottest
    attention = attention_time(
        at.sequences, at.attention_devices, cluster=clusters.attention, model=model, context=context
    )
    experts = expert_time(
        copies, placed.slots, at.expert_devices, cluster=clusters.experts, model=model
    ).mean()
    exchange = exchange_time(
        at.sequences * model.top_k * placed.sent,
        copies * placed.received,
        at.attention_devices,
        at.expert_devices,
        attention=clusters.attention,
        experts=clusters.experts,
        model=model,
    ).mean()
    step = step_time(attention, experts, exchange, micro_batches=at.micro_batches, layers=model.moe_layers)
    price = (
        at.attention_devices * at.attention_copies * clusters.attention_price
        + at.expert_devices * placed.groups * clusters.expert_price
    )
    throughput = batch / step
    return Score(attention, experts, exchange, step, throughput, throughput / price)


def _axes(grid: Grid, num_placements: int) -> tuple[Sequence[int], ...]:
    """What each field of a deployment is tried at, in their order."""
    return (
        grid.tensor_parallel,
        grid.attention_copies,
        grid.tensor_parallel,
        range(num_placements),
        grid.micro_batches,
        grid.sequences,
    )


def check_search(
    model: Model,
    clusters: Clusters,
    grid: Grid,
    *,
    slo: float,
    context: float,
    memory_share: float = MEMORY_SHARE,
) -> None:
    """Refuse what no search can have, whatever the placements are, so that it is known before any is planned.

    Args:
        model: the sizes of the model.
        clusters: the hardware and the price of either side.
        grid: what is tried.
        slo: the most seconds of a decoding step.
        context: the mean tokens of a sequence in the key-value cache.
        memory_share: the part of a device's memory that weights and caches may take.

    Raises:
        ValueError: if a number is out of its range, or there is nothing to try.
    """
    check_positive("slo", slo)
    check_positive("context", context)
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share={memory_share} must be above 0 and at most 1")
    check_positive("attention_price", clusters.attention_price)
    check_positive("expert_price", clusters.expert_price)
    for field in dataclasses.fields(grid):
        values = getattr(grid, field.name)
        if not values:
            raise ValueError(f"{field.name}: at least one")
        for value in values:
            check_integer(field.name, value, least=1)
    node = min(clusters.attention.node_ranks, clusters.experts.node_ranks)
    for devices in grid.tensor_parallel:
        if devices > node:
            raise ValueError(f"tensor_parallel={devices} is more than the {node} devices of a node")
        for what, number in (("heads", model.heads), ("expert width", model.expert_width)):
            if number is not None and number % devices:
                raise ValueError(f"tensor_parallel={devices} must divide the model's {what}, {number}")


def _check_placements(model: Model, placements: Sequence[ExpertPlacement]) -> None:
    if not placements:
        raise ValueError("placements: at least one")
    for placement in placements:
        if placement.share.shape[1] != model.num_experts:
            raise ValueError(
                f"a placement of {placement.share.shape[1]} experts is not of a model with {model.num_experts}"
            )
