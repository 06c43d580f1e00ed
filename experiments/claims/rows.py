"""The rows of the claims by name: each a planner, how samples are assigned, and its number of resident slots."""

from typing import Final, NamedTuple

from relibra_jax.cli.ablation import ablation
from relibra_jax.cli.planner_runs import Contender
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.planners import PLANNERS

WITH_RESIDENTS: Final = "relibra, residents"
WITH_ALL: Final = "relibra, residents, assigned"
ASSIGNED: Final = "relibra + assign"
HEADLINE: Final = (
    *("static", "popfetcher", "eplb", "eplb_repacked", "lplb", "lplb_repacked", "ultraep", "moonep", "laer"),
    *("relibra", WITH_RESIDENTS, WITH_ALL),
)
"""The rows of the headline claims."""
MORE_PLANNERS: Final = tuple(name for name in PLANNERS if name not in ("relibra_across", *HEADLINE))
"""The baselines that the headline claims do not include."""
PARTS: Final = (
    "+ reorder",
    "+ replicate",
    "static + assign",
    ASSIGNED,
    "place for balance",
    "place by lpt",
    "places only",
    "splits only",
)
"""The parts of ReLibra alone, and alternatives to them."""


class Row(NamedTuple):
    """One row of the claims."""

    contender: Contender
    """The planner, and how samples are assigned for it."""
    resident_slots: int = 0
    """The number of resident slots on each rank."""


def contenders() -> dict[str, Row]:
    """Make all rows, by name."""
    rows = {name: Row(Contender(entry=entry)) for name, entry in PLANNERS.items()}
    rows |= {name: Row(contender) for name, contender in ablation().items()}
    relibra = PLANNERS["relibra"]
    rows[WITH_RESIDENTS] = Row(Contender(entry=relibra), resident_slots=1)
    rows[WITH_ALL] = Row(Contender(entry=relibra, assign=assign_samples), resident_slots=1)
    return rows
