"""The rows of the claims by name: each a planner, how samples are assigned, and its number of resident slots."""

from typing import Final

from relibra_jax.evaluation import ablation
from relibra_jax.evaluation.variants import with_samples_assigned
from relibra_jax.planning.planners import PLANNERS, PlannerEntry

WITH_RESIDENTS: Final = "relibra, residents"
WITH_ALL: Final = "relibra, residents, assigned"
ASSIGNED: Final = "relibra + assign"
HEADLINE: Final = (
    *("static", "popfetcher", "popfetcher_even", "eplb", "eplb_repacked", "lplb", "lplb_repacked", "ultraep"),
    *("moonep", "laer"),
    *("relibra", WITH_RESIDENTS, WITH_ALL),
)
"""The rows of the headline claims."""
MORE_PLANNERS: Final = tuple(name for name in PLANNERS if name not in HEADLINE)
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
    "splits over fixed places",
)
"""The parts of ReLibra alone, and alternatives to them."""


RESIDENT_SLOTS: Final = {WITH_RESIDENTS: 1, WITH_ALL: 1}
"""The number of resident slots on each rank, for the rows that have any."""


def entries() -> dict[str, PlannerEntry]:
    """Return the planner of every row, by name."""
    own = {WITH_RESIDENTS: PLANNERS["relibra"], WITH_ALL: with_samples_assigned("relibra")}
    return PLANNERS | ablation() | own


def is_reconstruction(name: str) -> bool:
    """Return whether the planner of a row was implemented from its publication alone, without its source code."""
    return name in PLANNERS and PLANNERS[name].reconstruction
