"""Extra arguments of planners, as in optax: callers pass all of them, and each planner receives those that it names."""

import inspect
from collections.abc import Callable
from typing import Any

from relibra_jax.contract.types import Planner


def with_extra_args(planner: Planner) -> Planner:
    """Make a planner whose ``update`` accepts every extra argument and drops those that ``planner`` does not name.

    Source: ``optax.with_extra_args_support``.

    Args:
        planner: any planner.

    Returns:
        ``planner`` itself if its ``update`` accepts any keyword, otherwise a planner that wraps it.

    >>> plain = Planner(lambda topology, num_layers, *, key: (), lambda load, state, topology: (load, state))
    >>> with_extra_args(plain).update(5, (), None, refine=None, tokens=None)
    (5, ())
    """
    if accepts_any_keyword(planner.update):
        return planner

    def update(load: Any, state: Any, topology: Any, **extra: Any) -> tuple[Any, Any]:
        return planner.update(load, state, topology, **accepted_arguments(planner.update, extra))

    return planner._replace(update=update)


def accepted_arguments(function: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Select the extra arguments that a function accepts.

    Args:
        function: the function.
        extra: extra arguments by name.

    Returns:
        The arguments that the function names as parameters, or all if it accepts any keyword.

    >>> accepted_arguments(lambda load, *, cost: None, {"cost": 1, "tokens": 2})
    {'cost': 1}
    """
    if accepts_any_keyword(function):
        return extra
    names = inspect.signature(function).parameters
    return {name: value for name, value in extra.items() if name in names}


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function accepts an extra argument.

    Args:
        function: the function.
        name: the name of the argument.

    Returns:
        True if the function names the argument as a parameter or accepts any keyword.

    >>> accepts(lambda load, *, cost: None, "cost"), accepts(lambda load, *, cost: None, "tokens")
    (True, False)
    """
    return name in accepted_arguments(function, {name: None})


def accepts_any_keyword(function: Callable[..., Any]) -> bool:
    """Return whether a function accepts any keyword argument (``**kwargs``)."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
