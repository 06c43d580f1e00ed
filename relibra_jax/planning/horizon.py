"""For how many batches a move of experts pays: it is paid for once and saves time as long as loads stay alike.

How long that is depends on how far the loads of the next batches are like those of this one. The batches before tell:
homes that are better for this batch and would have been as much better for the batches before are likely to be better
for the next ones too. What is better for this batch alone is taken to be chance.

The savings that are compared are those of the busiest node, or of the busiest rank without replica slots, from the
token copies of a whole batch. They take little time, and the mean of the batches before is small enough for a state.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import Array, Topology

UNSEEN: Final = 0.75
"""The share of a saving that is taken to last before there was any other batch."""
MEMORY: Final = 0.75
"""The weight of the batches before in the mean of all batches so far; the last batch has the rest."""


def batches_served(
    home: Int[Array, "L E"],
    before: Int[Array, "L E"],
    past: Float[Array, "L N E"],
    request: PlanRequest,
    topology: Topology,
    *,
    most: int,
) -> Float[jax.Array, " L"]:
    """Estimate the number of batches that new homes serve, compared with the homes of the batch before.

    Args:
        home: the new homes.
        before: the homes of the batch before.
        past: the mean of the batches before, as `remember` returns it; all 0 if there were none.
        request: the batch.
        topology: the expert-parallel group.
        most: the number if all of the saving lasts.

    Returns:
        The number for each layer, from 1 to ``most``.
    """

    def saved(supply: jax.Array) -> jax.Array:
        old, new = (_seconds(supply, homes, request, topology) for homes in (before, home))
        return old - new

    now, past = saved(_shares(request)), jnp.asarray(past)
    lasts = saved(past) / jnp.where(now > 0, now, 1.0)
    lasts = jnp.where(past.sum((1, 2)) > 0, jnp.clip(lasts, 0.0, 1.0), UNSEEN)
    return 1 + (most - 1) * jnp.where(now > 0, lasts, 0.0)


def remember(past: Float[Array, "L N E"], request: PlanRequest) -> Float[jax.Array, "L N E"]:
    """Return the mean of the batches so far: the share of each expert in a layer's copies, by the tokens' node.

    Args:
        past: the mean of the batches before; all 0 if there were none.
        request: the batch.
    """
    past, now = jnp.asarray(past), _shares(request)
    weight = jnp.where(past.sum((1, 2), keepdims=True) > 0, MEMORY, 0.0)
    return weight * past + (1 - weight) * now


def _shares(request: PlanRequest) -> Float[jax.Array, "L N E"]:
    supply = jnp.asarray(request.by_node, jnp.float32).sum(0)
    return supply / jnp.maximum(supply.sum((1, 2), keepdims=True), 1)


def _seconds(
    supply: Float[jax.Array, "L N E"], home: Int[Array, "L E"], request: PlanRequest, topology: Topology
) -> Float[jax.Array, " L"]:
    """Estimate the seconds a token copy of experts and of crossings, if each is computed at its expert's home."""
    price, nodes = request.price, topology.num_nodes
    top_k = 1 if request.routes is None or not price.hierarchical else request.routes.expert_ids.shape[-1]
    bins = nodes if topology.replica_slots else topology.num_ranks
    bin_of = jnp.asarray(home) // (topology.num_experts // bins)
    in_bin = (bin_of[:, :, None] == jnp.arange(bins)[None, None]).astype(jnp.float32)
    load = jnp.einsum("lne,leb->lnb", supply, in_bin, precision=jax.lax.Precision.HIGHEST)
    on_node = load.reshape(*load.shape[:2], nodes, -1).sum(-1)
    away = jnp.where(jnp.eye(nodes, dtype=bool)[None], 0.0, on_node)
    busiest = jnp.maximum(away.sum(2), away.sum(1)).max(1) / topology.ranks_per_node
    fullest = load.sum(1).max(1) * bins / topology.num_ranks
    return jnp.asarray(price.copy * fullest + price.crossing / top_k * busiest)
