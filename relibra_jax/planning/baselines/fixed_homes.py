"""Planners with fixed homes and a replication rule, for UltraEP, LLEP and MoonEP.

These systems decide inside the layer, from loads that the router has just produced. Homes stay where the checkpoint put
them, so a replication rule for one domain describes such a system completely.
"""

from collections.abc import Callable

import jax

from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import Plan, Topology
from relibra_jax.planning.baselines.kept_homes import KeptHomes, init_homes, kept_homes
from relibra_jax.planning.compiled_update import compiled_update
from relibra_jax.planning.per_node import plan_per_node
from relibra_jax.planning.replication import without_replicas

type Replicate = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]
"""``(load[P H], replica_slots) -> (replica[P R], quota[P S])`` in one domain, with R of at least 1; see
`relibra_jax.planning.per_node.Rule`."""


def replicate_from_fixed_homes(replicate: Replicate, *, packed: bool, across_nodes: bool) -> Planner:
    """Make a planner that keeps its homes and replicates by the true load of every micro-batch.

    Args:
        replicate: the replication rule of one domain.
        packed: whether to pack homes from the first batch's loads and keep them. Otherwise homes are contiguous.
        across_nodes: whether all ranks together are one domain. Otherwise every node is one.

    Returns:
        A Planner whose state is a KeptHomes.
    """

    def init(topology: Topology, num_layers: int, *, key: jax.Array | None = None) -> KeptHomes:
        if packed:
            return init_homes(topology, num_layers, key=key)
        return KeptHomes(contiguous_homes(topology, num_layers))

    @compiled_update
    def update(request: PlanRequest, state: KeptHomes, topology: Topology) -> tuple[Plan, KeptHomes]:
        load = request.by_expert
        home = kept_homes(load, state, topology) if packed else state.home
        if not topology.replica_slots:
            return without_replicas(load, home, topology), KeptHomes(home)

        def rule(load, _):
            return replicate(load, topology.replica_slots)

        return plan_per_node(rule, load, load, home, topology, across_nodes=across_nodes), KeptHomes(home)

    return Planner(init, update)
