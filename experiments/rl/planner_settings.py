"""The planner settings of a run: how ReLibra's planners place and replicate experts, and how samples are assigned."""

import dataclasses
import functools
from typing import Final

from relibra_jax.planning.assignment import Assign, assign_samples
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts

TUNABLE: Final = ("relibra", "relibra_across")
"""The planners that take `Reorder` and `Replicate`. The variants of all others are planners with names of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reorder:
    """How ReLibra's planners place experts between batches (`relibra_jax.planning.placement.place_experts`)."""

    steps: int = 500
    """The number of search steps in each round. More experts and layers need more steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicate:
    """How ReLibra's planners replicate experts in a batch (`relibra_jax.planning.replication.replicate_experts`)."""

    min_tokens: int = 1
    """The minimum number of token copies that a replica computes."""
    tile: int = 1
    """The number of token copies in a tile. Replicas compute whole tiles."""
    exact: bool = False
    """Whether to bring all ranks of a domain within one tile of each other, instead of only relieving the fullest."""


@functools.cache
def tuned_planner(name: str, reorder: Reorder, replicate: Replicate) -> PlannerEntry:
    """Return a planner of `TUNABLE` with its settings. Equal settings give the same object, so jit compiles once."""
    entry = PLANNERS[name]
    place = functools.partial(place_experts, **dataclasses.asdict(reorder))
    options = {"across_nodes": entry.across_nodes, **dataclasses.asdict(replicate)}
    planner = relibra(place=place, replicate=functools.partial(replicate_experts, **options))
    return dataclasses.replace(entry, planner=planner)


@functools.cache
def annealed(steps: int) -> Assign:
    """Return the assignment of samples with a number of annealing steps. Equal numbers give the same object."""
    return functools.partial(assign_samples, steps=steps)
