"""What of each sample crosses between nodes, for every node where it might lie."""

import jax
import jax.numpy as jnp
import numpy as np
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
    groups: int = 1,
) -> Float[jax.Array, "B N groups"]:
    """Count what of each sample leaves its node if it lies in each of the nodes, over groups of layers.

    Tokens go to their experts' homes unless their node has a resident of them.

    Args:
        sample_load: token copies of each sample for each expert.
        tokens: the length of each sample.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        routes: some tokens of the batch.
        resident: the expert in each resident slot; None for none.
        cost: says whether dispatch is hierarchical.
        groups: into how many groups of neighbouring layers the counts go; their sum is the mean over layers.

    Returns:
        Distinct tokens for each other node with ``routes`` and hierarchical dispatch, else token copies over top-k:
        a sample that sends all its copies to one other node counts as many as it has tokens in both.
    """
    nodes, experts = topology.num_nodes, topology.num_experts
    home_node = jnp.asarray(home) // (experts // nodes)
    held = home_node[:, None] == jnp.arange(nodes)[None, :, None]  # [L N E]
    if resident is not None:
        copied = resident.reshape(*resident.shape[:2], -1)
        layer, node = jnp.arange(len(home))[:, None, None], jnp.arange(nodes)[None, :, None]
        held = held.at[layer, node, jnp.where(copied == EMPTY, experts, copied)].set(True, mode="drop")
    length = jnp.asarray(tokens, jnp.float32)
    group = np.arange(len(home)) * groups // len(home)
    in_group = jnp.asarray(group[:, None] == np.arange(groups), jnp.float32) / len(home)
    if routes is None or cost is None or not cost.hierarchical:
        load = jnp.asarray(sample_load, jnp.float32)
        away = jnp.einsum("ble,lne,lc->bnc", load, (~held).astype(jnp.float32), in_group)
        copies = jnp.maximum(load.sum((1, 2)) / len(home), 1)
        return away * (length / copies)[:, None, None]
    away = _distinct_crossings(jnp.asarray(routes.expert_ids, jnp.int32), home_node, held, in_group)
    sample = jnp.where(routes.sample == EMPTY, len(length), routes.sample)
    # A sample of few sampled tokens is taken for a common one to the extent of one token.
    total = jnp.tile(away.mean(0, keepdims=True), (len(length), 1, 1)).at[sample].add(away, mode="drop")
    number = jnp.ones(len(length), jnp.float32).at[sample].add(1, mode="drop")
    return total * (length / number)[:, None, None]


def _distinct_crossings(
    ids: Int[jax.Array, "Q L K"],
    home_node: Int[jax.Array, "L E"],
    held: Bool[jax.Array, "L N E"],
    in_group: Float[jax.Array, "L groups"],
) -> Float[jax.Array, "Q N groups"]:
    """Other nodes that each token visits if it lies in each node, over groups of layers."""
    nodes = held.shape[1]

    def one_layer(total, layer):
        ids, home_node, held, in_group = layer
        goes_to = home_node[ids][:, None] == jnp.arange(nodes)[None, :, None]  # [Q N K]
        leaves = ~held[:, ids].swapaxes(0, 1)  # [Q N K]
        visits = (goes_to[:, None] & leaves[:, :, None]).any(-1)  # [Q, where it lies, where it goes]
        return total + visits.sum(-1, dtype=jnp.float32)[..., None] * in_group[None, None], None

    nothing = jnp.zeros((len(ids), nodes, in_group.shape[1]), jnp.float32)
    layers = (ids.swapaxes(0, 1), home_node, held, in_group)
    return jax.lax.scan(one_layer, nothing, layers)[0]
