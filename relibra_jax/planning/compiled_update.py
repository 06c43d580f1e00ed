"""Planners whose update is one compiled program, with jit around it or not."""

import functools
from typing import Any

import jax

from relibra_jax.contract.check import check_load
from relibra_jax.contract.planner import PlanRequest, Update
from relibra_jax.contract.types import Plan, Topology


def compiled_update(update: Update) -> Update:
    """Make the update of a planner check its load, and then run as one compiled program.

    Operation by operation, a planner compiles a hundred programs and more in its first call.

    Args:
        update: the update of a planner.
    """
    compiled = jax.jit(update, static_argnums=2)

    @functools.wraps(update)
    def checked(request: PlanRequest, state: Any, topology: Topology) -> tuple[Plan, Any]:
        check_load(request.load, topology)
        return compiled(request, state, topology)

    return checked
