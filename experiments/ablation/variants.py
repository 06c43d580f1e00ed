"""ReLibra taken apart: each mechanism alone, the alternatives to each, and samples assigned on top."""

import functools

import jax

from experiments.simulate import Contender
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import keep_homes, relibra
from relibra_jax.planning.replication import without_replicas, replicate_experts


def assign(*batch, **sizes):
    """`assign_samples` with a key, which is drawn when it is called: importing this does not start JAX."""
    return assign_samples(*batch, key=jax.random.key(0), **sizes)


def _part(summary: str, **parts) -> Contender:
    return Contender(row=PlannerEntry(planner=relibra(**parts), summary=summary))


def _replicate(mode: str):
    return functools.partial(replicate_experts, mode=mode)


def _place(method: str):
    return functools.partial(place_experts, method=method)


ABLATION: dict[str, Contender] = {
    "static": Contender(row=PLANNERS["static"]),
    "static + assign": Contender(row=PLANNERS["static"], assign=assign),
    "+ reorder": _part("reordering alone", replicate=without_replicas),
    "+ replicate": _part("replication alone", place=keep_homes),
    "relibra": Contender(row=PLANNERS["relibra"]),
    "relibra + assign": Contender(row=PLANNERS["relibra"], assign=assign),
    "thorough": _part(
        "a longer search, moves free", place=functools.partial(place_experts, steps=40_000, move_cost=0.0)
    ),
    "place by descent": _part("steepest descent instead of annealing", place=_place("descent")),
    "place by lpt": _part("heaviest expert first instead of annealing", place=_place("lpt")),
    "places only": _part("ReLibra's replicas, tokens split evenly", replicate=_replicate("placement")),
    "splits only": _part("EPLB's replicas, tokens split well", replicate=_replicate("splitting")),
    "eplb": Contender(row=PLANNERS["eplb"]),
    "lplb": Contender(row=PLANNERS["lplb"]),
    "relibra_across": Contender(row=PLANNERS["relibra_across"]),
}
