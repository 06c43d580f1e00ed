"""Strategies of balancing: what is known beforehand, what is done with it, and the slots that it takes."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from relibra_jax.cli.ablation import ablation, assign
from relibra_jax.cli.modelled_time import CostModel
from relibra_jax.cli.planner_runs import Contender
from relibra_jax.planning.planners import PLANNERS


class Strategy(NamedTuple):
    """One way to balance."""

    name: str
    """What is done."""
    foresight: str
    """The loads that are known: ``none``, the ``history``, those of the ``batch``, or of every ``micro-batch``."""
    contender: Contender
    """What does it."""
    replica_slots: int
    """The replica slots of a rank R."""
    resident_slots: int
    """The resident slots of a rank B."""

    @property
    def label(self) -> str:
        """The name with its slots."""
        return f"{self.name}, R={self.replica_slots} B={self.resident_slots}"


def strategies(
    cost_model: CostModel, *, replica_slots: Sequence[int], resident_slots: Sequence[int]
) -> list[Strategy]:
    """All strategies; the first one does nothing.

    Args:
        cost_model: what contenders price with that choose by modelled time.
        replica_slots: the numbers of replica slots to try.
        resident_slots: the numbers of resident slots to try.
    """
    parts = ablation(cost_model)
    relibra = PLANNERS["relibra"]
    both, assigned = Contender(entry=relibra), Contender(entry=relibra, assign=assign)
    replicas, residents = sorted(set(replica_slots) - {0}), sorted(set(resident_slots) - {0})
    found = [
        Strategy("nothing", "none", Contender(entry=PLANNERS["static"]), 0, 0),
        Strategy("reorder", "batch", parts["+ reorder"], 0, 0),
    ]
    for slots in replicas:
        found += [
            Strategy(
                "place once, replicate once", "history", Contender(entry=PLANNERS["eplb_history"]), slots, 0
            ),
            Strategy(
                "place once, replicate once", "batch", Contender(entry=PLANNERS["eplb_batch"]), slots, 0
            ),
            Strategy("replicate", "micro-batch", parts["+ replicate"], slots, 0),
            Strategy("reorder, replicate", "micro-batch", both, slots, 0),
            Strategy("reorder, replicate, assign", "micro-batch", assigned, slots, 0),
        ]
    found += [Strategy("reorder, residents", "micro-batch", both, 0, slots) for slots in residents]
    for each, held in itertools.product(replicas, residents):
        found += [
            Strategy("reorder, replicate, residents", "micro-batch", both, each, held),
            Strategy("all, and assign", "micro-batch", assigned, each, held),
        ]
    return found
