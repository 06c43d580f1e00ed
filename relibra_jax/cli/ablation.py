"""The ablation of ReLibra: each mechanism alone, alternatives to each, and the assignment of samples in addition."""

import dataclasses
import functools

from relibra_jax.cli.planner_runs import Contender
from relibra_jax.contract.types import Topology
from relibra_jax.planning.ablation.placement_methods import place_by_descent, place_longest_first
from relibra_jax.planning.ablation.token_splits import replicate_with_eplb_places, replicate_with_even_split
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.choose_by_time import cheapest, replicate_while_hidden
from relibra_jax.planning.placement import Placement, place_experts
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import Place, keep_homes, relibra
from relibra_jax.planning.replication import without_replicas


def _for_balance_alone(place: Place) -> Place:
    """Return a placement without costs and tokens, so that its search optimizes balance and not modelled time."""
    return lambda *batch, tokens, cost, **options: place(*batch, tokens=None, cost=None, **options)


def _place_alone(load, previous_home, topology: Topology, **options) -> Placement:
    """Call `place_experts` without replica slots, so that placement alone has to even out the ranks."""
    return place_experts(load, previous_home, dataclasses.replace(topology, replica_slots=0), **options)


def _variant(summary: str, **parts) -> Contender:
    return Contender(entry=PlannerEntry(planner=relibra(**parts), summary=summary))


def ablation() -> dict[str, Contender]:
    """Return the rows of ``python -m experiments.ablation``, by name."""
    fastest = cheapest([PLANNERS[name].planner for name in ("relibra", "eplb", "lplb")])
    return {
        "static": Contender(entry=PLANNERS["static"]),
        "static + assign": Contender(entry=PLANNERS["static"], assign=assign_samples),
        "+ reorder": _variant("reordering alone", place=_place_alone, replicate=without_replicas),
        "+ replicate": _variant("replication alone", place=keep_homes),
        "relibra": Contender(entry=PLANNERS["relibra"]),
        "relibra + assign": Contender(entry=PLANNERS["relibra"], assign=assign_samples),
        "thorough": _variant(
            "a longer search, without a cost for moves",
            place=functools.partial(place_experts, steps=40_000, move_cost=0.0),
        ),
        "place for balance": _variant(
            "homes annealed for balance, not for modelled time", place=_for_balance_alone(place_experts)
        ),
        "place by descent": _variant(
            "homes for balance, by steepest descent instead of annealing",
            place=_for_balance_alone(place_by_descent),
        ),
        "place by lpt": _variant(
            "homes for balance, heaviest expert first instead of annealing",
            place=_for_balance_alone(place_longest_first),
        ),
        "places only": _variant(
            "ReLibra's replicas, with tokens split evenly over copies", replicate=replicate_with_even_split
        ),
        "splits only": _variant(
            "EPLB's replicas, with the best token split that they allow", replicate=replicate_with_eplb_places
        ),
        "eplb": Contender(entry=PLANNERS["eplb"]),
        "lplb": Contender(entry=PLANNERS["lplb"]),
        "relibra_across": Contender(entry=PLANNERS["relibra_across"]),
        "far while hidden": Contender(
            entry=PlannerEntry(
                planner=relibra(replicate=replicate_while_hidden),
                summary="replicas on any node, where attention hides their transfer in modelled time",
                across_nodes=True,
            )
        ),
        "fastest of three": Contender(
            entry=PlannerEntry(
                planner=fastest,
                summary="relibra, eplb or lplb, whichever takes least modelled time in each layer",
            )
        ),
    }
