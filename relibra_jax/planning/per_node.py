"""Apply a replication rule in every node, of every layer and micro-batch, and make a Plan of what comes out.

A rule is written for one *domain*, the ranks among which replicas may go: a node, or all ranks together where replicas
may cross nodes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num

from relibra_jax.plan import assemble_plan, home_layout
from relibra_jax.types import EMPTY, Array, Plan, Topology

type Rule = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""``(load[P H], known[P H]) -> (replica[P R], quota[P S])`` for a domain of P ranks with H experts each, S = H + R;
``replica`` counts the domain's home slots, EMPTY for none, and quotas sum to ``load``. No rule knows residents."""


def plan_per_node(
    rule: Rule,
    load: Num[Array, "M L E"],
    known: Num[Array, "#M L E"],
    home: Int[Array, "L E"],
    topology: Topology,
    *,
    across_nodes: bool = False,
) -> Plan:
    """Run a replication rule in every domain of every layer and micro-batch.

    Args:
        rule: the replication rule of one domain.
        load: true loads of the experts, which the quotas have to sum to.
        known: the loads that the choice of replicas may look at; one row serves all micro-batches.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        across_nodes: whether all ranks together are one domain; otherwise every node is one.

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

    def one_layer(load, known, layout):
        return jax.vmap(lambda slots: rule(load[slots], known[slots]))(layout)

    layers = jax.vmap(one_layer)
    if known.shape[0] == 1:
        replica, quota = jax.vmap(layers, (0, None, None))(load, known[0], layout)
    else:
        replica, quota = jax.vmap(layers, (0, 0, None))(load, known, layout)
    first = jnp.arange(domains, dtype=jnp.int32) * (topology.num_experts // domains)
    replica = jnp.where(replica == EMPTY, EMPTY, replica + first[None, None, :, None, None])
    ranks = (*load.shape[:2], topology.num_nodes, topology.ranks_per_node)
    replica, quota = replica.reshape(*ranks, replica.shape[-1]), quota.reshape(*ranks, quota.shape[-1])
    return assemble_plan(home, replica, quota, topology)


def plan_held(
    rule: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    load: Int[Array, "M L N E"],
    home: Int[Array, "L E"],
    resident: Int[Array, "L N G B"],
    topology: Topology,
) -> Plan:
    """Run a replication rule in every node that holds residents beside its homes.

    Args:
        rule: ``load[P H+B] -> (replica[P R], quota[P S])``; a node holds every expert once at most, so that it makes no
            difference which of them are residents.
        load: token copies of each expert that each node computes.
        home: flat home slot of each expert.
        resident: the expert in each resident slot, EMPTY for none.
        topology: the expert-parallel group.

    Returns:
        A Plan.
    """
    held = jnp.concatenate([home_layout(home, topology), resident], axis=-1)  # [L N G held]

    def one_node(load, held):
        replica, quota = rule(jnp.where(held == EMPTY, 0, load[held]))
        return jnp.where(replica == EMPTY, EMPTY, held.ravel()[replica]), quota

    copied, quota = jax.vmap(jax.vmap(jax.vmap(one_node)), (0, None))(load, held)

    def home_slot(home, experts):
        return jnp.where(experts == EMPTY, EMPTY, home[experts])

    replica = jax.vmap(home_slot, (0, 1), 1)(home, copied)
    return assemble_plan(home, replica, quota, topology, resident=jax.vmap(home_slot)(home, resident))


def merge_copies(
    replica: Int[jax.Array, "P R"], quota: Int[jax.Array, "P S"]
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Give the tokens of copies that meet on a rank to the first of them, and drop copies without tokens."""
    ranks, room = replica.shape
    homes = quota.shape[1] - room
    own = (jnp.arange(ranks * homes, dtype=jnp.int32)).reshape(ranks, homes)
    slots = jnp.concatenate([own, replica], -1)
    same = (slots[:, :, None] == slots[:, None, :]) & (slots != EMPTY)[:, None, :]
    first = jnp.argmax(same, axis=1)
    keeper = first == jnp.arange(slots.shape[1])[None]
    merged = jnp.where(keeper, (same * quota[:, None, :]).sum(-1), 0)
    held = keeper & (merged > 0) & (slots != EMPTY)
    return jnp.where(held[:, homes:], replica, EMPTY), merged
