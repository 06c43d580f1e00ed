"""Search for a deployment: the devices of attention, the devices of experts, and the micro-batches in flight.

Source: the plan search of MegaScale-Infer (arXiv 2504.02263). A deployment is feasible if its devices have enough
memory and its decoding step takes no longer than the time allowed between two tokens. The best feasible deployment
gives the most tokens per second and unit of price. The paper loops over tensor parallelism and micro-batches, and
derives the number of attention copies from a balance condition. Here the times (`experiments.deploy.costs`) and the
schedule (`experiments.deploy.ping_pong`) of all candidates are computed in one compiled evaluation, so nothing is
derived.

The paper assumes equally busy experts. Here a layer takes as long as its busiest group at recorded loads, and the step
is computed from the mean over layers. All times are modelled.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, NoReturn

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.deploy.costs import (
    attention_memory,
    attention_time,
    exchange_time,
    expert_memory,
    expert_time,
)
from experiments.deploy.ping_pong import step_time
from experiments.deploy.placements import ExpertPlacement
from experiments.deploy.serving import Grid, Serving
from relibra_jax.contract.types import Array
from relibra_jax.support.limits import check_memory

GB: Final = 1e9


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
    feasible: Bool[np.ndarray, " C"]
    """Whether each deployment fits the memory of its devices and the time between two tokens."""
    best: Deployment
    """The best feasible deployment."""
    score: Score
    """The score of the best deployment."""


def search_deployment(
    serving: Serving, placements: Sequence[ExpertPlacement], grid: Grid | None = None
) -> Search:
    """Find the feasible deployment with the most tokens per second and unit of price.

    Args:
        serving: the model, the hardware and the limits.
        placements: the placements of the experts to try. Each has its own number of groups.
        grid: the other values to try. None stands for ``Grid()``.

    Returns:
        All deployments with their scores, and the best one. Among equally good deployments, the first of the grid is
        the best.

    Raises:
        ValueError: if the grid does not fit the serving, ``placements`` is empty, a placement has a different number of
            experts than the model, or no deployment is feasible. In the last case the message names the constraint that
            is violated, and by how much.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> from experiments.deploy.placements import even_placement
    >>> serving = Serving(model=MODELS["gpt-oss-20b"], attention=CLUSTERS["h200"], experts=CLUSTERS["h100"])
    >>> search = search_deployment(serving, [even_placement(groups, 32, top_k=4) for groups in (4, 8)])
    >>> search.best.micro_batches, search.score.step <= serving.slo
    (4, True)
    """
    grid = Grid() if grid is None else grid
    grid.check(serving)
    _check_placements(serving, placements)
    candidates = _combinations(grid, len(placements), serving.model.moe_layers)
    scores = score_deployments(serving, placements, candidates)
    slots = np.array([placement.slots for placement in placements])[candidates.placement]
    in_flight = np.asarray(candidates.micro_batches, np.int64) * candidates.sequences
    needed = {
        "attention": attention_memory(in_flight, np.asarray(candidates.attention_devices), serving),
        "expert": expert_memory(slots, np.asarray(candidates.expert_devices), serving),
    }
    available = {
        "attention": serving.memory_share * serving.attention.memory,
        "expert": serving.memory_share * serving.experts.memory,
    }
    fits = np.all([needed[side] <= available[side] for side in needed], axis=0)
    feasible = fits & (np.asarray(scores.step, np.float64) <= serving.slo)
    if not feasible.any():
        _raise_infeasible(needed, available, np.asarray(scores.step)[fits], serving.slo)
    index = int(np.where(feasible, scores.per_price, -1.0).argmax())
    best, score = jax.tree.map(lambda field: field[index].item(), (candidates, scores))
    return Search(candidates, scores, feasible, best, score)


def score_deployments(
    serving: Serving, placements: Sequence[ExpertPlacement], candidates: Deployment
) -> Score:
    """Compute the modelled times and throughputs of many deployments, feasible or not, in one compiled evaluation.

    Args:
        serving: the model, the hardware and the prices.
        placements: the placements that ``candidates.placement`` refers to.
        candidates: the deployments, stacked.

    Returns:
        The scores, as float32 NumPy arrays.
    """
    # As many layers as the model has, like in a simulated step: a placement of fewer layers is repeated, and extra
    # layers are left out.
    layers = serving.model.moe_layers
    table = _PlacementNumbers(
        *(
            np.stack([np.resize(getattr(placement, name), layers) for placement in placements])
            for name in ("hottest", "sent", "received")
        ),
        *(
            np.array([getattr(placement, name) for placement in placements], np.float32)
            for name in ("groups", "slots")
        ),
    )
    index = np.asarray(candidates.placement, np.int32)
    numbers = Deployment(*(np.asarray(field, np.float32) for field in candidates))._replace(placement=index)
    return Score(*(np.asarray(field) for field in _score_all(numbers, table, serving)))


class _PlacementNumbers(NamedTuple):
    """The numbers of a placement that its score depends on, or those of all placements stacked."""

    hottest: Array
    sent: Array
    received: Array
    groups: Array
    slots: Array


@jax.jit
def _score_all(candidates: Deployment, table: _PlacementNumbers, serving: Serving) -> Score:
    def score(candidate: Deployment) -> Score:
        placement = jax.tree.map(lambda field: field[candidate.placement], table)
        return _score(candidate, placement, serving)

    return jax.vmap(score)(candidates)


def _score(deployment: Deployment, placement: _PlacementNumbers, serving: Serving) -> Score:
    """Return the score of one deployment."""
    attention_devices, attention_copies, expert_devices, _, micro_batches, sequences = deployment
    top_k = serving.model.top_k
    copies = attention_copies * sequences * top_k * placement.hottest
    sent, received = sequences * top_k * placement.sent, copies * placement.received
    attention = attention_time(sequences, attention_devices, serving)
    experts = expert_time(copies, placement.slots, expert_devices, serving).mean()
    exchange = exchange_time(sent, received, attention_devices, expert_devices, serving).mean()
    step = step_time(
        attention, experts, exchange, micro_batches=micro_batches, layers=serving.model.moe_layers
    )
    price = (
        attention_devices * attention_copies * serving.attention_price
        + expert_devices * placement.groups * serving.expert_price
    )
    throughput = micro_batches * attention_copies * sequences / step
    return Score(attention, experts, exchange, step, throughput, throughput / price)


def _combinations(grid: Grid, num_placements: int, layers: int) -> Deployment:
    """Return all deployments of a grid, stacked."""
    axes = (
        grid.tensor_parallel,
        grid.attention_copies,
        grid.tensor_parallel,
        range(num_placements),
        grid.micro_batches,
        grid.sequences,
    )
    size = math.prod(map(len, axes))
    # float32 arrays: the fields of a candidate and of its score, and token copies, rows and two times for each layer.
    check_memory(f"a grid of {size} deployments x {layers} layers", 4 * size * (24 + 4 * layers))
    columns = np.meshgrid(*(np.array(axis, np.int32) for axis in axes), indexing="ij")
    return Deployment(*(column.ravel() for column in columns))


def _check_placements(serving: Serving, placements: Sequence[ExpertPlacement]) -> None:
    if not placements:
        raise ValueError("placements must have at least one placement")
    num_experts = serving.model.num_experts
    for placement in placements:
        if placement.share.shape[1] != num_experts:
            raise ValueError(
                f"placements: a placement has {placement.share.shape[1]} experts, but the model has {num_experts}"
            )


def _raise_infeasible(
    needed: dict[str, Float[np.ndarray, " C"]],
    available: dict[str, float],
    steps: Float[np.ndarray, " fitting"],
    slo: float,
) -> NoReturn:
    """Raise the error of a search without a feasible deployment, which names the violated constraint.

    If no deployment of the grid fits the attention devices, or none fits the expert devices, memory is the violated
    constraint. The grid combines both sides freely, so if each of them fits in some deployment, both fit in another
    one, and the time between two tokens is the violated constraint.
    """
    for side, memory in available.items():
        least = float(needed[side].min())
        if least > memory:
            raise ValueError(
                f"no deployment is feasible: an {side} device needs at least {least / GB:.2f} GB but may use"
                f" {memory / GB:.2f} GB, {(least - memory) / GB:.2f} GB too few"
            )
    least = float(steps.min())
    raise ValueError(
        f"no deployment is feasible: the fastest that fits the memory takes {1e3 * least:.2f} ms between two tokens,"
        f" {least / slo - 1:.1%} more than slo={1e3 * slo:g} ms"
    )
