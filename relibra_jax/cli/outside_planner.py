"""Import of a user's own planner, named on the command line as ``my_module:my_planner``."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import Plan, Topology
from relibra_jax.planning.baselines.forecasts import FORECASTS
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.support.outside import error_place, import_outside
from relibra_jax.support.suggestions import suggest_names


def import_planner(name: str) -> PlannerEntry:
    """Import a planner by its name.

    Args:
        name: the name, written ``module:attribute``. The module is searched in the current folder and on Python's path.
            The attribute is a `Planner`, a `PlannerEntry` (needed if replicas may cross nodes), or a function without
            arguments that returns one of them.

    Returns:
        The planner's entry. Its functions raise ValueError if the planner's raise an error, and ``update`` if the
        planner does not return ``(Plan, state)``.

    Raises:
        ValueError: if the name is not written ``module:attribute``, there is no such module or attribute, the
            attribute is not a planner, or it is a function that raises an error.
    """
    planner = import_outside("planner", name)
    if callable(planner) and not isinstance(planner, Planner):
        _check_takes_nothing(name, planner)
        try:
            planner = planner()
        except (Exception, SystemExit) as error:
            raise ValueError(f"planner {name!r} raised {error_place(error)}") from error
    if isinstance(planner, PlannerEntry):
        if planner.forecast not in FORECASTS:
            raise ValueError(
                f"planner {name!r}: forecast={planner.forecast!r} must be one of {', '.join(FORECASTS)}"
                + suggest_names(planner.forecast, FORECASTS)
            )
        return PlannerEntry(**{**vars(planner), "planner": _with_errors(name, planner.planner)})
    if not isinstance(planner, Planner):
        raise ValueError(
            f"planner {name!r} has type {type(planner).__name__}; it must be a Planner or a PlannerEntry, or a function"
            " without arguments that returns one"
        )
    return PlannerEntry(planner=_with_errors(name, planner), summary=f"user planner {name}")


def _check_takes_nothing(name: str, function: Callable[..., Any]) -> None:
    """Raise ValueError if a function cannot be called without arguments, as far as its signature tells."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # builtins may have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ValueError(f"planner {name!r} cannot be called without arguments: {error}") from error


def _with_errors(name: str, planner: Planner) -> Planner:
    """Make the functions of a planner name it in their errors, and ``update`` check what it returns."""
    functions = {part: getattr(planner, part) for part in ("init", "update", "reorder", "replicate")}
    named: dict[str, Any] = {
        part: _with_named_errors(f"planner {name!r}: {part}", function)
        for part, function in functions.items()
        if function is not None
    }
    return _with_checked_result(name, planner._replace(**named))


def _with_named_errors(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function raise its errors as ValueError that begins with ``place``."""

    @functools.wraps(function)
    def named(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            raise ValueError(f"{place} raised {error_place(error)}") from error

    return named


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
