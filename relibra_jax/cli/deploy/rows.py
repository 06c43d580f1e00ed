"""What the experts are taken to be, as rows of a table: equally busy, where they are by number, or placed by plan."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int, Integer

from relibra_jax.cost.models import Model
from relibra_jax.serving.deployments import Clusters, Deployment, Grid, Search, search_deployment
from relibra_jax.serving.drawn_batches import draw_micro_batches
from relibra_jax.serving.expert_devices import (
    ExpertPlacement,
    contiguous_placement,
    even_placement,
    merge_rows,
    plan_placement,
)
from relibra_jax.serving.simulated_step import SimulatedStep, simulate_deployment
from relibra_jax.types import RoutingReplay


class Terms(NamedTuple):
    """What every row is searched and simulated under."""

    model: Model
    """With the trace's number of experts and top-k."""
    clusters: Clusters
    grid: Grid
    slo: float
    """The most seconds between two tokens."""
    context: float
    """The mean tokens of a sequence in the cache."""
    memory_share: float
    """The part of a device's memory that weights and caches may take."""
    seed: int


class Row(NamedTuple):
    """One way to look at the experts, and what comes of it."""

    experts: str
    """What the search takes them to be."""
    placement: ExpertPlacement
    """That of the best deployment, as it is run."""
    search: Search
    simulated: SimulatedStep
    """A step of the best deployment with loads that the search has not seen."""
    slo: float
    """The most seconds between two tokens for which it was searched."""

    @property
    def batch(self) -> int:
        """The sequences in flight of the best deployment."""
        best = self.search.best
        return int(best.micro_batches * best.sequences * best.attention_copies)

    @property
    def simulated_per_price(self) -> float:
        """Tokens a second for each unit of price in the simulated step."""
        score = self.search.score
        return float(score.per_price * score.step / self.simulated.schedule.seconds)

    @property
    def simulated_within_slo(self) -> bool:
        """Whether the simulated step stays within the time between two tokens for which the row was searched."""
        return float(self.simulated.schedule.seconds) <= self.slo


def make_rows(
    terms: Terms,
    load: Int[np.ndarray, "L E"],
    routes: Integer[np.ndarray, "Q L K"],
    following: RoutingReplay,
    *,
    groups: Sequence[int],
    replica_slots: Sequence[int],
    progress: Callable[[], None],
) -> list[Row]:
    """Search with experts taken as even, contiguous and planned, and run what wins with the routing that follows.

    Args:
        terms: what all rows share.
        load: token copies of each expert in the last batch, from which experts are placed.
        routes: the experts of some of its tokens.
        following: the batch after it, from which the simulated steps draw.
        groups: the numbers of groups of expert devices to try.
        replica_slots: the numbers of replica slots to try where experts are planned.
        progress: called for every placement that is planned.

    Returns:
        A row for each. Experts taken as even are run where they are by number, and a plan may leave them there, because
        planned placement looks at what groups compute, not at what travels to them.

    Raises:
        ValueError: if the numbers do not fit each other, or nothing is feasible.
    """
    key = jax.random.key(terms.seed)
    even = [even_placement(each, load.shape[-1], top_k=terms.model.top_k) for each in groups]
    contiguous = [merge_rows(contiguous_placement(load, each), routes) for each in groups]
    planned = []
    for each in groups:
        for slots in replica_slots:
            if slots and each == 1:
                continue  # one group holds every expert already
            placed = plan_placement(load, each, replica_slots=slots, key=key)
            planned.append(merge_rows(placed, routes))
            progress()
    if not planned:
        raise ValueError(
            f"replica_slots={tuple(replica_slots)} and expert_groups={tuple(groups)} leave nothing to plan"
        )
    return [
        _make_row(name, terms, searched, run, following)
        for name, searched, run in (
            ("even (assumed)", even, contiguous),
            ("contiguous", contiguous, contiguous),
            ("planned", [*contiguous, *planned], [*contiguous, *planned]),
        )
    ]


def _make_row(
    name: str,
    terms: Terms,
    searched: Sequence[ExpertPlacement],
    run: Sequence[ExpertPlacement],
    following: RoutingReplay,
) -> Row:
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
        following,
        num_experts=model.num_experts,
        sequences=int(best.sequences * best.attention_copies),
        micro_batches=int(best.micro_batches),
        layers=model.moe_layers,
        seed=terms.seed,
    )
    placement = run[int(best.placement)]
    simulated = simulate_deployment(model, clusters, placement, best, load, context=terms.context)
    return Row(name, placement, search, simulated, terms.slo)


class InFlight(NamedTuple):
    """Tokens a second for each unit of price with so many micro-batches in flight."""

    micro_batches: int
    same: float
    """Of the best deployment with this number instead of its own, whether it is feasible then or not."""
    best: float | None
    """Of the best feasible deployment with this number; None if none fits."""


def over_micro_batches(search: Search) -> list[InFlight]:
    """What micro-batches in flight are worth, in the order of their number.

    Args:
        search: a search.
    """
    candidates = Deployment(*map(np.asarray, search.candidates))
    others = [
        getattr(candidates, name) == getattr(search.best, name)
        for name in Deployment._fields
        if name != "micro_batches"
    ]
    same, per_price = np.all(others, axis=0), np.asarray(search.scores.per_price)
    points = []
    for number in np.unique(candidates.micro_batches):
        here = candidates.micro_batches == number
        fitting = per_price[here & search.feasible]
        best = float(fitting.max()) if fitting.size else None
        points.append(InFlight(int(number), float(per_price[here & same][0]), best))
    return points
