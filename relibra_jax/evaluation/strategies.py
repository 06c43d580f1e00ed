"""The balancing strategies: what each does, the loads that it plans from, and the slots that it uses."""

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from relibra_jax.evaluation.variants import ablation, with_samples_assigned
from relibra_jax.planning.planners import PLANNERS, PlannerEntry

REPLICATE: Final = "replicate"


class Strategy(NamedTuple):
    """One balancing strategy."""

    name: str
    """The name, which says what the strategy does."""
    foresight: str
    """The loads that it plans from: ``none``, the ``history``, those of the ``batch``, or of every ``micro-batch``."""
    entry: PlannerEntry
    """The planner, and how samples are assigned."""
    replica_slots: int
    """The number of replica slots on each rank, R."""
    resident_slots: int
    """The number of resident slots on each rank, B."""

    @property
    def runs(self) -> bool:
        """Whether a run can use it. Replicas alone, with experts at their first homes, are for comparison."""
        return self.name != REPLICATE

    @property
    def label(self) -> str:
        """The name, with the numbers of slots if the strategy uses any."""
        if not self.replica_slots and not self.resident_slots:
            return self.name
        return f"{self.name}, R={self.replica_slots} B={self.resident_slots}"


def strategies(*, replica_slots: Sequence[int], resident_slots: Sequence[int]) -> list[Strategy]:
    """Make all strategies. The first one does nothing.

    Args:
        replica_slots: the numbers of replica slots on each rank to try.
        resident_slots: the numbers of resident slots on each rank to try.
    """
    parts = ablation()
    both, with_samples = PLANNERS["relibra"], with_samples_assigned("relibra")
    replicas, residents = sorted(set(replica_slots) - {0}), sorted(set(resident_slots) - {0})
    tried = [
        Strategy("nothing", "none", PLANNERS["static"], 0, 0),
        Strategy("reorder", "batch", parts["+ reorder"], 0, 0),
    ]
    for slots in replicas:
        tried += [
            Strategy("place once, replicate once", "history", PLANNERS["eplb_history"], slots, 0),
            Strategy("place once, replicate once", "batch", PLANNERS["eplb_batch"], slots, 0),
            Strategy(REPLICATE, "micro-batch", parts["+ replicate"], slots, 0),
            Strategy("reorder, replicate", "micro-batch", both, slots, 0),
            Strategy("reorder, replicate, assign", "micro-batch", with_samples, slots, 0),
        ]
    tried += [Strategy("reorder, residents", "micro-batch", both, 0, slots) for slots in residents]
    for replica, resident in itertools.product(replicas, residents):
        tried += [
            Strategy("reorder, replicate, residents", "micro-batch", both, replica, resident),
            Strategy("all, and assign", "micro-batch", with_samples, replica, resident),
        ]
    return tried
