"""The best deployments under three assumptions: equally busy experts, contiguous placement, and planned placement."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import jax
import numpy as np

from experiments.deploy.deployments import Deployment, Search, search_deployment
from experiments.deploy.placements import (
    ExpertPlacement,
    contiguous_placement,
    even_placement,
    merge_rows,
    plan_placement,
)
from experiments.deploy.serving import Grid, Serving
from experiments.deploy.simulated_step import SimulatedStep, draw_micro_batches, simulate_deployment
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import RoutingReplay

MOST_TOKENS: Final = 8192
"""The most tokens that are used to count how often a token has several experts in one group."""


class BestDeployment(NamedTuple):
    """The best deployment under one assumption about the experts."""

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
        """The number of sequences in flight."""
        best = self.search.best
        return int(best.micro_batches * best.sequences * best.attention_copies)

    @property
    def busiest(self) -> float:
        """The token copies of the busiest group over those of the mean group, at the loads that it was planned from."""
        return float(self.placement.groups * self.placement.hottest.mean())

    @property
    def simulated_per_price(self) -> float:
        """Tokens per second and unit of price in the simulated step."""
        score = self.search.score
        return float(score.per_price * score.step / self.simulated.schedule.seconds)

    @property
    def simulated_within_slo(self) -> bool:
        """Whether the simulated step takes at most ``slo`` seconds."""
        return float(self.simulated.schedule.seconds) <= self.slo


def find_best_deployments(
    serving: Serving,
    grid: Grid,
    before: RoutingReplay,
    after: RoutingReplay,
    *,
    groups: Sequence[int],
    replica_slots: Sequence[int],
    seed: int,
    progress: Callable[[], None],
) -> list[BestDeployment]:
    """Search for the best deployment with even, contiguous and planned experts, and simulate a step of each.

    Args:
        serving: the model, with the number of experts and top-k of the replays, the hardware and the limits.
        grid: the deployments to try.
        before: the routing by which experts are placed.
        after: the routing from which the simulated steps are drawn.
        groups: the numbers of groups of expert devices to try.
        replica_slots: the numbers of replica slots to try for planned placements.
        seed: the seed of the placement search and of the simulated steps.
        progress: a function that is called for every planned placement.

    Returns:
        The best deployment under each assumption. The one that assumes even experts is simulated with contiguous
        placement. The planned one may also have contiguous placement, because planned placement considers what groups
        compute and not what is sent to them.

    Raises:
        ValueError: if the numbers do not fit each other, or no deployment is feasible.
    """
    num_experts = serving.model.num_experts
    load = np.asarray(sample_load(before, num_experts=num_experts)).sum(0)
    routes = np.asarray(before.expert_ids)[np.asarray(before.mask)]
    routes = routes[:: -(-len(routes) // MOST_TOKENS)]
    even = [even_placement(number, num_experts, top_k=serving.model.top_k) for number in groups]
    contiguous = [merge_rows(contiguous_placement(load, number), routes) for number in groups]
    sizes = [(number, slots) for number in groups for slots in replica_slots if number > 1 or not slots]
    if not sizes:
        raise ValueError(
            f"replica_slots={tuple(replica_slots)} with expert_groups={tuple(groups)} leaves no placement to try:"
            " replicas need at least two groups"
        )
    planned = []
    for number, slots in sizes:
        placement = plan_placement(load, number, replica_slots=slots, key=jax.random.key(seed))
        planned.append(merge_rows(placement, routes))
        progress()
    found = []
    for experts, searched, real in (
        ("even (assumed)", even, contiguous),
        ("contiguous", contiguous, contiguous),
        ("planned", [*contiguous, *planned], [*contiguous, *planned]),
    ):
        search = search_deployment(serving, searched, grid)
        placement = real[int(search.best.placement)]
        simulated = _simulate(serving, placement, search.best, after, seed)
        found.append(BestDeployment(experts, placement, search, simulated, serving.slo))
    return found


def _simulate(
    serving: Serving, placement: ExpertPlacement, best: Deployment, routing: RoutingReplay, seed: int
) -> SimulatedStep:
    load = draw_micro_batches(
        routing,
        num_experts=serving.model.num_experts,
        sequences=int(best.sequences * best.attention_copies),
        micro_batches=int(best.micro_batches),
        layers=serving.model.moe_layers,
        seed=seed,
    )
    return simulate_deployment(serving, placement, best, load)


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
