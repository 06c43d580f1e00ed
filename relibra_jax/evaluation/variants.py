"""The ablation of ReLibra: each mechanism alone, alternatives to each, and the assignment of samples in addition."""

import dataclasses
import functools
from typing import Any

from relibra_jax.contract.planner import Place, Placement, PlanRequest
from relibra_jax.contract.types import BALANCE, Array, Plan, Topology
from relibra_jax.planning.ablation.placement_methods import descend, longest_first
from relibra_jax.planning.ablation.token_splits import (
    replicate_with_eplb_places,
    replicate_with_even_split,
    replicate_with_fixed_places,
)
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.bin_search import search_bins
from relibra_jax.planning.choose_by_time import cheapest
from relibra_jax.planning.placement import BinSearch, place_experts
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import keep_homes, relibra
from relibra_jax.planning.replication import replicate_experts, without_replicas


def _place_for_balance(search: BinSearch = search_bins) -> Place:
    """Return a placement for balance alone, whose search sees no routes and pays for no moves and crossings."""

    def place(request: PlanRequest, previous_home: Array, topology: Topology, *, key: Array) -> Placement:
        request = request._replace(routes=None, price=BALANCE)
        return place_experts(request, previous_home, topology, key=key, search=search)

    return place


def _place_alone(request: PlanRequest, previous_home: Array, topology: Topology, *, key: Array) -> Placement:
    """Call `place_experts` without replica slots, so that placement alone has to even out the ranks."""
    return place_experts(request, previous_home, dataclasses.replace(topology, replica_slots=0), key=key)


def replicate_nothing(request: PlanRequest, placement: Placement, topology: Topology) -> Plan:
    """Compute every expert at home; a `relibra_jax.contract.planner.Replicate`."""
    return without_replicas(request.by_expert, placement.home, topology)


def _variant(summary: str, **parts: Any) -> PlannerEntry:
    return PlannerEntry(planner=relibra(**parts), summary=summary)


def with_samples_assigned(name: str) -> PlannerEntry:
    """Return the planner of a name with samples assigned to ranks and micro-batches for it.

    Args:
        name: a name in `relibra_jax.planning.planners.PLANNERS`.
    """
    return dataclasses.replace(PLANNERS[name], assign=assign_samples)


def ablation() -> dict[str, PlannerEntry]:
    """Return each mechanism of ReLibra alone, alternatives to each, and planners to compare with, by name."""
    fastest = cheapest([PLANNERS[name].planner for name in ("relibra", "eplb", "lplb")])
    return {
        "static": PLANNERS["static"],
        "static + assign": with_samples_assigned("static"),
        "+ reorder": _variant("reordering alone", place=_place_alone, replicate=replicate_nothing),
        "+ replicate": _variant("replication alone", place=keep_homes),
        "relibra": PLANNERS["relibra"],
        "relibra + assign": with_samples_assigned("relibra"),
        "thorough": _variant("a longer search", place=functools.partial(place_experts, steps=40_000)),
        "place for balance": _variant(
            "homes annealed for balance, not for modelled time", place=_place_for_balance()
        ),
        "place by descent": _variant(
            "homes for balance, by steepest descent instead of annealing",
            place=_place_for_balance(descend),
        ),
        "place by lpt": _variant(
            "homes for balance, heaviest expert first instead of annealing",
            place=_place_for_balance(longest_first),
        ),
        "places only": _variant(
            "ReLibra's replicas, with tokens split evenly over copies", replicate=replicate_with_even_split
        ),
        "splits only": _variant(
            "EPLB's replicas, with the best token split that they allow", replicate=replicate_with_eplb_places
        ),
        "splits over fixed places": _variant(
            "EPLB's replicas of all micro-batches, at most eight at a time, with the best token split in each",
            replicate=replicate_with_fixed_places,
        ),
        "eplb": PLANNERS["eplb"],
        "lplb": PLANNERS["lplb"],
        "replicas inside": _variant(
            "replicas inside nodes, even if others take less time", replicate=replicate_experts
        ),
        "fastest of three": PlannerEntry(
            planner=fastest,
            summary="relibra, eplb or lplb, whichever takes least modelled time in each layer",
        ),
    }
