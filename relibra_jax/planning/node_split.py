"""How many copies of each expert each node computes, where residents leave a choice.

Written for one layer of one micro-batch; callers vmap it. Tokens start where they cost no crossing: in their own node
if it holds their expert, at the expert's home otherwise. Then the fullest node hands quota to the emptiest that shares
an expert with it, until no node is above what is allowed. It hands over first what crosses anyway, the copies of other
nodes' tokens, and what lies in the node only then. Integers, exact.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

TURNS: Final = 6
"""Hand-overs for each node, at most. On recorded loads the second half changes nothing."""


def split_nodes(
    supply: Int[jax.Array, "N E"],
    held: Bool[jax.Array, "N E"],
    home_node: Int[jax.Array, " E"],
    *,
    tolerance: float = 0.0,
) -> Int[jax.Array, "N E"]:
    """Choose the token copies of each expert that each node computes.

    Args:
        supply: token copies by the node where they lie.
        held: whether a node holds the expert, as home or as resident.
        home_node: the node of each expert's home.
        tolerance: how far above the mean node load a node may go for fewer crossings.

    Returns:
        Token copies, int32; 0 where the expert is not held, and summed over nodes the supply of every expert.

    >>> supply, home = jnp.array([[8, 0], [8, 0]]), jnp.array([0, 1])
    >>> split_nodes(supply, jnp.array([[True, False], [True, True]]), home).tolist()  # a resident of 0 on node 1
    [[8, 0], [8, 0]]
    """
    nodes = len(supply)
    index = jnp.arange(nodes)
    stays = jnp.where(held, supply, 0)
    start = stays + jnp.where(home_node[None] == index[:, None], (supply - stays).sum(0, keepdims=True), 0)
    total = start.sum(dtype=jnp.int32)
    # Whole numbers of at most the mean times 1 + tolerance, never below the mean, and never above all there are.
    mean = -(-total // nodes)
    allowed = mean + jnp.minimum(jnp.floor(total / nodes * tolerance).astype(jnp.int32), total - mean)

    def turn(carry):
        quota, stuck, turns = carry
        load = quota.sum(1, dtype=jnp.int32)
        full = jnp.where(stuck, -1, load).argmax()
        here = jnp.where(held[full], quota[full], 0)
        shared = jnp.where(held & (index[:, None] != full), here[None], 0)
        empty = jnp.where(shared.sum(1, dtype=jnp.int32) > 0, load, load[full]).argmin()
        gap = load[full] - load[empty]
        gap = jnp.minimum(gap - gap // 2, load[full] - allowed)
        foreign = jnp.minimum(jnp.maximum(quota[full] - supply[full], 0), shared[empty])
        given = _take(foreign, gap)
        given += _take(shared[empty] - given, gap - given.sum(dtype=jnp.int32))
        given = jnp.where(load[full] - load[empty] > 1, given, 0)
        moved = given.sum(dtype=jnp.int32) > 0
        quota = (
            quota
            + jnp.where((index == empty)[:, None], given, 0)
            - jnp.where((index == full)[:, None], given, 0)
        )
        return quota, ~moved & (stuck | (index == full)), turns + 1

    def above(carry):
        quota, stuck, turns = carry
        load = quota.sum(1, dtype=jnp.int32)
        return (turns < TURNS * nodes) & (jnp.where(stuck, 0, load) > allowed).any()

    nothing = jnp.zeros(nodes, bool)
    return jax.lax.while_loop(above, turn, (start.astype(jnp.int32), nothing, jnp.int32(0)))[0]


def _take(amounts: Int[jax.Array, " E"], wanted: Int[jax.Array, ""]) -> Int[jax.Array, " E"]:
    """So much of the amounts as is wanted, the first ones first."""
    before = jnp.cumsum(amounts, dtype=jnp.int32) - amounts
    return jnp.clip(wanted - before, 0, amounts)
