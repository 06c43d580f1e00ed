"""Split the token copies of each expert over the nodes that hold it, as home or as resident.

The code is for one layer of one micro-batch; callers vmap it. At first a token copy is computed in its own node if that
holds the expert, otherwise at the expert's home. Then the fullest node passes quota to the emptiest node that shares an
expert with it, until no node is above the allowed load. It first passes copies of other nodes' tokens, which cross
anyway, and only then copies of its own tokens. All arithmetic is in integers and exact.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

TRANSFERS: Final = 6
"""The most transfers per node. On recorded loads the second half of them changes nothing."""


def split_nodes(
    supply: Int[jax.Array, "N E"],
    holds: Bool[jax.Array, "N E"],
    home_node: Int[jax.Array, " E"],
    *,
    tolerance: float = 0.0,
) -> Int[jax.Array, "N E"]:
    """Choose the number of token copies of each expert that each node computes.

    Args:
        supply: the number of token copies by the node that holds them.
        holds: whether a node holds the expert, as home or as resident.
        home_node: the node of each expert's home.
        tolerance: how far a node load may exceed the mean to save crossings, as a fraction of the mean.

    Returns:
        The number of token copies, int32. It is 0 if the node does not hold the expert, and its sum over nodes is the
        supply of the expert.

    >>> supply, home = jnp.array([[8, 0], [8, 0]]), jnp.array([0, 1])
    >>> split_nodes(supply, jnp.array([[True, False], [True, True]]), home).tolist()  # a resident of 0 on node 1
    [[8, 0], [8, 0]]
    """
    nodes = len(supply)
    index = jnp.arange(nodes)
    local = jnp.where(holds, supply, 0)
    start = local + jnp.where(home_node[None] == index[:, None], (supply - local).sum(0, keepdims=True), 0)
    total = start.sum(dtype=jnp.int32)
    # An integer of at most the mean times 1 + tolerance, at least the mean and at most the total.
    mean = -(-total // nodes)
    allowed = mean + jnp.minimum(jnp.floor(total / nodes * tolerance).astype(jnp.int32), total - mean)

    def transfer(carry):
        quota, stuck, count = carry
        load = quota.sum(1, dtype=jnp.int32)
        full = jnp.where(stuck, -1, load).argmax()
        candidates = jnp.where(holds[full], quota[full], 0)
        shared = jnp.where(holds & (index[:, None] != full), candidates[None], 0)
        empty = jnp.where(shared.sum(1, dtype=jnp.int32) > 0, load, load[full]).argmin()
        gap = load[full] - load[empty]
        gap = jnp.minimum(gap - gap // 2, load[full] - allowed)
        foreign = jnp.minimum(jnp.maximum(quota[full] - supply[full], 0), shared[empty])
        amounts = _take(foreign, gap)
        amounts += _take(shared[empty] - amounts, gap - amounts.sum(dtype=jnp.int32))
        amounts = jnp.where(load[full] - load[empty] > 1, amounts, 0)
        has_moved = amounts.sum(dtype=jnp.int32) > 0
        quota = (
            quota
            + jnp.where((index == empty)[:, None], amounts, 0)
            - jnp.where((index == full)[:, None], amounts, 0)
        )
        return quota, ~has_moved & (stuck | (index == full)), count + 1

    def above(carry):
        quota, stuck, count = carry
        load = quota.sum(1, dtype=jnp.int32)
        return (count < TRANSFERS * nodes) & (jnp.where(stuck, 0, load) > allowed).any()

    none_stuck = jnp.zeros(nodes, bool)
    return jax.lax.while_loop(above, transfer, (start.astype(jnp.int32), none_stuck, jnp.int32(0)))[0]


def _take(amounts: Int[jax.Array, " E"], total: Int[jax.Array, ""]) -> Int[jax.Array, " E"]:
    """Take ``total`` from the amounts, the first ones first."""
    before = jnp.cumsum(amounts, dtype=jnp.int32) - amounts
    return jnp.clip(total - before, 0, amounts)
