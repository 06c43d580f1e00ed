"""Intra-batch replication: make a Plan from loads and homes, over all layers and micro-batches.

This is the intra-batch half of ReLibra (arXiv 2605.08639). `relibra_jax.planning.greedy_replication` solves a single
domain of ranks.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Plan, Topology
from relibra_jax.planning.greedy_replication import replicate_domain
from relibra_jax.planning.node_split import split_nodes
from relibra_jax.planning.per_node import plan_per_node, plan_per_node_with_residents
from relibra_jax.planning.residents import nodes_holding
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer, check_not_negative


@checks_arguments
def replicate_experts(
    request: PlanRequest,
    placement: Placement,
    topology: Topology,
    *,
    tolerance: float = 0.0,
    across_nodes: bool = False,
    min_tokens: int = 1,
    tile: int = 1,
    exact: bool = False,
    exports: Int[Array, ""] | int | None = None,
) -> Plan:
    """Choose the replicas and the token split of every layer and micro-batch jointly, for given homes.

    Works under jit and scan. No domain becomes more imbalanced than it would be without replicas. If nodes have
    residents, the nodes' quotas are chosen first (`relibra_jax.planning.node_split`): tokens stay in a node that holds
    a copy of their expert, as far as its load allows. Then every node replicates the experts that it holds, homes and
    residents alike.

    Source: the intra-batch half of ReLibra (arXiv 2605.08639); `relibra_jax.planning.greedy_replication` describes the
    method.

    Args:
        request: the request, of which only the load is used; below 2**31 token copies in each layer.
        placement: the homes and residents.
        topology: the expert-parallel group.
        tolerance: how far a rank load may exceed the smallest possible maximum, as a fraction of it, to save crossings
            and replicas: 0.05 allows 5%.
        across_nodes: whether a replica may be on any rank. Resident slots are then left EMPTY. Otherwise a replica is
            in a node that holds its expert.
        min_tokens: the fewest token copies that a replica computes.
        tile: the number of token copies per tile. Replicas compute whole tiles, and the remainder of an expert stays
            at home, so a grouped matrix product has no more partly filled tiles than without replicas.
        exact: whether to bring all ranks of a domain to within one ``tile`` of each other as far as slots allow, at
            the price of more replicas. Otherwise only the largest rank load counts.
        exports: the most experts of which a rank sends replicas in a layer and micro-batch; it may be an array. None
            sets no limit.

    Returns:
        A Plan; unused replica slots are EMPTY.

    Raises:
        ValueError: if ``min_tokens``, ``tile`` or ``exports`` is below 1 or does not fit int32, if ``tolerance`` is
            negative or given with ``exact``, or if the shapes disagree with the topology; an array is not checked.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> request = PlanRequest(jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]]))
    >>> placement = Placement.without_residents(jnp.array([[0, 1, 2, 3]]), topology)
    >>> plan = replicate_experts(request, placement, topology)
    >>> plan.slot_expert.tolist(), plan.quota.tolist()
    ([[[[[0, 1, -1], [2, 3, 0]]]]], [[[[[40, 10, 0], [6, 4, 40]]]]])
    """
    for name, value in (("min_tokens", min_tokens), ("tile", tile), ("exports", exports)):
        if value is not None and not isinstance(value, jax.Array):
            check_integer(name, value, least=1)
    check_not_negative("tolerance", tolerance)
    if exact and tolerance:
        raise ValueError(f"tolerance={tolerance} cannot be combined with exact=True; use tolerance=0")
    # The rest of the request is left out, so that all calls of one program share what was traced.
    load, placement = PlanRequest(jnp.asarray(request.load)), jax.tree.map(jnp.asarray, placement)
    return _replicate(
        load,
        placement,
        topology,
        across_nodes=across_nodes,
        tolerance=tolerance,
        min_tokens=min_tokens,
        tile=tile,
        exact=exact,
        exports=exports,
    )


@functools.partial(
    jax.jit,
    static_argnames=("topology", "across_nodes", "tolerance", "min_tokens", "tile", "exact"),
)
def _replicate(
    request: PlanRequest,
    placement: Placement,
    topology: Topology,
    *,
    across_nodes: bool,
    tolerance: float,
    min_tokens: int,
    tile: int,
    exact: bool,
    exports: Int[Array, ""] | int | None,
) -> Plan:
    replicate = functools.partial(
        replicate_domain,
        replica_slots=topology.replica_slots,
        tolerance=tolerance,
        min_tokens=min_tokens,
        tile=tile,
        exact=exact,
        exports=exports,
    )
    load, home = request.by_expert, placement.home
    if across_nodes or not topology.resident_slots:
        return plan_per_node(
            lambda load, _: replicate(load), load, load, home, topology, across_nodes=across_nodes
        )
    by_node = _split_by_node(request.by_node, placement, topology, tolerance=tolerance)
    return plan_per_node_with_residents(replicate, by_node, home, placement.resident, topology)


def _split_by_node(
    by_node: Int[jax.Array, "M L N E"], placement: Placement, topology: Topology, *, tolerance: float
) -> Int[jax.Array, "M L N E"]:
    """Choose the number of token copies of each expert that each node computes."""
    home_node = jnp.asarray(placement.home) // (topology.num_experts // topology.num_nodes)
    holds = nodes_holding(placement, topology)
    split = functools.partial(split_nodes, tolerance=tolerance)
    return jax.vmap(jax.vmap(split), (0, None, None))(by_node, holds, home_node)


@checks_arguments
def without_replicas(
    load: Int[Array, "M L E"],
    home: Int[Array, "L E"],
    topology: Topology,
) -> Plan:
    """Make the plan without copies: every home slot computes its expert's whole load.

    Args:
        load: the number of token copies for each expert, summed over ranks.
        home: flat home slot of each expert.
        topology: the expert-parallel group.

    Returns:
        A Plan whose replica and resident slots are all EMPTY.

    Raises:
        ValueError: if the shapes disagree with the topology.
    """

    def rule(load, _):
        empty = jnp.full((load.shape[0], topology.replica_slots), EMPTY, jnp.int32)
        return empty, jnp.concatenate([load, jnp.zeros_like(empty)], -1)

    load = jnp.asarray(load, jnp.int32)
    return plan_per_node(rule, load, load, home, topology, across_nodes=True)
