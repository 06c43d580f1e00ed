"""An estimate of the tokens that each rank sends to each node under a plan, from sampled routes or from loads alone.

`relibra_jax.routing.visits.node_visits` counts them exactly, which takes much longer than a plan. Here every sampled
token sends its copies where the quotas of the nodes say: first to its own node as far as that serves the expert, then
to the others in proportion to what they serve beyond their own tokens. An expert that several nodes serve for a node is
divided over the tokens in `LEVELS` steps.
"""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.types import EMPTY, BatchPlan, Topology
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.routes import Routes, place_routes

LEVELS: Final = 4
"""The number of steps in which the copies of an expert are divided over nodes."""
NODE_WEIGHT: Final = 16
"""The number of sampled tokens at which the mean of a rank counts as much as that of its node."""
MOST_TOKENS: Final = 8192
"""The most sampled tokens that are followed."""


def estimate_visits(
    batch: Batch, batch_plan: BatchPlan, topology: Topology, *, striped: bool
) -> Float[jax.Array, "M L P N"]:
    """Estimate the tokens that each rank sends to each node. Works under jit.

    Args:
        batch: the samples of the batch. Without routes, the experts of a token are taken to be independent.
        batch_plan: the plan and its load.
        topology: the expert-parallel group.
        striped: whether the ranks of a node deal their tokens to each other.

    Returns:
        The tokens. The entry of a rank's own node counts all tokens of the rank.
    """
    nodes, local = topology.num_nodes, topology.ranks_per_node
    sample = jnp.asarray(batch_plan.assignment.sample)
    lengths = jnp.append(jnp.asarray(batch.lengths, jnp.float32), 0)
    tokens = lengths[jnp.where(sample == EMPTY, len(lengths) - 1, sample)].sum(-1)  # [M N G]
    if striped:
        tokens = jnp.broadcast_to(tokens.mean(-1, keepdims=True), tokens.shape)
    if batch.routes is None:
        share = _share_of_loads(batch, batch_plan, topology)
    else:
        share = _share_of_routes(batch.routes, batch_plan, topology, striped=striped)
    stays = np.repeat(np.eye(nodes, dtype=bool), local, 0)[None, None]
    share = jnp.where(stays, 1.0, share)
    return share * tokens.reshape(len(tokens), 1, nodes * local, 1)


def _served(batch_plan: BatchPlan, topology: Topology) -> tuple[jax.Array, jax.Array]:
    """Return the copies that each node has and those that it serves, ``[M, L, N, E]``."""
    plan, experts = batch_plan.plan, topology.num_experts
    supply = jnp.asarray(batch_plan.load, jnp.float32).sum(3)
    slot_expert = jnp.asarray(plan.slot_expert).reshape(*supply.shape[:3], -1)
    quota = jnp.asarray(plan.quota, jnp.float32).reshape(slot_expert.shape)
    place = tuple(axis[..., None] for axis in jnp.ogrid[tuple(slice(0, size) for size in supply.shape[:3])])
    index = jnp.where(slot_expert == EMPTY, experts, slot_expert)
    return supply, jnp.zeros_like(supply).at[(*place, index)].add(quota, mode="drop")


def _share_of_loads(batch: Batch, batch_plan: BatchPlan, topology: Topology) -> Float[jax.Array, "M L P N"]:
    supply, served = _served(batch_plan, topology)
    top_k = batch.sample_load[:, :1].sum() / jnp.maximum(jnp.asarray(batch.lengths).sum(), 1)
    own = jnp.minimum(supply, served)
    left, free = supply - own, served - own
    to_node = free / jnp.maximum(free.sum(2, keepdims=True), 1e-9)
    copies = jnp.einsum("mlne,mlte->mlnt", left, to_node, precision=jax.lax.Precision.HIGHEST)
    of_copies = copies / jnp.maximum(supply.sum(3, keepdims=True), 1e-9)
    share = 1 - (1 - jnp.clip(of_copies, 0, 1)) ** top_k
    return jnp.repeat(share, topology.ranks_per_node, axis=2)


def _share_of_routes(
    routes: Routes, batch_plan: BatchPlan, topology: Topology, *, striped: bool
) -> Float[jax.Array, "M L P N"]:
    nodes, local = topology.num_nodes, topology.ranks_per_node
    step = -(-len(routes.sample) // MOST_TOKENS)
    placed = place_routes(jax.tree.map(lambda leaf: jnp.asarray(leaf)[::step], routes), batch_plan.assignment)
    supply, served = (jnp.moveaxis(each, 1, 0) for each in _served(batch_plan, topology))
    micro_batches, count = supply.shape[1], len(placed.rank)
    known = placed.micro_batch != EMPTY
    micro_batch, rank = (jnp.where(known, each, 0) for each in (placed.micro_batch, placed.rank))
    level = jnp.arange(count) % LEVELS
    bins = jnp.where(known, micro_batch * nodes * local + rank, micro_batches * nodes * local)
    number = jnp.zeros(micro_batches * nodes * local, jnp.float32).at[bins].add(1, mode="drop")

    def one_layer(inputs: tuple[jax.Array, ...]) -> jax.Array:
        supply, served, ids = inputs
        target = _targets(supply, served)  # [M N E levels]
        place = (micro_batch[:, None], rank[:, None] // local, ids.astype(jnp.int32), level[:, None])
        goes_to = target[place]  # [Q K]
        visits = [(goes_to == node).any(1) for node in range(nodes)]
        hits = jnp.stack(visits, 1).astype(jnp.float32)
        return jnp.zeros((len(number), nodes), jnp.float32).at[bins].add(hits, mode="drop")

    hits = jax.lax.map(one_layer, (supply, served, jnp.moveaxis(jnp.asarray(placed.expert_ids), 1, 0)))
    hits = hits.reshape(-1, micro_batches, nodes, local, nodes)
    number = number.reshape(micro_batches, nodes, local, 1)
    on_node, all_tokens = hits.sum(3, keepdims=True), number.sum(2, keepdims=True)[None]
    in_batch = hits.sum((1, 3), keepdims=True) / jnp.maximum(number.sum((0, 2), keepdims=True)[None], 1)
    mean = (on_node + in_batch) / (all_tokens + 1)
    share = (hits + NODE_WEIGHT * mean) / (number[None] + NODE_WEIGHT)
    share = jnp.broadcast_to(mean, hits.shape) if striped else share
    return jnp.moveaxis(share.reshape(*hits.shape[:2], nodes * local, nodes), 0, 1)


def _targets(
    supply: Float[jax.Array, "M N E"], served: Float[jax.Array, "M N E"]
) -> Int[jax.Array, "M N E levels"]:
    """Return the node that serves the tokens of each node for each expert, in each of `LEVELS` equal parts of them."""
    own = jnp.minimum(supply, served)
    free = served - own
    until = jnp.cumsum(free, axis=1)  # over the nodes that serve
    at = (np.arange(LEVELS, dtype=np.float32) + 0.5)[None, None, None] / LEVELS * supply[..., None]
    beyond = at - own[..., None]
    left = jnp.maximum(supply - own, 1e-9)
    point = beyond / left[..., None] * until[:, -1:, :, None]
    target = (point[:, :, None] >= until[:, None, :, :, None]).sum(2)
    home = jnp.minimum(target, supply.shape[1] - 1)
    return jnp.where(beyond < 0, jnp.arange(supply.shape[1])[None, :, None, None], home).astype(jnp.int32)
