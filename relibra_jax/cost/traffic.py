"""Rows that ranks exchange under a plan, counted: over the slow network between nodes, and the fast one inside them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num

from relibra_jax.token_split import line_starts, source_quota
from relibra_jax.types import EMPTY, Array, LayerPlan, Topology


class Traffic(NamedTuple):
    """What each rank sends and receives for one layer of one micro-batch, in one direction of one pass."""

    slow: Num[Array, "M L N G"]
    """Rows over the slow network: the larger of sent and received."""
    fast: Num[Array, "M L N G"]
    """Rows over the fast network, likewise."""


def count_traffic(
    layer_plans: LayerPlan,
    topology: Topology,
    *,
    visits: Int[Array, "M L P N"] | None = None,
) -> Traffic:
    """Rows that ranks exchange at dispatch; combine moves the same rows back.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``.
        topology: the expert-parallel group.
        visits: None for the flat path, where every token copy travels by itself. For the hierarchical path, where
            a token crosses to a node once (to the rank of the same index there) and spreads inside it: the counts of
            `relibra_jax.node_visits.node_visits`.

    Returns:
        Traffic; ``slow`` in token copies, or in tokens for the hierarchical path.
    """
    plans = jax.tree.map(jnp.asarray, layer_plans)
    if visits is None:
        return jax.vmap(jax.vmap(functools.partial(_flat_traffic, topology=topology)))(plans)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    shape = plans.quota.shape[:2]

    def one(plan: LayerPlan) -> jax.Array:
        return source_quota(plan, topology).sum(-1).reshape(nodes, local, nodes, local)

    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), plans)
    sent = jax.lax.map(one, flat, batch_size=32)
    other_node = ~np.eye(nodes, dtype=bool)[None, :, None]
    other_local = ~np.eye(local, dtype=bool)[None, None, :, None, :]
    away = jnp.asarray(visits).reshape(-1, nodes, local, nodes) * other_node
    slow = jnp.maximum(away.sum(3), jnp.moveaxis(away.sum(1), 1, 2))
    spread = sent * other_local
    fast = jnp.maximum(jnp.moveaxis(spread.sum((1, 4)), 1, 2), spread.sum((1, 2)))
    return Traffic(slow.reshape(*shape, nodes, local), fast.reshape(*shape, nodes, local))


def _flat_traffic(plan: LayerPlan, *, topology: Topology) -> Traffic:
    """Traffic of one layer of one micro-batch, from what is left over after each round of the token split."""
    load = jnp.asarray(plan.load)
    ranks, (nodes, local) = topology.num_ranks, load.shape[:2]
    held = jnp.where(plan.slot_expert == EMPTY, 0, plan.slot_expert).reshape(ranks, -1)
    supply = load.reshape(ranks, -1)
    demand = jnp.zeros_like(supply).at[jnp.arange(ranks)[:, None], held].add(plan.quota.reshape(ranks, -1))
    own = jnp.minimum(supply, demand)
    wanted, offered = ((side - own).reshape(nodes, local, -1) for side in (supply, demand))

    def in_node(side, other):
        return jnp.clip(other.sum(1, keepdims=True) - line_starts(side), 0, side)

    sent, taken = in_node(wanted, offered), in_node(offered, wanted)
    slow = jnp.maximum((wanted - sent).sum(-1), (offered - taken).sum(-1))
    return Traffic(slow, jnp.maximum(sent.sum(-1), taken.sum(-1)))
