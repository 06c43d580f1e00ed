"""What a run can tell its planner: how ReLibra's planners place and replicate experts, and how samples are assigned."""

import dataclasses
import functools
from typing import Final

from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.planning.turns import Assign

TUNABLE: Final = ("relibra", "relibra_across")
"""Planners that take `Reorder` and `Replicate`; the variants of the others are planners of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reorder:
    """How ReLibra's planners place experts between batches: `relibra_jax.planning.placement.place_experts`."""

    steps: int = 500
    """The steps of the search in each of its turns; more experts and layers want more."""
    move_cost: float = 0.02
    """The imbalance that moving all experts must gain."""
    crossing_cost: float = 0.3
    """The imbalance worth accepting for no token copy to cross nodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicate:
    """How ReLibra's planners copy experts inside a batch: `relibra_jax.planning.replication.replicate_experts`."""

    min_tokens: int = 1
    """The fewest token copies that are worth a replica."""
    tile: int = 1
    """The token copies of a tile; replicas compute whole tiles."""
    exact: bool = False
    """Whether all ranks of a domain are brought within one tile of each other, not just the fullest down."""


@functools.cache
def tuned_planner(name: str, reorder: Reorder, replicate: Replicate) -> PlannerEntry:
    """The planner of a name in `TUNABLE` with its settings; the same object for equal ones, as jit wants it."""
    entry = PLANNERS[name]
    place = functools.partial(place_experts, **dataclasses.asdict(reorder))
    options = {"across_nodes": entry.across_nodes, **dataclasses.asdict(replicate)}
    planner = relibra(place=place, replicate=functools.partial(replicate_experts, **options))
    return dataclasses.replace(entry, planner=planner)


@functools.cache
def annealed(steps: int) -> Assign:
    """How samples are assigned in so many steps; the same object for equal numbers."""
    return functools.partial(assign_samples, steps=steps)
