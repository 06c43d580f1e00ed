"""Apply a replication rule to every node, layer and micro-batch, and combine the results into a Plan.

A rule is written for one *domain*, the set of ranks on which the replicas of an expert may be: a node, or all ranks
together if replicas may be on other nodes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num

from relibra_jax.contract.plan import assemble_plan, home_layout
from relibra_jax.contract.types import EMPTY, Array, Plan, Topology
from relibra_jax.support.argument_types import checks_arguments

type Rule = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""``(load[P H], expected[P H]) -> (replica[P R], quota[P S])`` for a domain of P ranks with H experts each, S = H + R.
``replica`` is the domain's home slot of each replica's expert, EMPTY for none. Quotas sum to ``load``. Rules do not
handle residents."""


@checks_arguments
def plan_per_node(
    rule: Rule,
    load: Num[Array, "M L E"],
    expected: Num[Array, "#M L E"],
    home: Int[Array, "L E"],
    topology: Topology,
    *,
    across_nodes: bool = False,
) -> Plan:
    """Run a replication rule in every domain of every layer and micro-batch.

    Args:
        rule: the replication rule of one domain.
        load: the true loads of the experts, to which the quotas sum.
        expected: the loads by which the rule may choose replicas. A single row applies to all micro-batches.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        across_nodes: whether all ranks together are one domain. Otherwise every node is one.

    Returns:
        A Plan whose resident slots are all EMPTY.

    Raises:
        ValueError: if ``load`` and ``home`` disagree on layers or experts.
    """
    domains = 1 if across_nodes else topology.num_nodes
    layers, experts = load.shape[1:]
    if home.shape != (layers, experts) or experts != topology.num_experts:
        raise ValueError(
            f"load{list(load.shape)} and home{list(home.shape)} must agree on layers and {topology.num_experts} experts"
        )
    layout = home_layout(home, topology).reshape(home.shape[0], domains, -1, topology.home_slots)

    def one_layer(load, expected, layout):
        return jax.vmap(lambda slots: rule(load[slots], expected[slots]))(layout)

    layers = jax.vmap(one_layer)
    if expected.shape[0] == 1:
        replica, quota = jax.vmap(layers, (0, None, None))(load, expected[0], layout)
    else:
        replica, quota = jax.vmap(layers, (0, 0, None))(load, expected, layout)
    first = jnp.arange(domains, dtype=jnp.int32) * (topology.num_experts // domains)
    replica = jnp.where(replica == EMPTY, EMPTY, replica + first[None, None, :, None, None])
    ranks = (*load.shape[:2], topology.num_nodes, topology.ranks_per_node)
    replica, quota = replica.reshape(*ranks, replica.shape[-1]), quota.reshape(*ranks, quota.shape[-1])
    return assemble_plan(home, replica, quota, topology)


def plan_per_node_with_residents(
    rule: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    load: Int[Array, "M L N E"],
    home: Int[Array, "L E"],
    resident: Int[Array, "L N G B"],
    topology: Topology,
) -> Plan:
    """Run a replication rule in every node, over its homes and residents together.

    Args:
        rule: the replication rule of one node, ``load[P H+B] -> (replica[P R], quota[P S])``. A node holds every expert
            at most once, so the rule need not distinguish homes from residents.
        load: the number of token copies of each expert that each node computes.
        home: flat home slot of each expert.
        resident: the expert in each resident slot, EMPTY for none.
        topology: the expert-parallel group.

    Returns:
        A Plan.
    """
    node_experts = jnp.concatenate([home_layout(home, topology), resident], axis=-1)  # [L N G held]

    def one_node(load, node_experts):
        replica, quota = rule(jnp.where(node_experts == EMPTY, 0, load[node_experts]))
        return jnp.where(replica == EMPTY, EMPTY, node_experts.ravel()[replica]), quota

    replica_experts, quota = jax.vmap(jax.vmap(jax.vmap(one_node)), (0, None))(load, node_experts)

    replica = jax.vmap(home_slots_of, (0, 1), 1)(home, replica_experts)
    return assemble_plan(home, replica, quota, topology, resident=jax.vmap(home_slots_of)(home, resident))


def home_slots_of(home: Int[Array, " E"], experts: Int[Array, "*slots"]) -> Int[jax.Array, "*slots"]:
    """Return the flat home slot of the expert in each slot, in one layer; EMPTY for none."""
    return jnp.where(experts == EMPTY, EMPTY, home[experts])


def merge_copies(
    replica: Int[jax.Array, "P R"], quota: Int[jax.Array, "P S"]
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Merge copies of an expert on the same rank into the first of them, and drop copies without tokens.

    Args:
        replica: the domain's home slot of the expert in each replica slot, EMPTY for none.
        quota: the token copies of each home slot and replica slot.

    Returns:
        ``replica`` and ``quota`` after merging.
    """
    ranks, replica_slots = replica.shape
    homes = quota.shape[1] - replica_slots
    home_slots = (jnp.arange(ranks * homes, dtype=jnp.int32)).reshape(ranks, homes)
    slots = jnp.concatenate([home_slots, replica], -1)
    same_expert = (slots[:, :, None] == slots[:, None, :]) & (slots != EMPTY)[:, None, :]
    first = jnp.argmax(same_expert, axis=1)
    keeper = first == jnp.arange(slots.shape[1])[None]
    merged = jnp.where(keeper, (same_expert * quota[:, None, :]).sum(-1), 0)
    used = keeper & (merged > 0) & (slots != EMPTY)
    return jnp.where(used[:, homes:], replica, EMPTY), merged
