"""What homes save in the batches to come: a move of an expert is paid for once and serves several batches.

How much of a saving lasts depends on how far the loads of the next batches are like those of this one. The batch before
tells: homes that are better for this batch and would have been better for the batch before are likely to be better for
the next one. What is better for this batch alone is taken to be chance, or to have come with a drift that goes on.
So homes are credited, for every later batch that they are expected to serve, with the smaller of their savings in this
batch and in the one before.

The savings are those of the busiest node, or of the busiest rank without replica slots, from the token copies of a
whole batch. They take little time, and a state to remember the batch before that is small.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import Array, Topology

UNSEEN: Final = 0.5
"""The share of a saving that is taken to last before there was any other batch."""


def later_savings(
    home: Int[Array, "L E"],
    before: Int[Array, "L E"],
    last_supply: Float[Array, "L N E"],
    request: PlanRequest,
    topology: Topology,
) -> Float[jax.Array, " L"]:
    """Estimate the seconds that new homes save in one later batch, compared with the homes of the batch before.

    Args:
        home: the new homes.
        before: the homes of the batch before.
        last_supply: the token copies of the batch before by the node that holds them; all 0 if there was none.
        request: the batch.
        topology: the expert-parallel group.

    Returns:
        The seconds for each layer, at least 0.
    """

    def saved(supply: jax.Array) -> jax.Array:
        old, new = (_seconds(supply, homes, request, topology) for homes in (before, home))
        return old - new

    last, now = jnp.asarray(last_supply), supply_of(request)
    saved_now = saved(now)
    saved_before = jnp.where(last.sum((1, 2)) > 0, saved(last), UNSEEN * saved_now)
    return jnp.maximum(jnp.minimum(saved_now, saved_before), 0.0)


def supply_of(request: PlanRequest) -> Float[jax.Array, "L N E"]:
    """Return the token copies of a batch for each expert, by the node that holds them."""
    return jnp.asarray(request.by_node, jnp.float32).sum(0)


def _seconds(
    supply: Float[jax.Array, "L N E"], home: Int[Array, "L E"], request: PlanRequest, topology: Topology
) -> Float[jax.Array, " L"]:
    """Estimate the seconds of experts and of crossings, if every token is computed at its expert's home."""
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
    return price.copy * fullest + price.crossing / top_k * busiest
