"""A planner from outside the table: ``my_module:my_planner`` on the command line."""

import functools
from typing import Any

from relibra_jax.cli.outside import import_outside
from relibra_jax.planning.baselines.forecasts import FORECASTS
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.suggestions import suggest_names
from relibra_jax.types import Plan, Planner


def import_planner(name: str) -> PlannerEntry:
    """Import a planner by its name.

    Args:
        name: ``module:attribute``. The module is looked for in the current folder and where Python finds modules. The
            attribute is a `Planner`, a `PlannerEntry` where replicas may cross nodes, or a function without arguments
            that returns one of them.

    Returns:
        The planner's entry. A plan of another type than `Plan` is refused when the planner runs.

    Raises:
        ValueError: if the name is of another form, there is no such module or attribute, or it is no planner.
    """
    found = import_outside("planner", name)
    if callable(found) and not isinstance(found, Planner):
        try:
            found = found()
        except TypeError as error:
            raise ValueError(f"planner {name!r} cannot be called without arguments: {error}") from error
    if isinstance(found, PlannerEntry):
        if found.forecast not in FORECASTS:
            raise ValueError(
                f"planner {name!r}: forecast={found.forecast!r} must be one of {', '.join(FORECASTS)}"
                + suggest_names(found.forecast, FORECASTS)
            )
        return PlannerEntry(**{**vars(found), "planner": _checked(name, found.planner)})
    if not isinstance(found, Planner):
        raise ValueError(
            f"planner {name!r} is a {type(found).__name__}: expected a Planner or a PlannerEntry, or a function without"
            " arguments that returns one"
        )
    return PlannerEntry(planner=_checked(name, found), summary=f"from outside: {name}")


def _checked(name: str, planner: Planner) -> Planner:
    """The planner, held to what its ``update`` returns. What is in the plan, `check_plan` looks at after it ran."""

    @functools.wraps(planner.update)
    def update(load: Any, state: Any, topology: Any, **extra: Any) -> tuple[Plan, Any]:
        result = planner.update(load, state, topology, **extra)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Plan):
            kinds = (
                f"({', '.join(type(part).__name__ for part in result)})"
                if type(result) is tuple
                else type(result).__name__
            )
            raise ValueError(f"planner {name!r}: update must return (Plan, state), not {kinds}")
        return result

    return Planner(planner.init, update)
