"""Megatron-LM's contiguous placement, the reference for all other planners."""

import functools

from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import Plan, Topology
from relibra_jax.planning.compiled_update import compiled_update
from relibra_jax.planning.replication import without_replicas


@functools.cache
def static() -> Planner:
    """Make a planner of Megatron-LM's contiguous placement: expert ``e`` has flat home slot ``e``, without copies.

    Returns:
        A Planner without state.

    >>> import jax.numpy as jnp
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> plan, _ = static().update(PlanRequest(load), (), topology)
    >>> plan.quota.tolist()
    [[[[[80, 10], [6, 4]]]]]
    """

    def init(topology: Topology, num_layers: int, *, key=None) -> tuple[()]:
        del topology, num_layers, key
        return ()

    @compiled_update
    def update(request: PlanRequest, state: tuple[()], topology: Topology) -> tuple[Plan, tuple[()]]:
        load = request.by_expert
        return without_replicas(load, contiguous_homes(topology, load.shape[1]), topology), state

    return Planner(init, update)
