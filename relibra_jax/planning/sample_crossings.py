"""What of each sample crosses between nodes, for every node where it might lie."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from relibra_jax.planning.token_sample import Routes
from relibra_jax.types import EMPTY, Array, Topology, UnitTimes


def crossings_by_node(
    sample_load: Int[Array, "B L E"],
    tokens: Int[Array, " B"],
    home: Int[Array, "L E"],
    topology: Topology,
    *,
    routes: Routes | None = None,
    resident: Int[Array, "L N G resident_slots"] | None = None,
    cost: UnitTimes | None = None,
) -> Float[jax.Array, "B N"]:
    """Count what of each sample leaves its node if it lies in each of the nodes, averaged over layers.

    Tokens go to their experts' homes unless their node has a resident of them.

    Args:
        sample_load: token copies of each sample for each expert.
        tokens: the length of each sample.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        routes: some tokens of the batch.
        resident: the expert in each resident slot; None for none.
        cost: says whether dispatch is hierarchical.

    Returns:
        Distinct tokens for each other node with ``routes`` and hierarchical dispatch, else token copies over top-k:
        a sample that sends all its copies to one other node counts as many as it has tokens in both.
    """
    nodes, experts = topology.num_nodes, topology.num_experts
    home_node = home // (experts // nodes)
    held = home_node[:, None] == jnp.arange(nodes)[None, :, None]  # [L N E]
    if resident is not None:
        copied = resident.reshape(*resident.shape[:2], -1)
        layer, node = jnp.arange(len(home))[:, None, None], jnp.arange(nodes)[None, :, None]
        held = held.at[layer, node, jnp.where(copied == EMPTY, experts, copied)].set(True, mode="drop")
    length = jnp.asarray(tokens, jnp.float32)
    if routes is None or cost is None or not cost.hierarchical:
        load = jnp.asarray(sample_load, jnp.float32)
        away = jnp.einsum("ble,lne->bn", load, (~held).astype(jnp.float32))
        return away * (length / jnp.maximum(load.sum((1, 2)), 1))[:, None]
    away = _distinct_crossings(jnp.asarray(routes.expert_ids), home_node, held)  # [Q N]
    sample = jnp.where(routes.sample == EMPTY, len(length), routes.sample)
    # A sample of few sampled tokens is taken for a common one to the extent of one token.
    common = away.mean(0)
    total = jnp.tile(common[None], (len(length), 1)).at[sample].add(away, mode="drop")
    number = jnp.ones(len(length), jnp.float32).at[sample].add(1, mode="drop")
    return total / number[:, None] * length[:, None]


def _distinct_crossings(
    ids: Int[jax.Array, "Q L K"], home_node: Int[jax.Array, "L E"], held: Bool[jax.Array, "L N E"]
) -> Float[jax.Array, "Q N"]:
    """Other nodes that each token visits if it lies in each node, averaged over layers."""
    nodes = held.shape[1]

    def one_layer(total, layer):
        ids, home_node, held = layer
        goes_to = home_node[ids][:, None] == jnp.arange(nodes)[None, :, None]  # [Q N K]
        leaves = ~held[:, ids].swapaxes(0, 1)  # [Q N K]
        visits = (goes_to[:, None] & leaves[:, :, None]).any(-1)  # [Q, where it lies, where it goes]
        return total + visits.sum(-1, dtype=jnp.float32), None

    nothing = jnp.zeros((len(ids), nodes), jnp.float32)
    layers = (ids.swapaxes(0, 1).astype(jnp.int32), home_node, held)
    total, _ = jax.lax.scan(one_layer, nothing, layers)
    return total / len(home_node)
