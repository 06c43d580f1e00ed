"""Planners that never move a home: Megatron-LM's placement, and a replication rule on top of it.

UltraEP, LLEP and MoonEP decide in the layer, from loads that the router has just produced. Homes stay where the
checkpoint put them, so all that such a system brings to a plan is a rule for one domain.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from relibra_jax.plan import expert_totals
from relibra_jax.plan_check import check_load
from relibra_jax.planning.per_node import plan_per_node
from relibra_jax.planning.replication import without_replicas
from relibra_jax.types import Planner, Topology

type Replicate = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]
"""``(load[P H], replica_slots) -> (replica[P R], quota[P S])`` in a domain, R of 1 or more, as `per_node.Rule`."""


def replicate_contiguous(replicate: Replicate, *, across_nodes: bool) -> Planner:
    """A planner without state that keeps contiguous homes and replicates by the true load of every micro-batch.

    Args:
        replicate: the replication rule of one domain.
        across_nodes: whether all ranks together are one domain; otherwise every node is one.

    Returns:
        A Planner whose state is empty.
    """

    def init(topology: Topology, num_layers: int, *, key=None) -> tuple[()]:
        del topology, num_layers, key
        return ()

    def update(load, state, topology: Topology):
        check_load(load, topology)
        load = expert_totals(load)
        home = jnp.broadcast_to(jnp.arange(topology.num_experts, dtype=jnp.int32), load.shape[1:])
        if not topology.replica_slots:
            return without_replicas(load, home, topology), state

        def rule(load, _):
            return replicate(load, topology.replica_slots)

        return plan_per_node(rule, load, load, home, topology, across_nodes=across_nodes), state

    return Planner(init, update)
