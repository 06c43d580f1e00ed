"""Count the crossings of each sample, for every node to which it may be assigned."""

import functools
import math
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from relibra_jax.contract.planner import Placement
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.residents import homes_on_nodes, nodes_holding

MOST_VISITS: Final = 1 << 22
"""The most visits counted at a time, over all groups of layers, if the number of tokens divides by a power of two."""


@functools.partial(jax.jit, static_argnames=("topology", "hierarchical", "groups"))
def crossings_by_node(
    batch: Batch, placement: Placement, topology: Topology, *, hierarchical: bool, groups: int = 1
) -> Float[jax.Array, "B N N groups"]:
    """Count the tokens that each sample sends to other nodes, for each node that may hold it, over groups of layers.

    Tokens go to their experts' homes unless their node holds the expert as a resident.

    Args:
        batch: the samples of the batch.
        placement: the homes of experts, and the residents.
        topology: the expert-parallel group.
        hierarchical: whether a token crosses to a node once. Otherwise each of its copies does.
        groups: the number of groups of neighbouring layers. The sum over groups is the mean over layers.

    Returns:
        The counts by the node that holds the sample and the node to which it sends; 0 if they are the same. With
        routes and hierarchical dispatch they are distinct tokens, otherwise token copies divided by top-k. In both
        units, a sample that sends all its copies to one other node counts all its tokens.
    """
    samples, layers, _ = batch.sample_load.shape
    nodes, length = topology.num_nodes, jnp.asarray(batch.lengths, jnp.float32)
    leaves = _leaves(placement, topology)
    bounds = np.arange(groups + 1) * layers // groups
    routes = batch.routes
    if routes is None or not hierarchical:
        load = jnp.asarray(batch.sample_load, jnp.float32)

        def copies(layer):
            goes = leaves[layer].astype(jnp.float32)
            return jnp.matmul(load[:, layer], goes, precision=jax.lax.Precision.HIGHEST)

        total = _sum_in_groups(copies, bounds, (samples, nodes**2))
        number = load.sum((1, 2)) / layers
    else:
        sample = jnp.where(routes.sample == EMPTY, samples, routes.sample)
        total = _distinct_tokens(jnp.asarray(routes.expert_ids), sample, leaves, bounds, num_samples=samples)
        # Shrink towards the batch mean with the weight of one token, for samples with few sampled tokens.
        total += total.sum(1, keepdims=True) / jnp.maximum((sample < samples).sum(dtype=jnp.int32), 1)
        number = jnp.ones(samples, jnp.float32).at[sample].add(1, mode="drop")
    total *= (length / jnp.maximum(number, 1) / layers)[None, :, None]
    return jnp.moveaxis(total, 0, -1).reshape(samples, nodes, nodes, groups)


def _leaves(placement: Placement, topology: Topology) -> Bool[jax.Array, "L E pairs"]:
    """Return whether an expert's tokens go from one node to another, for all pairs ``from * N + to``."""
    nodes, experts = topology.num_nodes, topology.num_experts
    at_home, holds = homes_on_nodes(placement.home, topology), nodes_holding(placement, topology)
    return (~holds[:, :, None] & at_home[:, None]).reshape(-1, nodes**2, experts).swapaxes(1, 2)


def _sum_in_groups(
    of_layer: Callable[[jax.Array], jax.Array], bounds: Int[np.ndarray, " ends"], shape: tuple[int, int]
) -> Float[jax.Array, "... rows pairs"]:
    """Sum ``of_layer`` over the layers of each group."""

    def one_group(ends):
        zeros = jnp.zeros(shape, jnp.float32)
        return jax.lax.fori_loop(ends[0], ends[1], lambda layer, total: total + of_layer(layer), zeros)

    return jax.lax.map(one_group, jnp.asarray(np.stack([bounds[:-1], bounds[1:]], 1), jnp.int32))


def _distinct_tokens(
    ids: Integer[jax.Array, "Q L K"],
    sample: Int[jax.Array, " Q"],
    leaves: Bool[jax.Array, "L E pairs"],
    bounds: Int[np.ndarray, " ends"],
    *,
    num_samples: int,
) -> Float[jax.Array, "... B pairs"]:
    """Count the sampled tokens of each sample that go from one node to another, over groups of layers.

    Each expert has one bit per pair of nodes; the bits of a token are the union of those of its experts.
    """
    layers, experts, pairs = leaves.shape
    bit = jnp.arange(32, dtype=jnp.uint32)
    word = jnp.pad(leaves, ((0, 0), (0, 0), (0, -pairs % 32))).reshape(layers, experts, -1, 32)
    word = (word.astype(jnp.uint32) << bit[None, None, None]).sum(-1, dtype=jnp.uint32)
    count = len(sample)
    parts = math.gcd(count, 1 << (count * pairs * (len(bounds) - 1) // MOST_VISITS).bit_length())

    def one_part(total, part):
        ids, sample = part

        def visits(layer):
            union = word[layer][ids[layer].astype(jnp.int32)]
            union = jax.lax.reduce(union, jnp.uint32(0), jax.lax.bitwise_or, (1,))
            bits = (union[..., None] >> bit[None, None]) & 1
            return bits.reshape(len(sample), -1)[:, :pairs].astype(jnp.float32)

        by_token = _sum_in_groups(visits, bounds, (len(sample), pairs))
        return total.at[:, sample].add(by_token, mode="drop"), None

    ids = ids.reshape(parts, -1, *ids.shape[1:]).swapaxes(1, 2)
    zeros = jnp.zeros((len(bounds) - 1, num_samples, pairs), jnp.float32)
    return jax.lax.scan(one_part, zeros, (ids, sample.reshape(parts, -1)))[0]
