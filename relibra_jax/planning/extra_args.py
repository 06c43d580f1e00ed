"""Extra arguments of planners, in the manner of optax: given to all, taken by those that have a use for them."""

import inspect
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
    parameters = inspect.signature(planner.update).parameters.values()
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return planner
    names = {parameter.name for parameter in parameters}

    def update(load: Any, state: Any, topology: Any, **extra: Any) -> tuple[Any, Any]:
        taken = {name: value for name, value in extra.items() if name in names}
        return planner.update(load, state, topology, **taken)

    return Planner(planner.init, update)
