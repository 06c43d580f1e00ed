"""Import of a user's own planner, named on the command line as ``my_module:my_planner``."""

import functools
from typing import Any

from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import Plan, Topology
from relibra_jax.planning.baselines.forecasts import FORECASTS
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.support.outside import import_outside
from relibra_jax.support.suggestions import suggest_names


def import_planner(name: str) -> PlannerEntry:
    """Import a planner by its name.

    Args:
        name: the name, written ``module:attribute``. The module is searched in the current folder and on Python's path.
            The attribute is a `Planner`, a `PlannerEntry` (needed if replicas may cross nodes), or a function without
            arguments that returns one of them.

    Returns:
        The planner's entry. Its ``update`` raises ValueError if the planner does not return ``(Plan, state)``.

    Raises:
        ValueError: if the name is not written ``module:attribute``, there is no such module or attribute, or the
            attribute is not a planner.
    """
    planner = import_outside("planner", name)
    if callable(planner) and not isinstance(planner, Planner):
        try:
            planner = planner()
        except TypeError as error:
            raise ValueError(f"planner {name!r} cannot be called without arguments: {error}") from error
    if isinstance(planner, PlannerEntry):
        if planner.forecast not in FORECASTS:
            raise ValueError(
                f"planner {name!r}: forecast={planner.forecast!r} must be one of {', '.join(FORECASTS)}"
                + suggest_names(planner.forecast, FORECASTS)
            )
        return PlannerEntry(**{**vars(planner), "planner": _with_checked_result(name, planner.planner)})
    if not isinstance(planner, Planner):
        raise ValueError(
            f"planner {name!r} has type {type(planner).__name__}; it must be a Planner or a PlannerEntry, or a function"
            " without arguments that returns one"
        )
    return PlannerEntry(planner=_with_checked_result(name, planner), summary=f"user planner {name}")


def _with_checked_result(name: str, planner: Planner) -> Planner:
    """Make ``update`` raise if it does not return a plan and a state. `check_plan` checks the plan itself later."""

    @functools.wraps(planner.update)
    def update(request: PlanRequest, state: Any, topology: Topology) -> tuple[Plan, Any]:
        result = planner.update(request, state, topology)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Plan):
            kinds = (
                f"({', '.join(type(part).__name__ for part in result)})"
                if type(result) is tuple
                else type(result).__name__
            )
            raise ValueError(f"planner {name!r}: update must return (Plan, state), not {kinds}")
        return result

    return planner._replace(update=update)
