"""Extra arguments of planners, in the manner of optax: given to all, taken by those that have a use for them."""

import inspect
from collections.abc import Callable
from typing import Any

from relibra_jax.types import Planner


def with_extra_args(planner: Planner) -> Planner:
    """A planner whose ``update`` takes every extra argument, and leaves out those that ``planner`` does not name.

    Source: ``optax.with_extra_args_support``.

    Args:
        planner: any planner, whatever extra arguments its ``update`` names.

    Returns:
        ``planner`` itself if it takes them all, else a planner around it.

    >>> plain = Planner(lambda topology, num_layers, *, key: (), lambda load, state, topology: (load, state))
    >>> with_extra_args(plain).update(5, (), None, refine=None, tokens=None)
    (5, ())
    """
    if takes_all(planner.update):
        return planner

    def update(load: Any, state: Any, topology: Any, **extra: Any) -> tuple[Any, Any]:
        return planner.update(load, state, topology, **taken_by(planner.update, extra))

    return Planner(planner.init, update)


def taken_by(function: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Of the extra arguments, those that a function names, or all if it takes any.

    >>> taken_by(lambda load, *, cost: None, {"cost": 1, "tokens": 2})
    {'cost': 1}
    """
    if takes_all(function):
        return extra
    names = inspect.signature(function).parameters
    return {name: value for name, value in extra.items() if name in names}


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an extra argument, by its name or as one of any.

    >>> takes(lambda load, *, cost: None, "cost"), takes(lambda load, *, cost: None, "tokens")
    (True, False)
    """
    return name in taken_by(function, {name: None})


def takes_all(function: Callable[..., Any]) -> bool:
    """Whether a function takes keyword arguments that it does not name."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
