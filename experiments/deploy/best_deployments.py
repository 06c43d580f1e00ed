"""The rows of ``relibra deploy``: experts assumed equally busy, placed contiguously, or placed by a plan."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int, Integer

from experiments.deploy.deployments import Clusters, Deployment, Grid, Search, search_deployment
from experiments.deploy.drawn_batches import draw_micro_batches
from experiments.deploy.expert_devices import (
    ExpertPlacement,
    contiguous_placement,
    even_placement,
    merge_rows,
    plan_placement,
)
from experiments.deploy.simulated_step import SimulatedStep, simulate_deployment
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.cost.models import Model


class Terms(NamedTuple):
    """The conditions under which every row is searched and simulated."""

    model: Model
    """The sizes of the model, with the trace's number of experts and top-k."""
    clusters: Clusters
    """The hardware and prices of the attention and expert devices."""
    grid: Grid
    """The deployments to try."""
    slo: float
    """The most seconds between two tokens of a sequence."""
    context: float
    """The mean number of tokens of a sequence in the key-value cache."""
    memory_share: float
    """The share of a device's memory that weights and caches may take."""
    seed: int
    """The seed of the placement search and of the simulated step."""


class Row(NamedTuple):
    """One assumption about the experts, and the best deployment under it."""

    experts: str
    """The assumption: equally busy experts, contiguous placement, or planned placement."""
    placement: ExpertPlacement
    """The placement with which the best deployment is simulated."""
    search: Search
    """The search, with the best deployment."""
    simulated: SimulatedStep
    """A simulated step of the best deployment, with loads that the search has not seen."""
    slo: float
    """The most seconds between two tokens of a sequence that the search allowed."""

    @property
    def batch(self) -> int:
        """The number of sequences in flight in the best deployment."""
        best = self.search.best
        return int(best.micro_batches * best.sequences * best.attention_copies)

    @property
    def simulated_per_price(self) -> float:
        """Tokens per second and unit of price in the simulated step."""
        score = self.search.score
        return float(score.per_price * score.step / self.simulated.schedule.seconds)

    @property
    def simulated_within_slo(self) -> bool:
        """Whether the simulated step takes at most ``slo`` seconds."""
        return float(self.simulated.schedule.seconds) <= self.slo


def make_rows(
    terms: Terms,
    load: Int[np.ndarray, "L E"],
    routes: Integer[np.ndarray, "Q L K"],
    second_half: RoutingReplay,
    *,
    groups: Sequence[int],
    replica_slots: Sequence[int],
    progress: Callable[[], None],
) -> list[Row]:
    """Search for the best deployment with even, contiguous and planned experts, and simulate a step of each.

    Args:
        terms: the conditions that all rows share.
        load: token copies of each expert in the first half of the trace, by which experts are placed.
        routes: the experts of some tokens of the first half.
        second_half: the routing of the second half, from which the simulated steps are drawn.
        groups: the numbers of groups of expert devices to try.
        replica_slots: the numbers of replica slots to try for planned placements.
        progress: a function that is called for every planned placement.

    Returns:
        One row for each assumption. The deployment that assumes even experts is simulated with contiguous placement.
        The planned row may also choose contiguous placement, because planned placement considers what groups compute
        and not what is sent to them.

    Raises:
        ValueError: if the numbers do not fit each other, or no deployment is feasible.
    """
    key = jax.random.key(terms.seed)
    even = [even_placement(each, load.shape[-1], top_k=terms.model.top_k) for each in groups]
    contiguous = [merge_rows(contiguous_placement(load, each), routes) for each in groups]
    planned = []
    for each in groups:
        for slots in replica_slots:
            if slots and each == 1:
                continue  # a single group already holds every expert
            placement = plan_placement(load, each, replica_slots=slots, key=key)
            planned.append(merge_rows(placement, routes))
            progress()
    if not planned:
        raise ValueError(
            f"replica_slots={tuple(replica_slots)} with expert_groups={tuple(groups)} leaves no placement to try:"
            " replicas need at least two groups"
        )
    return [
        _make_row(name, terms, searched, simulated, second_half)
        for name, searched, simulated in (
            ("even (assumed)", even, contiguous),
            ("contiguous", contiguous, contiguous),
            ("planned", [*contiguous, *planned], [*contiguous, *planned]),
        )
    ]


def _make_row(
    name: str,
    terms: Terms,
    searched: Sequence[ExpertPlacement],
    simulated: Sequence[ExpertPlacement],
    second_half: RoutingReplay,
) -> Row:
    """Search with the placements ``searched``, and simulate the best deployment with its placement in ``simulated``."""
    model, clusters = terms.model, terms.clusters
    search = search_deployment(
        model,
        clusters,
        searched,
        slo=terms.slo,
        context=terms.context,
        grid=terms.grid,
        memory_share=terms.memory_share,
    )
    best: Deployment = search.best
    load = draw_micro_batches(
        second_half,
        num_experts=model.num_experts,
        sequences=int(best.sequences * best.attention_copies),
        micro_batches=int(best.micro_batches),
        layers=model.moe_layers,
        seed=terms.seed,
    )
    placement = simulated[int(best.placement)]
    step = simulate_deployment(model, clusters, placement, best, load, context=terms.context)
    return Row(name, placement, search, step, terms.slo)


class InFlight(NamedTuple):
    """Tokens per second and unit of price at one number of micro-batches in flight."""

    micro_batches: int
    """The number of micro-batches in flight."""
    same: float
    """The throughput per price of the best deployment of all, with only this number changed, feasible or not."""
    best: float | None
    """The throughput per price of the best feasible deployment with this number; None if no deployment is feasible."""


def over_micro_batches(search: Search) -> list[InFlight]:
    """Compute the throughput per price at every number of micro-batches in flight, in ascending order.

    Args:
        search: a finished search.
    """
    candidates = Deployment(*map(np.asarray, search.candidates))
    matches = [
        getattr(candidates, name) == getattr(search.best, name)
        for name in Deployment._fields
        if name != "micro_batches"
    ]
    otherwise_equal, per_price = np.all(matches, axis=0), np.asarray(search.scores.per_price)
    points = []
    for number in np.unique(candidates.micro_batches):
        has_number = candidates.micro_batches == number
        fitting = per_price[has_number & search.feasible]
        best = float(fitting.max()) if fitting.size else None
        points.append(InFlight(int(number), float(per_price[has_number & otherwise_equal][0]), best))
    return points
