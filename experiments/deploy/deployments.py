"""Search for a deployment: the devices of attention, the devices of experts, and the micro-batches in flight.

Source: the plan search of MegaScale-Infer (arXiv 2504.02263). A deployment is feasible if its devices have enough
memory and its decoding step takes no longer than the time allowed between two tokens. The best feasible deployment
gives the most tokens per second and unit of price. The paper loops over tensor parallelism and micro-batches, and
derives the number of attention copies from a balance condition. Here the times (`experiments.deploy.phase_times`) and
the schedule (`experiments.deploy.ping_pong`) of all candidates are computed in one compiled evaluation, so nothing is
derived.

The paper assumes equally busy experts. Here a layer takes as long as its busiest group at recorded loads, and the step
is computed from the mean over layers. All times are modelled.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments.deploy.device_memory import attention_memory, expert_memory
from experiments.deploy.expert_devices import ExpertPlacement
from experiments.deploy.infeasible import raise_infeasible
from experiments.deploy.phase_times import attention_time, exchange_time, expert_time
from experiments.deploy.ping_pong import step_time
from relibra_jax.contract.types import Array
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.support.limits import check_integer, check_memory, check_positive

MEMORY_SHARE: Final = 0.9
"""The default share of a device's memory that weights and caches may take: an assumption. Serving engines keep the rest
for activations, exchange buffers and the runtime."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clusters:
    """The hardware of attention devices and of expert devices, and their prices."""

    attention: Cluster
    """The hardware of the attention devices."""
    experts: Cluster
    """The hardware of the expert devices."""
    attention_price: float = 1.0
    """The price of one attention device, in any unit."""
    expert_price: float = 1.0
    """The price of one expert device, in the same unit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The values that a search tries: every combination of them, with every placement of the experts."""

    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers to try: devices that share a copy of attention, or an expert.
    Each must fit in a node, and divide the model's heads and expert width."""
    attention_copies: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    """Numbers to try: copies of attention, each of which serves its own sequences."""
    micro_batches: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers to try: micro-batches in flight."""
    sequences: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    """Numbers to try: sequences that a copy of attention serves in one micro-batch."""


class Deployment(NamedTuple):
    """One deployment: a combination of the values of a grid. Or all combinations, stacked along axis C."""

    attention_devices: Int[Array, "*C"] | int
    """The number of devices of one copy of attention."""
    attention_copies: Int[Array, "*C"] | int
    """The number of copies of attention."""
    expert_devices: Int[Array, "*C"] | int
    """The number of devices of one group of expert devices."""
    placement: Int[Array, "*C"] | int
    """The index of the placement of the experts, from 0. The placement has the number of groups."""
    micro_batches: Int[Array, "*C"] | int
    """The number of micro-batches in flight."""
    sequences: Int[Array, "*C"] | int
    """The number of sequences of one micro-batch on one copy of attention."""


class Score(NamedTuple):
    """The modelled times and throughput of one deployment, or of all deployments stacked along axis C."""

    attention: Float[Array, "*C"] | float
    """Seconds of attention for one micro-batch in one layer."""
    experts: Float[Array, "*C"] | float
    """Seconds of the busiest group of expert devices for one micro-batch in one layer, averaged over layers."""
    exchange: Float[Array, "*C"] | float
    """Seconds of the transfer in one direction for one micro-batch in one layer, averaged over layers."""
    step: Float[Array, "*C"] | float
    """Seconds of a decoding step: the time between two tokens of a sequence."""
    throughput: Float[Array, "*C"] | float
    """Tokens per second of all sequences together."""
    per_price: Float[Array, "*C"] | float
    """Tokens per second and unit of price."""


class Search(NamedTuple):
    """All deployments of a grid, and the best of them."""

    candidates: Deployment
    """All deployments, stacked in the order of the grid. The last field varies fastest."""
    scores: Score
    """The scores of all deployments, in the same order."""
    feasible: np.ndarray
    """Whether each deployment fits the memory of its devices and the time between two tokens."""
    best: Deployment
    """The best feasible deployment."""
    score: Score
    """The score of the best deployment."""


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
    """Find the feasible deployment with the most tokens per second and unit of price.

    Args:
        model: the sizes of the model.
        clusters: the hardware and prices of attention devices and of expert devices.
        placements: the placements of the experts to try. Each has its own number of groups.
        slo: the most seconds of a decoding step, which is the time between two tokens of a sequence.
        context: the mean number of tokens of a sequence in the key-value cache.
        grid: the other values to try. None stands for ``Grid()``.
        memory_share: the share of a device's memory that weights and caches may take, above 0 and at most 1. The rest
            is for what `experiments.deploy.device_memory` does not count.

    Returns:
        All deployments with their scores, and the best one. Among equally good deployments, the first of the grid is
        the best.

    Raises:
        ValueError: if a number is out of its range, the grid or ``placements`` is empty, a placement has a different
            number of experts than the model, or no deployment is feasible. In the last case the message names the
            constraint that is violated, and by how much.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> from experiments.deploy.expert_devices import even_placement
    >>> clusters = Clusters(attention=CLUSTERS["h200"], experts=CLUSTERS["h100"])
    >>> placements = [even_placement(groups, 32, top_k=4) for groups in (4, 8)]
    >>> search = search_deployment(MODELS["gpt-oss-20b"], clusters, placements, slo=0.1, context=4096.0)
    >>> search.best.micro_batches, search.score.step <= 0.1
    (4, True)
    """
    grid = Grid() if grid is None else grid
    check_search(model, clusters, grid, slo=slo, context=context, memory_share=memory_share)
    _check_placements(model, placements)
    layers = model.moe_layers
    axes = _axes(grid, len(placements))
    size = math.prod(map(len, axes))
    # float32 arrays: the fields of a candidate and of its score, and token copies, rows and two times for each layer.
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
        raise_infeasible(needs, room, np.asarray(scores.step)[fits], slo)
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
    """Compute the modelled times and throughputs of many deployments, feasible or not, in one compiled evaluation.

    Args:
        model: the sizes of the model.
        clusters: the hardware and prices of attention devices and of expert devices.
        placements: the placements that ``candidates.placement`` refers to.
        candidates: the deployments, stacked.
        context: the mean number of tokens of a sequence in the key-value cache.

    Returns:
        The scores, as float32 NumPy arrays.
    """
    # As many layers as the model has, like in a simulated step: a placement of fewer layers is repeated, and extra
    # layers are left out.
    hottest, sent, received = (
        np.stack([np.resize(getattr(placement, name), model.moe_layers) for placement in placements])
        for name in ("hottest", "sent", "received")
    )
    groups = np.array([placement.groups for placement in placements], np.float32)
    slots = np.array([placement.slots for placement in placements], np.float32)
    index = np.asarray(candidates.placement, np.int32)
    numbers = Deployment(*(np.asarray(each, np.float32) for each in candidates))._replace(placement=index)
    table = _PlacementNumbers(hottest, sent, received, groups, slots)
    scores = _score_all(numbers, table, jnp.float32(context), model, clusters)
    return Score(*(np.asarray(each) for each in scores))


class _PlacementNumbers(NamedTuple):
    """The numbers of a placement that its score depends on, or those of all placements stacked."""

    hottest: Array
    sent: Array
    received: Array
    groups: Array
    slots: Array


@jax.jit
def _score_all(
    candidates: Deployment, table: _PlacementNumbers, context, model: Model, clusters: Clusters
) -> Score:
    def one(candidate: Deployment) -> Score:
        placement = jax.tree.map(lambda each: each[candidate.placement], table)
        return _score(candidate, placement, context, model, clusters)

    return jax.vmap(one)(candidates)


def _score(
    deployment: Deployment, placement: _PlacementNumbers, context, model: Model, clusters: Clusters
) -> Score:
    """Return the score of one deployment."""
    attention_devices, attention_copies, expert_devices, _, micro_batches, sequences = deployment
    copies = attention_copies * sequences * model.top_k * placement.hottest
    attention = attention_time(
        sequences, attention_devices, cluster=clusters.attention, model=model, context=context
    )
    experts = expert_time(
        copies, placement.slots, expert_devices, cluster=clusters.experts, model=model
    ).mean()
    exchange = exchange_time(
        sequences * model.top_k * placement.sent,
        copies * placement.received,
        attention_devices,
        expert_devices,
        attention=clusters.attention,
        experts=clusters.experts,
        model=model,
    ).mean()
    step = step_time(attention, experts, exchange, micro_batches=micro_batches, layers=model.moe_layers)
    price = (
        attention_devices * attention_copies * clusters.attention_price
        + expert_devices * placement.groups * clusters.expert_price
    )
    throughput = micro_batches * attention_copies * sequences / step
    return Score(attention, experts, exchange, step, throughput, throughput / price)


def _axes(grid: Grid, num_placements: int) -> tuple[Sequence[int], ...]:
    """Return the values that are tried for each field of `Deployment`, in the order of the fields."""
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
    """Check the arguments of a search, except the placements, so that errors come before any placement is planned.

    Args:
        model: the sizes of the model.
        clusters: the hardware and prices of attention devices and of expert devices.
        grid: the values to try.
        slo: the most seconds of a decoding step.
        context: the mean number of tokens of a sequence in the key-value cache.
        memory_share: the share of a device's memory that weights and caches may take.

    Raises:
        ValueError: if a number is out of its range, a field of the grid is empty, or a value of ``tensor_parallel``
            exceeds the devices of a node or does not divide the model's heads and expert width.
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
            raise ValueError(f"{field.name} must have at least one value")
        for value in values:
            check_integer(field.name, value, least=1)
    node = min(clusters.attention.node_ranks, clusters.experts.node_ranks)
    for devices in grid.tensor_parallel:
        if devices > node:
            raise ValueError(f"tensor_parallel={devices} must be at most the {node} devices of a node")
        for size_name, number in (("heads", model.heads), ("expert width", model.expert_width)):
            if number is not None and number % devices:
                raise ValueError(f"tensor_parallel={devices} must divide the model's {size_name} {number}")


def _check_placements(model: Model, placements: Sequence[ExpertPlacement]) -> None:
    if not placements:
        raise ValueError("placements must have at least one placement")
    for placement in placements:
        if placement.share.shape[1] != model.num_experts:
            raise ValueError(
                f"placements: a placement has {placement.share.shape[1]} experts, but the model has {model.num_experts}"
            )
